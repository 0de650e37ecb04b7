"""An index of the runs below RUNS with their final states and job ids, to list and search 100,000s of runs quickly.

It is the file RUNS/.cache/history.sqlite, or one below ~/.cache/toolkit if RUNS is not writable. It may be removed at
any time, because the files of the runs are authoritative. The folder of a job is listed again only if it has changed.
"""

import hashlib
import os
import sqlite3
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

from toolkit.rundir.layout import AGAIN
from toolkit.terminal.talk import say

__all__ = ["PAGE", "Ended", "Entry", "RunIndex", "RunName"]

# How long to wait for another process that writes the index, which normally takes only an instant.
LOCKED_S = 2.0
# The consecutive failed writes after which writing stops. One busy moment must not discard a long first listing.
MOST_MISSES = 3
# A folder that changed this recently may change again without a new timestamp, so it is listed again next time.
SETTLED_NS = 10_000_000_000
PAGE = 1000  # the number of runs that are read or written at once
_FORM = 20_261_123  # the schema version; a file with another number is rebuilt
_SCHEMA = """
DROP TABLE IF EXISTS folders;
DROP TABLE IF EXISTS runs;
DROP TABLE IF EXISTS jobs;
CREATE TABLE folders (job TEXT PRIMARY KEY, changed_ns INTEGER);
CREATE TABLE runs (run_id TEXT, job TEXT, again INTEGER, state TEXT, jobs_known INTEGER, changed_ns INTEGER, message TEXT);
CREATE UNIQUE INDEX newest ON runs (run_id DESC, job, again, state, jobs_known);
CREATE TABLE jobs (job_id TEXT, run_id TEXT, job TEXT);
CREATE INDEX of_run ON jobs (run_id, job);
CREATE INDEX ids ON jobs (job_id, run_id);
"""
CACHE = ".cache"  # the name of the folder in RUNS
_LAST_NAME = "\U0010ffff"  # this sorts after every run id
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

Result = TypeVar("Result")


class RunName(NamedTuple):
    """The name of a run: its id and the name of its job."""

    run_id: str
    job_name: str


class Entry(NamedTuple):
    """What the index contains about a run, or about a folder that may not be a run.

    `state` and `message` describe its end, as of the time `changed_ns`; they are "" if it had not ended or was not read
    yet. If `again` is true, the run continued after its end, so its state may be outdated.
    """

    name: RunName
    again: bool
    state: str
    changed_ns: int
    message: str


class Ended(NamedTuple):
    """The final end of a run, to be stored in the index."""

    name: RunName
    state: str
    changed_ns: int
    message: str


