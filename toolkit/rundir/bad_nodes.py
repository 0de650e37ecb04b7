"""Nodes that lost an attempt or failed a health check, remembered for a day: RUNS/.bad-nodes/SITE/NODE.json.

One file a node, written whole, so that supervisors of several runs do not need a lock. The next submit and resume leave
these nodes out.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from toolkit.rundir.files import read_json_or_none, write_json
from toolkit.rundir.layout import RunDirectory

REMEMBERED_S = 24 * 3600.0


@dataclass(frozen=True)
class BadNode:
    """A node and why it is excluded until `expires`, in seconds since the epoch."""

    node: str
    reason: str
    run_id: str
    noted: float
    expires: float


def runs_of(run: RunDirectory) -> Path:
    """RUNS, below which the run lies."""
    return run.whole.path.parents[1]


def note_bad_node(run: RunDirectory, site: str, node: str, reason: str) -> None:
    """Remember that a node is bad."""
    folder = _folder(runs_of(run), site)
    for path in (folder.parent, folder):
        path.mkdir(mode=0o700, exist_ok=True)
    now = time.time()
    write_json(folder / f"{node}.json", asdict(BadNode(node, reason, run.run_id, now, now + REMEMBERED_S)))


def bad_nodes(runs: Path, site: str) -> list[BadNode]:
    """The nodes of a site to exclude now; expired files are removed."""
    found = []
    for path in sorted(_folder(runs, site).glob("[!.]*.json")):
        value = read_json_or_none(path)
        if value is None:
            continue  # another process removed it at this moment
        if value["expires"] > time.time():
            found.append(BadNode(**{one.name: value[one.name] for one in fields(BadNode)}))
        else:
            path.unlink(missing_ok=True)
    return found


def sites_with_bad_nodes(runs: Path) -> list[str]:
    """The sites whose nodes are remembered below RUNS."""
    return sorted(path.name for path in (runs / ".bad-nodes").glob("*") if path.is_dir())


def forget_bad_node(runs: Path, site: str, node: str) -> bool:
    """Forget one node; False where it was not remembered."""
    path = _folder(runs, site) / f"{node}.json"
    known = path.exists()
    path.unlink(missing_ok=True)
    return known


def _folder(runs: Path, site: str) -> Path:
    return runs / ".bad-nodes" / site
