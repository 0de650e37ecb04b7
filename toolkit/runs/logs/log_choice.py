"""Select logs of a run: of the job, of all ranks, of one rank, of a node, or of failed ranks."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from toolkit.errors import NotFoundError
from toolkit.rundir.attempt_records import AttemptRecord, StartRecord
from toolkit.rundir.claims import all_parts, task_of
from toolkit.rundir.files import read_json_or_none
from toolkit.rundir.jobs import job_ids, newest_job_id
from toolkit.rundir.layout import AttemptDirectory, RunDirectory, rank_of
from toolkit.rundir.rank_logs import find_log, is_shared, label_of, labelled_rank, line_of, node_logs
from toolkit.rundir.states import RunState
from toolkit.runs.logs.job_log import job_log, own_job_id
from toolkit.slurm.hostlist import expand_hostlist

__all__ = ["LogChoice", "LogPart", "choose_logs", "logs_of_attempt"]


@dataclass(frozen=True)
class LogChoice:
    """The requested logs. `rank` is a number or "all", `nodes` a host list; if no field is set, the job log.

    `attempt` None means the last one; with `failed`, the last one in which a rank failed.
    """

    rank: str = ""
    nodes: str = ""
    failed: bool = False
    attempt: int | None = None

    @property
    def of_ranks(self) -> bool:
        return bool(self.rank or self.nodes or self.failed) or self.attempt is not None


@dataclass(frozen=True)
class LogPart:
    """A log file, or the lines of some ranks in a shared one."""

    path: Path
    label: str = ""
    of_several: bool = False
    ranks: Collection[int] | None = None
    alone: bool = False

    def shown(self, line: str) -> str | None:
        """Return the displayed part of a line; None to skip it."""
        if not self.of_several:
            return self.label + line
        if self.ranks is not None and (rank := labelled_rank(line)) not in self.ranks:
            return None
        text = line_of(self.path, line, rank=rank if self.ranks is not None and self.alone else None)
        return None if text is None else self.label + text


def choose_logs(run: RunDirectory, choice: LogChoice) -> list[LogPart]:
    """Return the logs to read.

    Raises:
        NotFoundError: there is no such log yet; the fix names those that exist.
    """
    if run.task_number is None and run.task_numbers():
        return _of_array(run, choice)
    if not choice.of_ranks:
        return [LogPart(path) for path in _of_job(run)]
    attempt = _attempt(run, choice)
    if choice.failed:
        return _of_failed(attempt)
    return _of_nodes(attempt, choice.nodes) if choice.nodes else _of_ranks(attempt, choice.rank or "all")


def logs_of_attempt(attempt: AttemptDirectory, *, labelled: bool = True) -> list[LogPart]:
    """Return the logs of an attempt: those of single ranks in order, then those that the ranks of a node share."""
    own = sorted(attempt.logs.glob("rank-*.log"), key=rank_of)
    logs = [LogPart(path, label_of(rank_of(path)) if labelled else "") for path in own]
    return logs + [LogPart(path, of_several=True) for path in node_logs(attempt) or _of_done_task(attempt)]


def _of_array(run: RunDirectory, choice: LogChoice) -> list[LogPart]:
    """Return the job logs of all tasks, or the logs of the failed ones."""
    if choice.failed and choice.attempt is None:
        return _of_failed_tasks(run)
    if choice.of_ranks:
        raise NotFoundError(
            f"run {run.run_id} is an array, so ranks and nodes can only be selected for a single task",
            where=str(run.path),
            fix=f"add --task T; `toolkit status {run.run_id} --tasks` lists the tasks",
        )
    parts = all_parts(run)
    logs = []
    for path in _of_job(run):
        array, _, number = path.stem.removeprefix("slurm-").partition("_")
        logs.append(LogPart(path, _label_of_task(task_of(parts, array, int(number))) if number.isdecimal() else ""))
    return logs


def _label_of_task(task: int) -> str:
    return f"[task {task}] "


def _of_failed_tasks(run: RunDirectory) -> list[LogPart]:
    logs = []
    for number in run.task_numbers():
        task = run.task(number)
        attempt = task.last_attempt()
        end = AttemptRecord.read(attempt) if attempt is not None else None
        if attempt is None or end is None or not end.final or end.state is RunState.COMPLETED:
            continue
        found = _of_failed(attempt) if failed_ranks(attempt) else [LogPart(path) for path in _of_job(task)]
        logs += [replace(part, label=_label_of_task(number) + part.label) for part in found]
    if not logs:
        raise NotFoundError(
            "no task has failed", where=str(run.path), fix=f"`toolkit status {run.run_id} --tasks` shows their states"
        )
    return logs


def _attempt(run: RunDirectory, choice: LogChoice) -> AttemptDirectory:
    numbers = run.attempt_numbers()
    if not numbers:
        raise NotFoundError("no attempt has started", where=str(run.path), fix=_why_none(run))
    if choice.attempt is not None and choice.attempt not in numbers:
        raise NotFoundError(
            f"no attempt {choice.attempt}", where=str(run.path), fix=f"pass --attempt {numbers[0]} to {numbers[-1]}"
        )
    if choice.attempt is not None:
        return run.attempt(choice.attempt)
    failed = (run.attempt(number) for number in reversed(numbers) if failed_ranks(run.attempt(number)))
    return next(failed, run.attempt(numbers[-1])) if choice.failed else run.attempt(numbers[-1])


def _of_job(run: RunDirectory) -> list[Path]:
    """Return the job logs of a run, the newest last, including the `-o` file of the newest job if it is readable."""
    # The logs of array tasks are in the run directory: slurm-ARRAY_NUMBER.out.
    job_id = newest_job_id(run)
    if run.task_number is None:
        found = set(run.path.glob("slurm-*.out"))
    else:
        ids = (own_job_id(run, one) for one in (*job_ids(run), job_id))
        found = {path for one in ids if (path := run.whole.path / f"slurm-{one}.out").is_file()}
    log = job_log(run, job_id) if job_id else None
    if log is not None and log.path is not None and log.path.is_file():
        found.add(log.path)
    if not found:
        elsewhere = f"option -o placed its log at {log.place}; " if log is not None and log.redirected else ""
        raise NotFoundError("no log yet", where=str(run.path), fix=elsewhere + _why_none(run))
    return sorted(found, key=lambda path: path.stat().st_mtime)


def _why_none(run: RunDirectory) -> str:
    """Explain missing logs from the files alone, because followers call it repeatedly."""
    ask = f"`toolkit status {run.run_id}` shows"
    if run.is_asked("cancel"):
        return f"none will appear, because the run was cancelled before it wrote one; {ask} whether it has ended"
    return f"{ask} what the run waits for, or how it ended"


def _of_ranks(attempt: AttemptDirectory, rank: str) -> list[LogPart]:
    if rank == "all":
        return logs_of_attempt(attempt)
    if rank.isdecimal() and (logs := _of_some(attempt, [int(rank)], alone=True)):
        return logs
    ranks = _rank_count(attempt)
    started = bool(logs_of_attempt(attempt))
    raise NotFoundError(
        f"no log for rank {rank}",
        where=str(attempt.logs),
        fix=f"pass --rank 0 to {ranks - 1}, or all" if ranks and started else "wait until the ranks have started",
    )


def _rank_count(attempt: AttemptDirectory) -> int:
    """Return the number of ranks that the supervisor recorded; 0 if it has not recorded it yet."""
    started = StartRecord.read(attempt)
    return started.ranks if started is not None else 0


def _of_some(attempt: AttemptDirectory, ranks: Collection[int], *, alone: bool = False) -> list[LogPart]:
    """Return the logs of some ranks, and only their lines of shared logs; [] if the attempt lacks the ranks."""
    known = range(_rank_count(attempt))
    logs = logs_of_attempt(attempt, labelled=not alone)
    chosen = [part for part in logs if not part.of_several and rank_of(part.path) in ranks]
    shared = [part for part in logs if part.of_several]
    wanted = [rank for rank in ranks if rank in known]
    if shared and wanted:
        homes = {find_log(attempt, rank) for rank in wanted}
        # If no file names the node of a rank, toolkit searches the logs of all nodes.
        found = [part for part in shared if part.path in homes] if all(map(is_shared, homes)) else shared
        chosen += [replace(part, ranks=frozenset(wanted), alone=alone) for part in found]
    return chosen


def _of_nodes(attempt: AttemptDirectory, nodes: str) -> list[LogPart]:
    """Return the logs of the ranks on some hosts."""
    wanted = set(expand_hostlist(nodes))
    hosts = {part: _host_of(attempt, part) for part in logs_of_attempt(attempt)}
    chosen = [part for part, host in hosts.items() if host in wanted or host.partition(".")[0] in wanted]
    if chosen:
        return chosen
    known = sorted(filter(None, set(hosts.values())))
    raise NotFoundError(
        f"no rank log for node {nodes}",
        where=str(attempt.logs),
        fix=f"pass --node {','.join(known)}" if known else "pass --rank N; the nodes of ranks are unknown",
    )


def _host_of(attempt: AttemptDirectory, part: LogPart) -> str:
    """Return the host whose ranks write a log; "" if unknown."""
    if part.of_several:
        return part.path.stem.removeprefix("node-") if part.path.name.startswith("node-") else ""
    return str((read_json_or_none(attempt.rank_file(rank_of(part.path))) or {}).get("host", ""))


def failed_ranks(attempt: AttemptDirectory) -> list[int]:
    """Return the failed ranks; the first one caused the other failures, if known."""
    end = AttemptRecord.read(attempt)
    blamed = end.rank if end is not None else None
    others = sorted(map(rank_of, attempt.errors.glob("rank-*.json")))
    return [rank for rank in dict.fromkeys([blamed, *others]) if rank is not None]


def _of_failed(attempt: AttemptDirectory) -> list[LogPart]:
    ranks = failed_ranks(attempt)
    if not ranks:
        end = AttemptRecord.read(attempt)
        cause = f"ended as {end.cause.value}" if end is not None else "is running"
        raise NotFoundError(
            f"no rank of attempt {attempt.number} has failed: the attempt {cause}", where=str(attempt.path),
            fix=f"`toolkit explain {attempt.run.run_id}`, or --rank all",
        )  # fmt: skip
    place = {rank: number for number, rank in enumerate(ranks)}
    return sorted(_of_some(attempt, ranks), key=lambda part: place.get(_rank(part), 0))


def _rank(part: LogPart) -> int:
    return -1 if part.of_several else rank_of(part.path)


def _of_done_task(attempt: AttemptDirectory) -> Iterator[Path]:
    """Yield the job log of a completed task, which includes the logs of its ranks."""
    run = attempt.run
    done = run.task_number is not None and attempt.exit_file.exists() and not attempt.logs.exists()
    log = job_log(run, newest_job_id(run)).readable if done else None
    if log is not None:
        yield log
