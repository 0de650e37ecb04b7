"""Nodes that lost an attempt or failed a health check, recorded for a day: RUNS/.bad-nodes/SITE/NODE.json.

There is one file per node, written atomically, so that supervisors of several runs need no lock. The next submit and
resume exclude these nodes.
"""

import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from toolkit.rundir.files import read_json_or_none, write_json
from toolkit.rundir.layout import RunDirectory

__all__ = ["BadNode", "bad_nodes", "forget_bad_node", "note_bad_node", "runs_of", "sites_with_bad_nodes"]

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
    """RUNS, the folder that contains the run."""
    return run.whole.path.parents[1]


def note_bad_node(run: RunDirectory, site: str, node: str, reason: str) -> None:
    """Record that a node is bad."""
    folder = _folder(runs_of(run), site)
    for path in (folder.parent, folder):
        path.mkdir(mode=0o700, exist_ok=True)
    now = time.time()
    write_json(folder / f"{node}.json", asdict(BadNode(node, reason, run.run_id, now, now + REMEMBERED_S)))


def bad_nodes(runs: Path, site: str) -> list[BadNode]:
    """The nodes of a site to exclude now; expired files are removed."""
    nodes = []
    for path in sorted(_folder(runs, site).glob("[!.]*.json")):
        value = read_json_or_none(path)
        if value is None:
            continue  # removed by another process just now
        if value["expires"] > time.time():
            nodes.append(BadNode(**{one.name: value[one.name] for one in fields(BadNode)}))
        else:
            path.unlink(missing_ok=True)
    return nodes


def sites_with_bad_nodes(runs: Path) -> list[str]:
    """The sites with recorded nodes below RUNS."""
    return sorted(path.name for path in (runs / ".bad-nodes").glob("*") if path.is_dir())


def forget_bad_node(runs: Path, site: str, node: str) -> bool:
    """Remove the record of one node; False if there was none."""
    path = _folder(runs, site) / f"{node}.json"
    known = path.exists()
    path.unlink(missing_ok=True)
    return known


def _folder(runs: Path, site: str) -> Path:
    return runs / ".bad-nodes" / site