class RunIndex:
    """The index of the runs below `runs`. If its file is unusable, it reports this and builds the index in memory. With
    `make` false, it also does so, but without a message, if there is no file.
    """

    def __init__(self, runs: Path, *, make: bool = True) -> None:
        self.runs = runs
        place = _place(runs)
        self.path = place if make or (place is not None and place.exists()) else None
        self.misses = 0
        self._rebuilt = False
        self._connection: sqlite3.Connection | None = None
        self._try(lambda connection: None)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def newest(
        self, *, job: str = "", since: str = "", beginning: str = "", states: Collection[str] | None = None, first: int = PAGE
    ) -> Iterator[list[Entry]]:  # fmt: skip
        """Yield pages of runs, newest first, with `first` runs on the first page. Filters by job, lowest run id,
        prefix of the run id and `states` (None for all). Runs with an unknown or outdated state pass the state filter.
        """
        if not (beginning.isascii() and job.isascii()):
            return  # toolkit uses only ASCII names, and such a string may not be valid in a query
        place, size = (_LAST_NAME, ""), min(first, PAGE)
        while page := self._page(place, max(since, beginning), job, beginning, states, size):
            yield page
            place, size = page[-1].name, min(2 * size, PAGE)

    def _page(
        self, behind: tuple[str, str], least: str, job: str, beginning: str, states: Collection[str] | None, size: int
    ) -> list[Entry]:
        ask = "SELECT run_id, job, again, state, changed_ns, message FROM runs WHERE run_id BETWEEN ? AND ?"
        ask += " AND NOT (run_id = ? AND job <= ?)"
        values: list[object] = [least, min(behind[0], beginning + _LAST_NAME), *behind]
        if job:
            ask += " AND job = ?"
            values.append(job)
        if states is not None:
            ask += f" AND (again OR state IN ('', {', '.join('?' * len(states))}))"
            values += states
        ask += " ORDER BY run_id DESC, job LIMIT ?"
        rows = self._try(lambda connection: connection.execute(ask, [*values, size]).fetchall())
        return [Entry(RunName(run_id, job), bool(again), *rest) for run_id, job, again, *rest in rows]

    def count(self) -> int:
        """Return the number of indexed names."""
        ask = "SELECT count(*) FROM runs"
        return int(self._try(lambda connection: connection.execute(ask).fetchone())[0])

    def of_job(self, job_id: str) -> list[RunName]:
        """Return the runs for which the index contains this job id, newest first."""
        ask = "SELECT run_id, job FROM jobs WHERE job_id = ? ORDER BY run_id DESC, job"
        return [RunName(*row) for row in self._try(lambda connection: connection.execute(ask, (job_id,)).fetchall())]

    def without_jobs(self) -> list[RunName]:
        """Return the runs whose job ids the index does not contain, or may not contain completely, newest first."""
        ask = "SELECT run_id, job FROM runs WHERE again OR NOT jobs_known ORDER BY run_id DESC, job"
        return [RunName(*row) for row in self._try(lambda connection: connection.execute(ask).fetchall())]

    def keep(self, ended: Iterable[Ended]) -> None:
        """Store the final states of runs."""
        rows = [(one.state, one.changed_ns, one.message, *one.name) for one in ended]

        def write(connection: sqlite3.Connection) -> None:
            connection.executemany(
                "UPDATE runs SET state = ?, changed_ns = ?, message = ? WHERE run_id = ? AND job = ?", rows
            )

        self._write(write)

    def keep_jobs(self, found: Iterable[tuple[RunName, Collection[str]]]) -> None:
        """Store the job ids of finished runs, which get more of them only if they continue after their end."""
        runs = list(found)

        def write(connection: sqlite3.Connection) -> None:
            connection.executemany("DELETE FROM jobs WHERE run_id = ? AND job = ?", [name for name, _ in runs])
            connection.executemany(
                "INSERT INTO jobs VALUES (?, ?, ?)", [(one, *name) for name, ids in runs for one in ids]
            )
            connection.executemany(
                "UPDATE runs SET jobs_known = 1 WHERE run_id = ? AND job = ?", [name for name, _ in runs]
            )

        self._write(write)

    def _write(self, write: Callable[[sqlite3.Connection], object]) -> None:
        """Write in one transaction. If another process prevents that, skip it, because the index is only a cache."""

        def attempt(connection: sqlite3.Connection) -> None:
            try:
                with connection:
                    connection.execute("BEGIN IMMEDIATE")
                    write(connection)
                self.misses = 0
            except sqlite3.OperationalError as error:
                if _is_damaged(error):
                    raise
                self.misses += 1
                if self.misses == 1:
                    say(f"cannot write to the run index {self.path} at the moment: {error}")

        if self.misses < MOST_MISSES:
            self._try(attempt)

    def _try(self, act: Callable[[sqlite3.Connection], Result]) -> Result:
        """Call `act` with the open index. Rebuilds a damaged file; without a usable one, builds the index in memory."""
        while self.path is not None:
            try:
                if self._connection is None:
                    self._connection = _open(self.path)
                    self._list_what_changed(self._connection)
                return act(self._connection)
            except (sqlite3.Error, OSError) as error:
                self.close()
                self._repair(error, self.path)
        if self._connection is None:
            self._connection = _in_memory()
            self._list_what_changed(self._connection)
        return act(self._connection)

    def _repair(self, error: sqlite3.Error | OSError, path: Path) -> None:
        """Remove a damaged file, but only once; after any other error, continue without the file."""
        if isinstance(error, sqlite3.Error) and _is_damaged(error) and not self._rebuilt:
            self._rebuilt = True
            say(f"{path} is damaged ({error}); rebuilding it")
            _remove(path)
            return
        say(f"continuing without the run index {path}: {getattr(error, 'strerror', None) or error}")
        self.path = None

    def _list_what_changed(self, connection: sqlite3.Connection) -> None:
        """List the job folders that changed since their last listing, and update the index."""
        listed = dict(connection.execute("SELECT job, changed_ns FROM folders"))
        now_ns = time.time_ns()
        there = dict(_folders(self.runs))
        changed = {name: one for name, one in there.items() if listed.get(name) != one}
        gone = listed.keys() - there.keys()
        rows = [change for job in changed for change in [_change_of(connection, self.runs, job)] if not change.is_empty]
        settled = {job: one for job, one in changed.items() if one < now_ns - SETTLED_NS}
        if not (rows or settled or gone):
            return
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            for change in rows:
                change.write(connection)
            for job in gone:
                for table in ("folders", "runs", "jobs"):
                    connection.execute(f"DELETE FROM {table} WHERE job = ?", (job,))
            connection.executemany(
                "INSERT OR REPLACE INTO folders VALUES (?, ?)", [(job, settled.get(job, 0)) for job in changed]
            )


