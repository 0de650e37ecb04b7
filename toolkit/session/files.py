"""The records of sessions, in `~/.toolkit/sessions/NAME.json`, so that any shell on any login node can read them."""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from toolkit.config.resolved import ResolvedJob
from toolkit.config.table import nearest
from toolkit.errors import NotFoundError, ToolkitError
from toolkit.rundir.files import read_json, utc_now, write_json
from toolkit.rundir.layout import session_names, sessions_folder
from toolkit.slurm.records import named

__all__ = ["Session", "all_sessions", "check_name", "find_session", "new_session", "session_file"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True)
class Session:
    """A named allocation. `job` is the resolved job that it was requested with: its nodes, ranks and site."""

    name: str
    job_id: str
    created: str
    job: ResolvedJob

    @property
    def full_job_id(self) -> str:
        """The job id, with the name of the cluster if that is not the site's default."""
        return named(self.job_id, self.job.job.cluster)

    def file(self, suffix: str) -> Path:
        """Return the path of a file of this session, such as `NAME.log`."""
        return session_file(self.name, suffix)

    def write(self) -> None:
        """Write the record, readable by its owner only."""
        value = {"schema": 1, "name": self.name, "job_id": self.job_id, "created": self.created}
        write_json(self.file("json"), value | {"job": self.job.model_dump(mode="json", by_alias=True)}, mode=0o600)

    def forget(self) -> None:
        """Remove all files of this session."""
        for path in sessions_folder().glob(f"{self.name}.*"):
            if path.name.removeprefix(f"{self.name}.") in _SUFFIXES:
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


# log: salloc's output; shell-log: output of the step that runs tmux; the last three belong to the notebook. No suffix
# contains a dot, since session names may: files of sessions `a` and `a.shell` never collide.
_SUFFIXES = frozenset({"json", "log", "shell-log", "notebook-log", "token", "jupyter"})


def session_file(name: str, suffix: str) -> Path:
    """Return the path of a file of the session `name`."""
    return sessions_folder() / f"{name}.{suffix}"


def new_session(name: str, job_id: str, job: ResolvedJob) -> Session:
    """Record a session whose job Slurm has accepted."""
    session = Session(name, job_id, utc_now(), job)
    session.write()
    return session


def check_name(name: str) -> None:
    """Reject a name that cannot be a file name.

    Raises:
        ToolkitError: the name is invalid.
    """
    if not _NAME.fullmatch(name):
        raise ToolkitError(
            f"{name!r} is not a valid session name",
            where="--name",
            fix="use 1 to 64 of the characters A-Z a-z 0-9 . _ -, and start with a letter or digit",
        )


def all_sessions() -> list[Session]:
    """Return every recorded session, the oldest first."""
    return sorted(map(_read, sessions_folder().glob("*.json")), key=lambda session: session.created)


def find_session(name: str) -> Session:
    """Return the session with this name.

    Raises:
        NotFoundError: it does not exist; the fix suggests a similar name.
    """
    path = session_file(name, "json") if _NAME.fullmatch(name) else None
    if path is None or not path.exists():
        near = nearest(name, session_names())
        fix = (
            f"did you mean {near[0]}"
            if near
            else "`toolkit session ls` lists them; `toolkit session start` creates one"
        )
        raise NotFoundError(f"session {name!r} not found", where=str(sessions_folder()), fix=fix)
    return _read(path)


def _read(path: Path) -> Session:
    value = read_json(path)
    try:
        return Session(value["name"], value["job_id"], value["created"], ResolvedJob.model_validate(value["job"]))
    except (KeyError, TypeError, ValidationError) as error:
        raise ToolkitError(
            "this session record is damaged, or another version of toolkit wrote it",
            where=str(path),
            fix="remove this file; `squeue --me` lists your jobs, `scancel JOBID` cancels one",
        ) from error
