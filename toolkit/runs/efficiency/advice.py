"""Advise which flags to change, by comparing used with requested resources."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from toolkit.errors import counted
from toolkit.metrics.limits import limit
from toolkit.metrics.step_advice import Advice
from toolkit.rundir.states import RunState
from toolkit.runs.efficiency.report import Efficiency, Share
from toolkit.slurm.array import write_array
from toolkit.slurm.times import format_slurm_time

if TYPE_CHECKING:
    from toolkit.config.resolved import ResolvedJob
    from toolkit.runs.record.job import Request

# If less than the share _LOW is used, the advice is to request the used amount times _MARGIN.
_LOW, _MARGIN, _HIGH = limit("request.low"), limit("request.margin"), limit("request.high")
_WALLTIME_STEP_S = 300
_LONGEST_LIST = 100  # characters; users would not type a longer task list
_GIB = 2**30


def advice_for(efficiency: Efficiency, job: ResolvedJob, request: Request, *, starts: int) -> Iterator[Advice]:
    """Yield what to request next time; resources whose use is unknown are omitted."""
    for flag, why in _requests(efficiency, job, request, starts):
        yield Advice(f"request {flag.partition('=')[0]}", why, flag, source="efficiency", effort="low")


def _requests(efficiency: Efficiency, job: ResolvedJob, request: Request, starts: int) -> Iterator[tuple[str, str]]:
    """Yield flags of `toolkit submit` and `resume` that request the required amount, each with the reason."""
    if (
        efficiency.status.state is RunState.COMPLETED
        and starts == max(1, efficiency.status.starts)
        and starts == request.tasks
    ):
        yield from _walltime(efficiency.walltime_s, job.restart.warn_s)
    if not job.component:  # the samples do not distinguish components
        yield from _memory(efficiency)
        yield from _cpus(efficiency, job)
    yield from _gpus(efficiency, job)


def _walltime(time: Share, warn_s: int) -> Iterator[tuple[str, str]]:
    """Advise on the walltime of a run that completed in one start: a shorter request waits less in the queue."""
    if time.used is None or time.asked is None or time.share is None or time.share >= _LOW:
        return
    needed_s = math.ceil((time.used * _MARGIN + warn_s) / _WALLTIME_STEP_S) * _WALLTIME_STEP_S
    if needed_s < time.asked:
        yield (f"-t {format_slurm_time(needed_s)}", f"it finished after {_share(time)} of its walltime")


def _memory(efficiency: Efficiency) -> Iterator[tuple[str, str]]:
    memory = efficiency.memory_bytes
    if memory.used is None or memory.asked is None or memory.share is None:
        return
    asked, needed = memory.asked, _memory_for(memory.used)
    reason = f"the node with the highest use needed {_share(memory)} of its memory"
    if memory.share < _LOW and needed * _GIB < asked:
        yield (_memory_flag(needed), reason)
        return
    if memory.share > _HIGH:
        yield (_memory_flag(needed), f"{reason}, and a job that exceeds its memory is killed")
    small = {one.task: one.memory_peak_bytes for one in efficiency.tasks if one.memory_peak_bytes < _LOW * asked}
    if small and (needed := _memory_for(max(small.values()))) * _GIB < asked:
        used = f"at most {max(small.values()) / asked:.0%} of their memory"
        yield from _some_tasks(small, efficiency, _memory_flag(needed), used)


def _memory_for(used: float) -> int:
    """Return GiB per node."""
    return max(1, math.ceil(used * _MARGIN / _GIB))


def _memory_flag(gib: int) -> str:
    return f"--set job.mem_gb_per_node={gib}"


def _cpus(efficiency: Efficiency, job: ResolvedJob) -> Iterator[tuple[str, str]]:
    """Advise on CPUs; for an array, by the busiest task, because all tasks get the same number."""
    asked = job.job.cpus_per_rank
    shares = {one.task: one.cpu_share for one in efficiency.tasks if one.cpu_share is not None}
    most = max(shares.values(), default=efficiency.cpu_s.share)
    if most is None or asked == 1:
        return
    if most < _LOW:
        needed = max(1, math.ceil(most * asked * _MARGIN))
        whose = "the CPUs of the busiest task" if shares else "its CPUs"
        if needed < asked:
            yield (f"-c {needed}", f"{whose} were busy for {most:.0%} of the time")
        return
    idle = {task: share for task, share in shares.items() if share < _LOW}
    if idle and (needed := max(1, math.ceil(max(idle.values()) * asked * _MARGIN))) < asked:
        yield from _some_tasks(
            idle, efficiency, f"-c {needed}", f"their CPUs for at most {max(idle.values()):.0%} of their time"
        )


def _some_tasks(tasks: Iterable[int], efficiency: Efficiency, flag: str, used: str) -> Iterator[tuple[str, str]]:
    """Advise to submit the less demanding tasks of an array separately."""
    small = sorted(tasks)
    numbers = write_array(small)
    if 2 * len(small) >= len(efficiency.tasks) and len(numbers) <= _LONGEST_LIST:
        why = (
            f"{len(small)} of {counted(len(efficiency.tasks), 'task')} used {used}; the others need what was requested"
        )
        yield (f"-a {numbers} {flag}", why)


def _gpus(efficiency: Efficiency, job: ResolvedJob) -> Iterator[tuple[str, str]]:
    gpus = efficiency.gpus
    if gpus is None:
        return
    if gpus.idle and not job.component:
        used = math.ceil((gpus.count - gpus.idle) / gpus.count * job.job.gpus_per_node)
        yield (f"--gpus-per-node {max(1, used)}", f"{gpus.idle} of {gpus.count} GPUs were idle in every sample")
    elif gpus.utilisation < _LOW:
        run = efficiency.status.run_id
        yield (
            "--set train.profile_steps=20",
            f"its GPUs were busy for {gpus.utilisation:.0%} of the time; then `toolkit bench step --result {run}` shows what they wait for",
        )
    if (
        gpus.memory_peak_bytes < _LOW * gpus.memory_bytes
        and "train.micro_batch" in job.origins
        and job.train.micro_batch
        and not job.train.is_auto
    ):
        flag = f"--set train.micro_batch={2 * job.train.micro_batch}"
        yield (flag, f"the GPUs used {gpus.memory_peak_bytes / gpus.memory_bytes:.0%} of their memory")


def _share(resource: Share) -> str:
    return f"{resource.share or 0.0:.0%}"
