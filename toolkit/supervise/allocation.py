"""The Slurm allocation that the supervisor runs in: its job id, nodes and end time, and why Slurm terminates it."""

import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from toolkit.errors import NotFoundError, SchedulerRefusedError
from toolkit.rundir.states import Cause, Next
from toolkit.slurm.commands import Slurm, TimedOutError
from toolkit.slurm.hostlist import expand_hostlist
from toolkit.slurm.job_facts import base_state
from toolkit.slurm.records import NOTHING, cluster_of_allocation
from toolkit.supervise.log import say
from toolkit.supervise.process_tree import running_below

ANSWER_S = 10.0  # timeout of one query to Slurm
SILENCE_S = 30.0  # time without queries after one that timed out
SIGNAL_S = 60.0  # timeout of the command that signals steps, whose repetition could send a second signal
SIGNAL_PERIOD_S = 5.0
END_SLACK_S = 45.0  # Slurm checks for exceeded time limits every 30 s
_ENDED = {
    "CANCELLED": Cause.CANCELLED, "TIMEOUT": Cause.WALLTIME, "DEADLINE": Cause.WALLTIME,
    "NODE_FAIL": Cause.NODE_LOST, "COMPLETED": Cause.STOPPED,
}  # fmt: skip
STOP_GRACE_S = 22.0  # time that ranks have to save if KillWait is unknown: most of 30 s, its default


@dataclass
class Allocation:
    """The allocation of the supervisor. `job_id` is `local-<pid>` without Slurm; `ends_at` is 0 without a time limit.

    For an array task `job_id` is ARRAYID_INDEX, because the plain job id of a task may be that of the array and then
    select all tasks. `task` is the task number within the run. It differs from INDEX if the run needs several arrays.
    """

    job_id: str
    nodes: int
    in_slurm: bool
    is_batch: bool
    ends_at: float
    task: int | None = None
    node_list: str = ""  # a Slurm host list
    of_components: tuple[int, ...] = ()  # number of nodes in each component of a heterogeneous job
    restarts: int = 0  # number of requeues before this start, as Slurm counts them
    cluster: str = ""  # name of the cluster if Slurm commands on this host need it
    _silent_until: float = 0.0

    @property
    def nodes_of_components(self) -> tuple[int, ...]:
        """The number of nodes in each component; most jobs have one component."""
        return self.of_components or (self.nodes,)

    def nodes_in_order(self) -> list[str]:
        """Return the nodes of a heterogeneous job, component by component; [] for any other job."""
        return expand_hostlist(self.node_list) if self.of_components else []

    def query(self, argv: Sequence[str]) -> str:
        """Return the output of a Slurm command; "" if it fails.

        After a time-out, queries are skipped for `SILENCE_S`: a terminated job has only KillWait left, 30 s by default,
        and each time-out costs a third of it.
        """
        if time.monotonic() < self._silent_until:
            return ""
        try:
            return Slurm(cluster=self.cluster, timeout_s=ANSWER_S).call(argv).strip()
        except (NotFoundError, SchedulerRefusedError) as error:
            if isinstance(error, TimedOutError):
                self._silent_until = time.monotonic() + SILENCE_S
            say(f"Slurm query failed: {error}")
            return ""

    def query_fields(self, form: str) -> str:
        """Return fields of this job from squeue, which every site, unlike scontrol, has on its compute nodes.

        For a heterogeneous job, these are the fields of the first component: all components end and requeue together.
        """
        answer = self.query(["squeue", "--noheader", f"--jobs={self.job_id}", f"--Format={form}", "--states=all"])
        return answer.partition("\n")[0].strip()

    def was_requeued(self) -> bool:
        """Query whether Slurm has requeued this job since it started."""
        restarts = self.query_fields("RestartCnt")
        return restarts.isdigit() and int(restarts) > self.restarts

    def left_s(self) -> float:
        """Return the seconds until the allocation ends; infinite without a time limit."""
        return self.ends_at - time.time() if self.ends_at else float("inf")

    def refresh_end(self) -> bool:
        """Query Slurm for the job's end time, since its time limit may have changed; return whether it differs."""
        answer = self.query_fields("EndTime") if self.in_slurm else ""
        if not answer:
            return False
        before, self.ends_at = self.ends_at, _seconds_of(answer)
        if before and abs(self.ends_at - before) > 1 and self.was_requeued():
            self.ends_at = before  # a program has requeued this job; Slurm reports the end of the next start, or none
        return abs(self.ends_at - before) > 1

    def next_start(self, *, by_requeue: bool) -> Next | None:
        """Return how another start can follow this one; None unless this is a batch job. A requeue needs `scontrol`.

        `by_requeue` is false if the site does not let users requeue.
        """
        if not (self.in_slurm and self.is_batch):
            return None
        if by_requeue and shutil.which("scontrol"):
            return Next.REQUEUE
        return Next.FOLLOW_UP if shutil.which("sbatch") else None


def find_allocation(environ: Mapping[str, str], nodes: int) -> Allocation:
    """Return the allocation that SLURM_* variables describe; without any, a local one with the requested `nodes`."""
    job_id = environ.get("SLURM_JOB_ID", "")
    if not job_id or environ.get("TOOLKIT_LOCAL"):
        return Allocation(f"local-{os.getpid()}", nodes, in_slurm=False, is_batch=False, ends_at=0.0)
    # For a heterogeneous job, the other SLURM_* variables describe the first component as if it were the whole job.
    groups = range(int(environ.get("SLURM_HET_SIZE") or 0))
    of_components = tuple(int(environ[f"SLURM_JOB_NUM_NODES_HET_GROUP_{group}"]) for group in groups)
    lists = [environ[f"SLURM_JOB_NODELIST_HET_GROUP_{group}"] for group in groups]
    given = sum(of_components) or int(environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or nodes)
    task = environ.get("SLURM_ARRAY_TASK_ID", "")
    if task and environ.get("SLURM_ARRAY_JOB_ID"):
        job_id = f"{environ['SLURM_ARRAY_JOB_ID']}_{task}"
    first_task = int(environ.get("TOOLKIT_FIRST_TASK") or 0)
    # A shell under salloc and srun tasks have the SLURM_* variables, too, but Slurm requeues only batch jobs.
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
        allocation.refresh_end()
    return allocation


