"""A node that fails the check at a start is named, left out of the requeue and of the next submission."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from on_slurm import Site, await_idle_nodes, make_site

from toolkit.rundir.files import read_json

pytestmark = pytest.mark.cluster


@pytest.fixture
def here(cluster: Any, shared_path: Path) -> Site:
    return make_site(cluster, shared_path)


@pytest.fixture
def broken_node1(cluster: Any) -> Iterator[None]:
    """Its /dev/shm cannot be written to."""
    for flag in ("ro", "rw"):
        done = cluster.exec("node1", ["mount", "-o", f"remount,{flag}", "/dev/shm"])
        assert done.returncode == 0, done
        if flag == "ro":
            yield


def test_a_run_goes_on_without_the_node(here: Site, broken_node1: None) -> None:
    job = here.job("echo on $SLURMD_NODENAME", "[checkpoint]\nevery_steps = 0\n")
    # All nodes are there and free, and it takes them all: else it may be given others than the broken one.
    await_idle_nodes(here.cluster)
    _, run = here.submit(job, "-N", "2-4")
    done = here.wait(run)
    assert done.returncode == 0, done
    first, second = (read_json(run.attempt(number).exit_file) for number in (0, 1))
    assert (first["cause"], first["next"], first["host"]) == ("node_unfit", "requeue", "node1")
    assert first["reason"].startswith("node1 failed the /dev/shm check: ")
    assert second["cause"] == "completed"
    assert "on node1" not in here.ok("logs", run.run_id, "--rank", "all")
    assert "node1" in here.ok("site", "bad-nodes")
    rendered = here.toolkit("render", job)
    assert "#SBATCH --exclude=node1\n" in rendered.stdout and "node1 is marked bad since run" in rendered.stderr
    here.ok("site", "bad-nodes", "--clear", "node1")
    assert "--exclude" not in here.ok("render", job)
