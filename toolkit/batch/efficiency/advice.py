"""Which flag to change, from what a run used of what it asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from toolkit.batch.efficiency.told import Advice, Efficiency, Share
from toolkit.rundir.states import RunState
from toolkit.slurm.times import format_slurm_time

if TYPE_CHECKING:
    from toolkit.batch.request import Request
    from toolkit.config.resolved import ResolvedJob

# Below these shares less is worth asking for; what is asked for then leaves so much above what was used.
_LOW, _ROOM = 0.5, 1.3
_HIGH = 0.9  # of memory: a little more, and the job is killed
_WALLTIME_STEP_S = 300
_GIB = 2**30


def advice_for(told: Efficiency, job: ResolvedJob, request: Request, *, starts: int) -> Iterator[Advice]:
    """What to ask for next time. Nothing is said of what is not known."""
    if told.status.state is RunState.COMPLETED and starts == max(1, told.status.starts) and starts == request.tasks:
        yield from _walltime(told.walltime_s, job.restart.warn_s)
    if not job.component:  # whose is what was too much, nobody has counted
        yield from _memory(told.memory_bytes)
        yield from _cpus(told.cpu_s, job)
    yield from _gpus(told, job)


def _walltime(time: Share, warn_s: int) -> Iterator[Advice]:
    """Of a run that came to its end in one start: a job that asks for less waits less."""
    if time.used is None or time.asked is None or time.share is None or time.share >= _LOW:
        return
    needed_s = math.ceil((time.used * _ROOM + warn_s) / _WALLTIME_STEP_S) * _WALLTIME_STEP_S
    if needed_s < time.asked:
        yield Advice(f"-t {format_slurm_time(needed_s)}", f"it was done after {_share(time)} of its walltime")


def _memory(memory: Share) -> Iterator[Advice]:
    if memory.used is None or memory.asked is None or memory.share is None:
        return
    needed = max(1, math.ceil(memory.used * _ROOM / _GIB))
    flag = f"--set job.mem_gb_per_node={needed}"
    if memory.share < _LOW and needed * _GIB < memory.asked:
        yield Advice(flag, f"the node with most used {_share(memory)} of its memory")
    elif memory.share > _HIGH:
        yield Advice(flag, f"the node with most used {_share(memory)} of its memory, and beyond it the job is killed")


def _cpus(cpu: Share, job: ResolvedJob) -> Iterator[Advice]:
    asked = job.job.cpus_per_rank
    if cpu.share is None or cpu.share >= _LOW or asked == 1:
        return
    needed = max(1, math.ceil(cpu.share * asked * _ROOM))
    if needed < asked:
        yield Advice(f"-c {needed}", f"its CPUs worked for {_share(cpu)} of their time")


def _gpus(told: Efficiency, job: ResolvedJob) -> Iterator[Advice]:
    gpus = told.gpus
    if gpus is None:
        return
    if gpus.idle and not job.component:
        used = math.ceil((gpus.count - gpus.idle) / gpus.count * job.job.gpus_per_node)
        yield Advice(f"--gpus-per-node {max(1, used)}", f"{gpus.idle} of {gpus.count} GPUs were never seen busy")
    elif gpus.utilisation < _LOW:
        run = told.status.run_id
        yield Advice(
            "--set train.profile_steps=20",
            f"its GPUs were busy for {gpus.utilisation:.0%} of the time; then `toolkit bench step --result {run}` says what they wait for",
        )
    if (
        gpus.memory_peak_bytes < _LOW * gpus.memory_bytes
        and "train.micro_batch" in job.origins
        and job.train.micro_batch
    ):
        flag = f"--set train.micro_batch={2 * job.train.micro_batch}"
        yield Advice(flag, f"{gpus.memory_peak_bytes / gpus.memory_bytes:.0%} of the GPUs' memory was used")


def _share(resource: Share) -> str:
    return f"{resource.share or 0.0:.0%}"
