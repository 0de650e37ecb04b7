"""The nodes that a submission excludes because they were bad for earlier runs."""

from __future__ import annotations

import time
from pathlib import Path

from toolkit.config.resolved import ResolvedJob
from toolkit.rundir.bad_nodes import BadNode, bad_nodes
from toolkit.slurm.hostlist import expand_hostlist
from toolkit.talk import say

__all__ = ["describe", "nodes_to_exclude"]


def nodes_to_exclude(job: ResolvedJob, runs: Path) -> list[str]:
    """Return the bad nodes of the job's site, each reported on stderr; those that the job requests are kept."""
    known = bad_nodes(runs, job.site.name)
    wanted = set(expand_hostlist(job.job.nodelist)) if known else set()  # else Slurm alone judges the list
    excluded = []
    for bad in known:
        if bad.node in wanted:
            say(f"{describe(bad)}; kept because the job requests it")
        else:
            clear = f"toolkit site bad-nodes --clear {bad.node}"
            say(f"{describe(bad)}; excluded (`{clear}` forgets this)")
            excluded.append(bad.node)
    return excluded


def describe(bad: BadNode) -> str:
    """Return the description of one bad node."""
    hours = max(0.0, bad.expires - time.time()) / 3600
    return f"{bad.node} was bad for run {bad.run_id} ({bad.reason}), remembered for {hours:.0f} h more"
