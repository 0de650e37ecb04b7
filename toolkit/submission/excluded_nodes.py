"""Which nodes a submission leaves out, because they were bad for earlier runs, and what is said of it."""

from __future__ import annotations

import time
from pathlib import Path

from toolkit.config.resolved import ResolvedJob
from toolkit.rundir.bad_nodes import BadNode, bad_nodes
from toolkit.slurm.hostlist import expand_hostlist
from toolkit.talk import say


def nodes_to_exclude(job: ResolvedJob, runs: Path) -> list[str]:
    """Bad nodes of the job's site, each told on stderr; those that the job itself asks for are not left out."""
    known = bad_nodes(runs, job.site.name)
    wanted = set(expand_hostlist(job.job.nodelist)) if known else set()  # else Slurm alone judges the list
    excluded = []
    for bad in known:
        if bad.node in wanted:
            say(f"{describe(bad)}; the job asks for it all the same")
        else:
            clear = f"toolkit site bad-nodes --clear {bad.node}"
            say(f"{describe(bad)}; it is left out (`{clear}` forgets this)")
            excluded.append(bad.node)
    return excluded


def describe(bad: BadNode) -> str:
    """One bad node in words."""
    hours = max(0.0, bad.expires - time.time()) / 3600
    return f"{bad.node} was bad for run {bad.run_id} ({bad.reason}), remembered for {hours:.0f} h more"