def drop_memory(environ: MutableMapping[str, str]) -> None:
    """Remove SLURM_MEM_PER_*, so that a step uses all memory of the job. Else srun (22.05) rejects a heterogeneous job
    if one component sets memory per CPU and another per node.
    """
    for name in [name for name in environ if name.startswith("SLURM_MEM_PER_")]:
        del environ[name]


def _seconds_of(end: str) -> float:
    """Convert an end time that Slurm prints, in the local time zone, to seconds since the epoch; 0 if there is none."""
    return 0.0 if end in NOTHING else datetime.fromisoformat(end).timestamp()


def why_terminated(allocation: Allocation) -> Cause | None:
    """Return the cause for which Slurm sent SIGTERM; None if Slurm does not report one.

    During the grace time of a preemption, Slurm still reports the job as running.
    """
    answer = allocation.query_fields("State:|,RestartCnt:|,PreemptTime:|").split("|")
    if len(answer) < 3:
        return None
    state, restarts, preempted = base_state(answer[0]), answer[1].strip(), answer[2].strip()
    if state != "COMPLETING":
        return _ENDED.get(state, Cause.PREEMPTED)
    # The state COMPLETING hides why the job ends; RestartCnt and PreemptTime may show it.
    if preempted not in NOTHING or (restarts.isdigit() and int(restarts) > allocation.restarts):
        return Cause.PREEMPTED  # or requeued by a user; Slurm starts both again
    if allocation.left_s() < END_SLACK_S:
        return Cause.WALLTIME
    # An salloc allocation also ends when its shell exits or its terminal is closed.
    return Cause.CANCELLED if allocation.is_batch else Cause.STOPPED


def is_in_grace_time(allocation: Allocation) -> bool:
    """Return whether this is the grace time of a preemption, for which Slurm sends SIGTERM only to the ranks."""
    return allocation.query_fields("PreemptTime") not in NOTHING


def lost_nodes(allocation: Allocation) -> list[str]:
    """Return the allocated nodes that Slurm reports as down, failed or not responding; [] if the query fails."""
    if not allocation.in_slurm or not allocation.node_list:
        return []
    text = allocation.query(["sinfo", "--noheader", "--Node", "--format=%N %T", f"--nodes={allocation.node_list}"])
    pairs = [line.split() for line in text.splitlines()]
    # A `*` means that the node does not respond (sinfo(1), NODE STATE CODES); Slurm marks it as down later.
    return sorted({node for node, state in pairs if state.endswith("*") or state.startswith(("down", "fail"))})


def other_steps(allocation: Allocation, since: float) -> list[str]:
    """Return the running steps of this job that started before `since`, if none has started since; [] if the query fails.

    Such a step may have the CPUs for which srun waits without a message. Steps that Slurm makes itself are not listed.
    """
    if not allocation.in_slurm:
        return []
    text = allocation.query(["squeue", "--noheader", "--steps", f"--jobs={allocation.job_id}", "--format=%i|%j|%S"])
    rows = [line.strip().split("|") for line in text.splitlines()]
    steps = [row for row in rows if len(row) == 3 and row[0].rpartition(".")[2].isdigit()]
    if any(_seconds_of(start) >= int(since) for *_, start in steps):
        return []  # the ranks have a step, and are only slow to start
    return [f"{step} ({name})" for step, name, _ in steps]


def terminate_steps(allocation: Allocation, script: int, is_over: Callable[[], bool]) -> None:
    """Send SIGTERM to the processes of the steps that a batch script has started; its own processes receive none.

    In an allocation of the user, only the steps are signaled whose srun is a descendant of the process `script`. Ranks that
    receive no signal cannot save, so a refused command is repeated until `is_over`, also while other queries are skipped.
    """
    slurm, is_reported = Slurm(cluster=allocation.cluster, timeout_s=SIGNAL_S), False
    while not is_over():
        try:
            for step in [allocation.job_id] if allocation.is_batch else _steps_below(slurm, allocation.job_id, script):
                slurm.call(["scancel", "--signal=TERM", step])
            return
        except (NotFoundError, SchedulerRefusedError) as error:
            if not is_reported:
                say(f"cannot send TERM to the steps: {error}; retrying")
            is_reported = True
            time.sleep(SIGNAL_PERIOD_S)


def _steps_below(slurm: Slurm, job_id: str, script: int) -> list[str]:
    text = slurm.call(["scontrol", "show", "step", job_id])
    below = {process.pid for process in running_below(script)}
    sruns = re.findall(r"^StepId=(\S+)(?:.*\n)*?\s+SrunHost:Pid=\S+?:(\d+)", text, re.MULTILINE)
    return [step for step, pid in sruns if int(pid) in below]


def stop_grace_s(allocation: Allocation) -> float:
    """Return the seconds that ranks have to save after a cancel: KillWait minus the time to record the end."""
    if not allocation.in_slurm:
        return STOP_GRACE_S
    text = allocation.query(["scontrol", "show", "config"])
    match = re.search(r"^KillWait\s*=\s*(\d+)", text, re.MULTILINE)
    return max(5.0, float(match[1]) - 8.0) if match else STOP_GRACE_S
