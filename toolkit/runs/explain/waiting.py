"""Explain why a run waits in the queue, with the numbers that Slurm's reason omits, and whether it can ever start."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from toolkit.errors import NotFoundError, SchedulerRefusedError
from toolkit.rundir.attempt_records import AttemptRecord
from toolkit.rundir.layout import RunDirectory
from toolkit.rundir.states import RunState
from toolkit.runs.explain.model import Evidence, Explanation, Waiting, cause_in_words
from toolkit.runs.explain.running import between_attempts
from toolkit.runs.record.job import recorded_job, slurm_of
from toolkit.runs.record.parents import parents_of
from toolkit.runs.requests.control import requeue_asked_at
from toolkit.runs.status.state_table import RunStatus
from toolkit.slurm.commands import Slurm
from toolkit.slurm.job_facts import JobFacts, base_of, run_state
from toolkit.slurm.limits import PartitionRow, UnusableNode, partition_rows, unusable_nodes
from toolkit.slurm.reasons import CanStart, pending_reason, reason_name
from toolkit.slurm.records import with_cluster_option

_NODES_SHOWN = 4


@dataclass(frozen=True)
class Detail:
    """Details of a reason: its numbers, the lines that show them, a better action."""

    words: str = ""
    evidence: tuple[Evidence, ...] = ()
    actions: tuple[str, ...] = ()
    can_start: CanStart | None = None


def explain_waiting(run: RunDirectory, status: RunStatus) -> Explanation:
    """Explain a pending run, or one whose supervisor is still starting."""
    if status.job_id.startswith("local-"):
        return Explanation("starting", status.reason, follows="its ranks start within seconds")
    slurm = slurm_of(recorded_job(run))
    job_id = _waiting_job(status)
    try:
        waits = slurm.jobs([job_id]).get(job_id)
    except (NotFoundError, SchedulerRefusedError) as error:
        return Explanation("no_answer", f"Slurm does not respond: {error.message}", actions=[error.fix])
    if waits is None or not waits.state:
        explanation = waits.reason if waits is not None else f"it no longer knows job {job_id}"
        return Explanation("no_answer", f"Slurm does not report its state: {explanation}", actions=["retry later"])
    last = run.last_attempt()
    if run_state(waits.state) is RunState.RUNNING and last is not None and last.exit_file.exists():
        return between_attempts(run, last)  # the attempt has ended, but Slurm has not requeued the job yet
    if waits.state == "CONFIGURING" or run_state(waits.state) is not RunState.PENDING:
        return Explanation(
            "starting", f"Slurm reports {waits.state}: its nodes are being prepared", follows="it starts by itself"
        )
    return explain_pending(slurm, run, waits)


def _waiting_job(status: RunStatus) -> str:
    """Return the job id of the run; for an array, that of the first waiting task."""
    tasks = [task.job_id for task in status.tasks or () if task.state is RunState.PENDING]
    return (tasks or [status.job_id])[0]


def explain_pending(slurm: Slurm, run: RunDirectory | None, waits: JobFacts) -> Explanation:
    """Explain Slurm's reason with its numbers, and whether the job can ever start; without `run`, a job of the user."""
    name = reason_name(waits.reason or "None")
    reason = pending_reason(waits.reason or "None", names_nodes=bool(waits.required_nodes))
    detail = _detail(slurm, run, waits, name)
    can_start = detail.can_start or reason.can_start
    start = _as_utc(waits.start_time)
    fix = reason.fix if run is not None else _for_slurm_alone(reason.fix)
    names = {"job": base_of(waits.job_id), "run": run.run_id if run is not None else "", "partition": waits.partition}
    actions = [*detail.actions, *([fix.format(**names)] if fix else [])]
    if not actions:
        actions.append(f"wait; `toolkit wait {run.run_id}` reports when it starts" if run is not None else "wait")
    actions = [with_cluster_option(action, waits.cluster) for action in actions]
    words = f"{reason.words}: {detail.words}" if detail.words else reason.words
    return Explanation(
        f"pending_{name}",
        f"{words} ({name})",
        follows="" if can_start is CanStart.NEVER else "Slurm starts it by itself",
        actions=actions,
        evidence=[Evidence("squeue", f"{waits.job_id} {waits.state} {waits.reason}".strip()), *detail.evidence],
        waiting=Waiting(
            name, can_start, not_before=start if name == "BeginTime" else None,
            estimated_start=None if can_start is CanStart.NEVER else start,
        ),
    )  # fmt: skip


def _for_slurm_alone(fix: str) -> str:
    """Return the fix of a reason for a job without a run."""
    for ours, theirs in (
        ("toolkit cancel {run}", "scancel {job}"),
        ("toolkit (logs|explain) {run}", "toolkit explain {job}"),
    ):
        fix = re.sub(ours, theirs, fix)
    return fix


