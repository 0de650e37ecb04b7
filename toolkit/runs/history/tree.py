"""Arrange runs as a tree of parents, reruns and resumes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from toolkit.errors import ToolkitError
from toolkit.rundir.files import read_json_or_none
from toolkit.rundir.find import newest_record
from toolkit.rundir.layout import RunDirectory, start_of
from toolkit.rundir.states import RunState
from toolkit.runs.record.parents import parents_in
from toolkit.runs.status.state_table import RunStatus
from toolkit.terminal.talk import clean

__all__ = ["lines_of", "tree_of"]

Found = TypeVar("Found")


@dataclass(frozen=True)
class Link:
    """The relation to an earlier run or task: `kind` is "after ok", "after any" or "rerun of"."""

    kind: str
    run_id: str


@dataclass(frozen=True)
class Resume:
    """A start that a resume created, with its job id; "" if it was never submitted."""

    start: int
    time: str
    job_id: str


@dataclass
class Node:
    """A run with its descendants, placed below the first of its links in the tree."""

    status: RunStatus
    links: list[Link]
    resumes: list[Resume]
    damage: list[str]
    children: list[Node] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return a run of `history --tree --json`."""
        return {
            "run": self.status.as_json(),
            "links": [{"kind": link.kind, "run_id": link.run_id} for link in self.links],
            "resumes": [{"start": one.start, "time": one.time, "job_id": one.job_id} for one in self.resumes],
            "damage": self.damage,
            "children": [child.as_json() for child in self.children],
        }


def tree_of(statuses: Sequence[RunStatus]) -> list[Node]:
    """Return runs without a parent in the list, newest first, each with its descendants, oldest first."""
    nodes = {status.run_id: _node(status) for status in statuses}
    roots: list[Node] = []
    for node in nodes.values():
        above = next((nodes[run] for link in node.links if (run := link.run_id.partition("_")[0]) in nodes), None)
        (above.children if above is not None else roots).append(node)
    for node in nodes.values():
        node.children.sort(key=lambda child: child.status.run_id)
    return roots


def _node(status: RunStatus) -> Node:
    """Return the node of a run; a damaged file hides only its own content."""
    run, damage = RunDirectory(Path(status.path)), _Damage()
    return Node(status, _links_of(run, damage), _resumes_of(run, damage), damage.messages)


class _Damage:
    """Reads what is readable, and keeps the errors of the rest."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def read(self, read: Callable[[Path], Found], path: Path) -> Found | None:
        """Return the content of a file; None if it does not exist or is damaged."""
        try:
            return read(path)
        except ToolkitError as error:
            if str(error) not in self.messages:
                self.messages.append(str(error))
            return None


def _links_of(run: RunDirectory, damage: _Damage) -> list[Link]:
    newest = damage.read(parents_in, newest_record(run))
    parents = newest if newest is not None else damage.read(parents_in, run.record)
    links = [Link(f"after {parent.kind}", parent.run_id) for parent in parents or ()]
    record = damage.read(read_json_or_none, run.record) or {}
    if origin := record.get("rerun_of"):
        links.append(Link("rerun of", str(origin)))
    return links


def _resumes_of(run: RunDirectory, damage: _Damage) -> list[Resume]:
    resumes = []
    for path in sorted(run.path.glob("resumed-*.json")):
        record = damage.read(read_json_or_none, path) or {}
        submitted = damage.read(read_json_or_none, run.submitted(start_of(path))) or {}
        resumes.append(Resume(start_of(path), str(record.get("time", "")), str(submitted.get("job_id", ""))))
    return resumes


def lines_of(roots: Sequence[Node]) -> Iterator[str]:
    """Yield the lines of the tree, one per run and one per resume."""
    for root in roots:
        yield _line(root)
        yield from _below(root, "")


def _below(node: Node, indent: str) -> Iterator[str]:
    rows: list[Resume | Node] = [*node.resumes, *node.children]
    for place, row in enumerate(rows):
        is_last = place == len(rows) - 1
        branch = indent + ("└─ " if is_last else "├─ ")
        if isinstance(row, Resume):
            at = f" at {row.time}" if row.time else ""
            yield f"{branch}resumed{at} as start {row.start}" + (f", job {row.job_id}" if row.job_id else "")
        else:
            yield branch + _line(row)
            yield from _below(row, indent + ("   " if is_last else "│  "))


def _line(node: Node) -> str:
    status = node.status
    job = f" (job {status.full_job_id})" if status.job_id else ""
    links = "".join(f", {link.kind} {link.run_id}" for link in node.links)
    messages = dict.fromkeys([*([status.reason] if status.state is RunState.UNKNOWN else []), *node.damage])
    why = f": {'; '.join(messages)}" if messages else ""
    return clean(f"{status.run_id} {status.job_name} {status.state.value}{job}{links}{why}")