class _Change(NamedTuple):
    """The changes in the folder of a job since its last listing."""

    job: str
    new: list[str]
    gone: list[str]
    again: list[str]

    @property
    def is_empty(self) -> bool:
        return not (self.new or self.gone or self.again)

    def write(self, connection: sqlite3.Connection) -> None:
        rows = [(run_id, self.job) for run_id in self.new]
        connection.executemany("INSERT OR IGNORE INTO runs VALUES (?, ?, 0, '', 0, 0, '')", rows)
        gone = [(run_id, self.job) for run_id in self.gone]
        for table in ("runs", "jobs"):
            connection.executemany(f"DELETE FROM {table} WHERE run_id = ? AND job = ?", gone)
        again = [(run_id, self.job) for run_id in self.again]
        connection.executemany("UPDATE runs SET again = 1 WHERE run_id = ? AND job = ?", again)


def _change_of(connection: sqlite3.Connection, runs: Path, job: str) -> _Change:
    known = dict(connection.execute("SELECT run_id, again FROM runs WHERE job = ?", (job,)))
    names, again = set(), set()
    try:
        for name in os.listdir(runs / job):  # noqa: PTH208  creating 100,000 Paths would be ten times slower
            if not name.isascii():
                continue  # toolkit uses only ASCII names, and such a string may not be valid in SQL
            if name.startswith(AGAIN):
                again.add(name.removeprefix(AGAIN))
            elif not name.startswith("."):
                names.add(name)
    except FileNotFoundError:
        pass  # another process has just removed the last run of the job
    except PermissionError:
        say(f"skipping the runs in {runs / job}: it cannot be read")
        return _Change(job, [], [], [])
    return _Change(
        job, sorted(names - known.keys()), sorted(known.keys() - names), [one for one in again & names if not known.get(one)]
    )  # fmt: skip


def _folders(runs: Path) -> Iterator[tuple[str, int]]:
    """Yield the name and ctime of each job folder; unlike mtime, programs that copy files cannot set ctime back."""
    try:
        with os.scandir(runs) as entries:
            for entry in entries:
                # Toolkit's own folders have a leading dot: the index, packed environments, bad nodes.
                if not entry.name.startswith(".") and entry.name.isascii() and entry.is_dir():
                    yield entry.name, entry.stat().st_ctime_ns
    except (FileNotFoundError, NotADirectoryError):
        return


def _place(runs: Path) -> Path | None:
    """Return the path of the index: in RUNS if writable, else in this user's home. None if RUNS does not exist."""
    if not runs.is_dir():
        return None
    if os.access(runs, os.W_OK):
        return runs / CACHE / "history.sqlite"
    digest = hashlib.sha256(os.fsencode(runs.resolve())).hexdigest()[:16]
    return Path.home() / ".cache" / "toolkit" / f"history-{digest}.sqlite"


def _open(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    connection = sqlite3.connect(path, timeout=LOCKED_S, isolation_level=None)
    try:
        if _form_of(connection) != _FORM:
            path.chmod(stat.S_IRUSR | stat.S_IWUSR)
            connection.execute("BEGIN IMMEDIATE")
            if _form_of(connection) != _FORM:  # check again, because another process may have just created the tables
                for statement in _SCHEMA.split(";"):
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {_FORM}")
            connection.execute("COMMIT")
        connection.execute("PRAGMA synchronous = OFF")  # a file that a power failure damages is rebuilt
    except BaseException:
        connection.close()
        raise
    return connection


def _form_of(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _in_memory() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.executescript(_SCHEMA)
    return connection


def _is_damaged(error: sqlite3.Error) -> bool:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in _DAMAGED or "no such table" in str(error) or "no such column" in str(error)


def _remove(path: Path) -> None:
    for end in ("", "-journal"):
        path.with_name(path.name + end).unlink(missing_ok=True)
