"""Processes of this node as /proc shows them. Standard library only."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

__all__ = ["below", "bytes_of", "children_in_proc", "status_of"]


def status_of(pid: int) -> dict[str, str]:
    """Return the fields of /proc/PID/status; {} if the process has exited."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def bytes_of(status: dict[str, str], name: str) -> int:
    """Return a size in the fields of a process; 0 if it has exited."""
    return int(status.get(name, "0").split()[0]) << 10


def children_in_proc(*, is_whole: bool = False) -> Callable[[int], Sequence[int]]:
    """Return a function that returns the children of a process.

    It reads the lists of the process, since reading all of /proc takes 45 ms on a node with 1,700 processes. A child that
    exits meanwhile may hide another one in such a list, so `is_whole` reads all of /proc, once.
    """
    if not is_whole and Path("/proc/thread-self/children").exists():  # CONFIG_PROC_CHILDREN
        return _listed_children
    found: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has exited
            parent = path.read_bytes().rpartition(b")")[2].split()[1]
            found.setdefault(int(parent), []).append(int(path.parent.name))
    return lambda pid: found.get(pid, ())


def _listed_children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):  # it has exited
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                found += map(int, (thread / "children").read_bytes().split())
    return found


def below(root: int, children: Callable[[int], Sequence[int]]) -> Iterator[int]:
    """Yield the pids of the processes that `root` has started, directly or not."""
    pending = list(children(root))
    while pending:
        pid = pending.pop()
        yield pid
        pending += children(pid)