def _detail(slurm: Slurm, run: RunDirectory | None, job: JobFacts, reason: str) -> Detail:
    """Return the details of a reason; none if Slurm does not respond."""
    try:
        return _DETAILS[reason](slurm, run, job) if reason in _DETAILS else Detail()
    except (NotFoundError, SchedulerRefusedError):
        return Detail()


def _time_limit(slurm: Slurm, run: RunDirectory | None, job: JobFacts) -> Detail:
    limits = partition_rows(slurm, job.partition)
    allowed = ", ".join(f"{one.name} allows {one.time_limit}" for one in limits)
    lower = [
        f"`scontrol update JobId={base_of(job.job_id)} TimeLimit={one.time_limit}` lowers the request to that limit"
        for one in limits[:1]
    ]
    return Detail(f"the job requests {job.time_limit}, but {allowed}", actions=tuple(lower))


def _node_limit(slurm: Slurm, run: RunDirectory | None, job: JobFacts) -> Detail:
    limits = partition_rows(slurm, job.partition)
    words = ", ".join(f"{one.name} has {one.nodes}" + _largest(one) for one in limits)
    down = _down_nodes(unusable_nodes(slurm, partition=job.partition))
    return Detail(f"nodes requested: {job.node_count}; {words}", down.evidence)


def _largest(partition: PartitionRow) -> str:
    """Return the maximum job size of a partition; sinfo prints `1-2` or `2` for minimum and maximum."""
    most = partition.job_size.rpartition("-")[2]
    return "" if most == "infinite" else f" and allows {most} per job"


def _resources(slurm: Slurm, run: RunDirectory | None, job: JobFacts) -> Detail:
    counts = []
    for one in partition_rows(slurm, job.partition):
        busy, idle, other, total = (one.node_states.split("/") + [""] * 4)[:4]
        counts.append(f"{one.name} has {total}: {busy} in use, {idle} idle, {other} down or drained")
    down = _down_nodes(unusable_nodes(slurm, partition=job.partition))
    return Detail(f"nodes requested: {job.node_count}; {'; '.join(counts)}", down.evidence)


def _required_nodes(slurm: Slurm, run: RunDirectory | None, job: JobFacts) -> Detail:
    named = re.search(r"UnavailableNodes:(\S+)", job.reason)
    nodes = named[1] if named else job.required_nodes
    return _down_nodes(unusable_nodes(slurm, partition="" if nodes else job.partition, nodes=nodes))


def _down_nodes(nodes: list[UnusableNode]) -> Detail:
    words = ", ".join(f"{node.name} is {node.state.rstrip('*')}" for node in nodes[:_NODES_SHOWN])
    evidence = [
        Evidence("sinfo", f"{node.name} {node.state}: {node.reason} ({node.user}, {node.since})")
        for node in nodes[:_NODES_SHOWN]
        if node.reason
    ]
    more = f" and {len(nodes) - _NODES_SHOWN} more" if len(nodes) > _NODES_SHOWN else ""
    return Detail(words + more, tuple(evidence))


def _dependency(slurm: Slurm, run: RunDirectory | None, job: JobFacts) -> Detail:
    """Explain `afterok:6(failed)`: the kind, the job, its run if `--after` named one, and its state."""
    words = []
    runs = {
        number: parent.run_id
        for parent in (parents_of(run) if run is not None else ())
        for number in parent.job_id.split(":")
    }
    for kind, other, state in re.findall(r"(\w+):(\d+(?:_(?:\d+|\*))?)(?:\+\d+)?(?:\((\w+)\))?", job.dependency):
        whose = f" (run {runs[base]})" if (base := other.partition("_")[0]) in runs else ""
        words.append(
            f"{kind}:{other}{whose} " + ("cannot be satisfied" if state == "failed" else "is not satisfied yet")
        )
    return Detail(", ".join(words) or job.dependency)


def _begin_time(slurm: Slurm, run: RunDirectory | None, job: JobFacts) -> Detail:
    """Explain a begin time, for example after a requeue."""
    last = run.last_attempt() if run is not None else None
    end = AttemptRecord.read(last) if last is not None else None
    if last is not None and end is not None and not end.final:
        why = cause_in_words(last, end) if requeue_asked_at(last, end) else end.cause.value
        return Detail(f"it was requeued ({why}), and Slurm delays a requeued job for a while")
    return Detail()


def _as_utc(local: str) -> str | None:
    """Convert Slurm's local time, which is this host's, to UTC."""
    try:
        return datetime.fromisoformat(local).astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    except ValueError:
        return None


_DETAILS: dict[str, Callable[[Slurm, RunDirectory | None, JobFacts], Detail]] = {
    "PartitionTimeLimit": _time_limit,
    "PartitionNodeLimit": _node_limit,
    "Resources": _resources,
    "Nodes_required_for_job_are_DOWN": _resources,
    "ReqNodeNotAvail": _required_nodes,
    "NodeDown": _required_nodes,
    "Dependency": _dependency,
    "DependencyNeverSatisfied": _dependency,
    "BeginTime": _begin_time,
}
