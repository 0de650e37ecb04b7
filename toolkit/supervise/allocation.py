"""What the supervisor knows of its allocation: the job id, the nodes, the end, and why Slurm wants it gone."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from toolkit.errors import NotFoundError, SchedulerRefusedError
from toolkit.rundir.states import Cause, Next
from toolkit.slurm.clusters import cluster_of_allocation
from toolkit.slurm.commands import Slurm, TimedOutError
from toolkit.slurm.hostlist import expand_hostlist
from toolkit.slurm.records import NOTHING
from toolkit.slurm.states import base_state
from toolkit.supervise.log import say

ANSWER_S = 10.0  # for one question to Slurm
SILENCE_S = 30.0  # after it did not answer
END_SLACK_S = 45.0  # Slurm looks for time limits that are over every 30 s
_ENDED = {
    "CANCELLED": Cause.CANCELLED, "TIMEOUT": Cause.WALLTIME, "DEADLINE": Cause.WALLTIME,
    "NODE_FAIL": Cause.NODE_LOST, "COMPLETED": Cause.STOPPED,
}  # fmt: skip
STOP_GRACE_S = 22.0  # where KillWait is not known: what its default of 30 s leaves


def process_start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since boot (proc(5), stat field 22): tells a reused pid apart.

    Raises:
        ProcessLookupError: there is no such process, or only its unread exit code is left.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        raise ProcessLookupError(f"no process {pid}") from None
    fields = text.rpartition(")")[2].split()
    if fields[0] in "ZX":
        raise ProcessLookupError(f"process {pid} has ended")
    return int(fields[19])


@dataclass
class Allocation:
    """Where the supervisor lives. `job_id` is `local-<pid>` without Slurm; `ends_at` is 0 without a time limit.

    A task of an array has `ARRAY_NUMBER` as its job id: its own number may be the array's, and would mean all tasks.
    `task` is the run's number for it, which is another one where the array is a part of the run's.
    """

    job_id: str
    nodes: int
    in_slurm: bool
    is_batch: bool
    ends_at: float
    task: int | None = None
    node_list: str = ""  # as Slurm writes it
    of_components: tuple[int, ...] = ()  # nodes in each component of a heterogeneous job
    restarts: int = 0  # requeues before this start
    cluster: str = ""  # where Slurm's commands on this host need its name
    _silent_until: float = 0.0

    @property
    def nodes_of_components(self) -> tuple[int, ...]:
        """Nodes in each component; most jobs have one."""
        return self.of_components or (self.nodes,)

    def nodes_in_order(self) -> list[str]:
        """The nodes of a heterogeneous job, one component after the other; [] of any other."""
        return expand_hostlist(self.node_list) if self.of_components else []

    def ask(self, argv: Sequence[str]) -> str:
        """What a command of Slurm's prints; "" when it does not answer, and for a while after it did not.

        A job that is being ended has KillWait left, and each silence costs a third of that.
        """
        if time.monotonic() < self._silent_until:
            return ""
        try:
            return Slurm(cluster=self.cluster, timeout_s=ANSWER_S).call(argv).strip()
        except (NotFoundError, SchedulerRefusedError) as error:
            if isinstance(error, TimedOutError):
                self._silent_until = time.monotonic() + SILENCE_S
            say(f"Slurm does not say: {error}")
            return ""

    def ask_for(self, form: str) -> str:
        """Fields of this job, from squeue: unlike scontrol, every site's nodes have it.

        Of several components the first one's: they end, and are requeued, together.
        """
        said = self.ask(["squeue", "--noheader", f"--jobs={self.job_id}", f"--Format={form}", "--states=all"])
        return said.partition("\n")[0].strip()

    def left_s(self) -> float:
        """Seconds until the end, infinite without a limit."""
        return self.ends_at - time.time() if self.ends_at else float("inf")

    def look_again(self) -> bool:
        """Query Slurm for the end of the job, since its limit may have changed; True if the end has moved."""
        said = self.ask_for("EndTime") if self.in_slurm else ""
        if not said:
            return False
        before, self.ends_at = self.ends_at, _seconds_of(said)
        return abs(self.ends_at - before) > 1

    def next_start(self, *, by_requeue: bool) -> Next | None:
        """How this start can be followed by another one: only a batch job can be, and a requeue needs `scontrol`.

        `by_requeue` is false where the site lets no user requeue.
        """
        if not (self.in_slurm and self.is_batch):
            return None
        if by_requeue and shutil.which("scontrol"):
            return Next.REQUEUE
        return Next.FOLLOW_UP if shutil.which("sbatch") else None


def find_allocation(environ: Mapping[str, str], nodes: int) -> Allocation:
    """Read the allocation from Slurm's variables; `nodes` is the job's request, used if there is no allocation."""
    job_id = environ.get("SLURM_JOB_ID", "")
    if not job_id or environ.get("TOOLKIT_LOCAL"):
        return Allocation(f"local-{os.getpid()}", nodes, in_slurm=False, is_batch=False, ends_at=0.0)
    # Of several components Slurm's other variables tell the first one as if it were all.
    groups = range(int(environ.get("SLURM_HET_SIZE") or 0))
    of_components = tuple(int(environ[f"SLURM_JOB_NUM_NODES_HET_GROUP_{group}"]) for group in groups)
    lists = [environ[f"SLURM_JOB_NODELIST_HET_GROUP_{group}"] for group in groups]
    given = sum(of_components) or int(environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or nodes)
    task = environ.get("SLURM_ARRAY_TASK_ID", "")
    if task and environ.get("SLURM_ARRAY_JOB_ID"):
        job_id = f"{environ['SLURM_ARRAY_JOB_ID']}_{task}"
    first_task = int(environ.get("TOOLKIT_FIRST_TASK") or 0)
    # salloc's shell and srun's tasks have the job's variables too; only a batch script is requeued.
    is_batch = environ.get("TOOLKIT_IN_ALLOCATION", "") == ""
    allocation = Allocation(
        job_id,
        given,
        in_slurm=True,
        is_batch=is_batch,
        ends_at=float(environ.get("SLURM_JOB_END_TIME") or 0),
        task=first_task + int(task) if task else None,
        node_list=",".join(lists) or environ.get("SLURM_JOB_NODELIST", ""),
        of_components=of_components,
        restarts=int(environ.get("SLURM_RESTART_COUNT") or 0),
        cluster=cluster_of_allocation(environ),
    )
    if not allocation.ends_at:
        allocation.look_again()
    return allocation


def drop_memory(environ: MutableMapping[str, str]) -> None:
    """Keep srun from components' memory: where one asks per CPU and another per node, it would say that these exclude each
    other (22.05). Without an explicit request its step gets everything that the job has.
    """
    for name in [name for name in environ if name.startswith("SLURM_MEM_PER_")]:
        del environ[name]


def _seconds_of(end: str) -> float:
    """Slurm's local time, which is this host's, in seconds since the epoch; 0 where there is no end."""
    return 0.0 if end in NOTHING else datetime.fromisoformat(end).timestamp()


def why_terminated(allocation: Allocation) -> Cause | None:
    """Query Slurm for the reason of TERM; None if it is unknown.

    A job that is merely being preempted still counts as running there.
    """
    said = allocation.ask_for("State:|,RestartCnt:|,PreemptTime:|").split("|")
    if len(said) < 3:
        return None
    state, restarts, preempted = base_state(said[0]), said[1].strip(), said[2].strip()
    if state != "COMPLETING":
        return _ENDED.get(state, Cause.PREEMPTED)
    # That word hides why the job ends; what else is said of it does not.
    if preempted not in NOTHING or (restarts.isdigit() and int(restarts) > allocation.restarts):
        return Cause.PREEMPTED  # or requeued on request: either way Slurm begins it again
    if allocation.left_s() < END_SLACK_S:
        return Cause.WALLTIME
    # salloc's allocation ends with its shell or its terminal.
    return Cause.CANCELLED if allocation.is_batch else Cause.STOPPED


def is_in_grace_time(allocation: Allocation) -> bool:
    """Whether a preemption's grace time has begun: Slurm's TERM has then reached the ranks, and not us. A requeue ends it."""
    return allocation.ask_for("PreemptTime") not in NOTHING


def lost_nodes(allocation: Allocation) -> list[str]:
    """Nodes of the allocation that Slurm calls down, failed or silent; [] when it does not say."""
    if not allocation.in_slurm or not allocation.node_list:
        return []
    text = allocation.ask(["sinfo", "--noheader", "--Node", "--format=%N %T", f"--nodes={allocation.node_list}"])
    pairs = [line.split() for line in text.splitlines()]
    # A `*` says that the node does not answer (sinfo(1), NODE STATE CODES); Slurm calls it down a while later.
    return sorted({node for node, state in pairs if state.endswith("*") or state.startswith(("down", "fail"))})


def stop_grace_s(allocation: Allocation) -> float:
    """How long ranks may save after a cancel: KillWait, but for the time that the record of the end needs."""
    if not allocation.in_slurm:
        return STOP_GRACE_S
    text = allocation.ask(["scontrol", "show", "config"])
    match = re.search(r"^KillWait\s*=\s*(\d+)", text, re.MULTILINE)
    return max(5.0, float(match[1]) - 8.0) if match else STOP_GRACE_S
