"""The processes of a run on all nodes, read from this machine's /proc, which sees into every node."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from toolkit.rank.guard import rank_by_launcher
from toolkit.rundir.layout import RunDirectory


@dataclass(frozen=True)
class Process:
    """`role` is supervisor, launcher, guard or rank; `rank` is None but for the last two.

    `namespace` is its PID namespace, of which each node has one.
    """

    pid: int
    role: str
    rank: int | None
    attempt: int | None
    namespace: str

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Signal it; of several that are killed in a row one may have gone with the one before."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


def processes_of(run: RunDirectory, role: str = "", *, rank: int | None = None) -> list[Process]:
    """All living processes of a run, or those of one role, or of one rank."""
    found = [process for folder in Path("/proc").glob("[0-9]*") if (process := _read(folder, run)) is not None]
    return [one for one in found if role in ("", one.role) and (rank is None or one.rank == rank)]


def _read(folder: Path, run: RunDirectory) -> Process | None:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        argv = _argv(folder)
        if "toolkit.supervise" in argv and str(run.path) in argv:
            return Process(int(folder.name), "supervisor", None, None, _namespace(folder))
        environ = _environ(folder)
        if environ.get("TOOLKIT_RUN_DIR") != str(run.path):
            return None
        attempt = int(environ["TOOLKIT_ATTEMPT"])
        if not _is_rank_program(argv):
            return Process(int(folder.name), "launcher", None, attempt, _namespace(folder))
        parent = Path("/proc") / (folder / "stat").read_text().rpartition(")")[2].split()[1]
        is_rank = _is_rank_program(_argv(parent))
        return Process(
            int(folder.name), "rank" if is_rank else "guard", rank_by_launcher(environ), attempt, _namespace(folder)
        )
    return None


def _argv(folder: Path) -> list[str]:
    return (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")


def _is_rank_program(argv: list[str]) -> bool:
    """A guard or a rank, and not a launcher that has their command line at the end of its own."""
    return Path(argv[0]).name.startswith("python") and "toolkit.rank" in argv


def _environ(folder: Path) -> dict[str, str]:
    text = (folder / "environ").read_bytes().decode(errors="replace")
    return dict(line.split("=", 1) for line in text.split("\0") if "=" in line)


def _namespace(folder: Path) -> str:
    return str((folder / "ns" / "pid").readlink())
