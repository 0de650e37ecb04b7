"""Records nodes that made an attempt fail or failed a health check, for a day, in RUNS/.bad-nodes/SITE/NODE.json.

There is one file per node, written atomically, so that the supervisors of several runs need no lock. The next submit
and resume exclude these nodes.
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
    """A node and why it is excluded until `expires`; times are in seconds since the epoch."""

    node: str
    reason: str
    run_id: str
    noted: float
    expires: float


def runs_of(run: RunDirectory) -> Path:
    """Return RUNS, the folder that contains all runs."""
    return run.whole.path.parents[1]


def note_bad_node(run: RunDirectory, site: str, node: str, reason: str) -> None:
    """Record a node as bad from now on."""
    folder = _folder(runs_of(run), site)
    for path in (folder.parent, folder):
        path.mkdir(mode=0o700, exist_ok=True)
    now = time.time()
    write_json(folder / f"{node}.json", asdict(BadNode(node, reason, run.run_id, now, now + REMEMBERED_S)))


def bad_nodes(runs: Path, site: str) -> list[BadNode]:
    """Return the nodes of a site to exclude now. Removes expired files."""
    nodes = []
    for path in sorted(_folder(runs, site).glob("[!.]*.json")):
        value = read_json_or_none(path)
        if value is None:
            continue  # another process has just removed the file
        if value["expires"] > time.time():
            nodes.append(BadNode(**{one.name: value[one.name] for one in fields(BadNode)}))
        else:
            path.unlink(missing_ok=True)
    return nodes


def sites_with_bad_nodes(runs: Path) -> list[str]:
    """Return the sites for which bad nodes are recorded below RUNS."""
    return sorted(path.name for path in (runs / ".bad-nodes").glob("*") if path.is_dir())


def forget_bad_node(runs: Path, site: str, node: str) -> bool:
    """Remove the record of one node; False if there was none."""
    path = _folder(runs, site) / f"{node}.json"
    known = path.exists()
    path.unlink(missing_ok=True)
    return known


def _folder(runs: Path, site: str) -> Path:
    return runs / ".bad-nodes" / site
