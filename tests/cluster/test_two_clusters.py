"""Two clusters under one accounting: a run on the other one, from the login node of the first."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clusters import running_cluster
from on_slurm import Site, is_stepping, make_site, wait_for

from toolkit.devcluster import cluster as devcluster
from toolkit.devcluster.layout import ClusterSpec, make_layout
from toolkit.devcluster.nodes import process_in_node
from toolkit.devcluster.processes import kill_and_wait
from toolkit.errors import NotFoundError, ToolkitError

pytestmark = pytest.mark.cluster


@pytest.fixture
def far(accounting_cluster: Any) -> Iterator[Any]:
    spec = ClusterSpec(1, 0, "", True, "", accounting_of=accounting_cluster.layout.name)
    with running_cluster("-far", spec) as layout:
        yield layout


def test_a_run_lives_on_the_other_cluster(accounting_cluster: Any, far: Any, shared_path: Path) -> None:
    here = make_site(accounting_cluster, shared_path)
    job, enough = here.stepping()
    said = here.toolkit("submit", job, "-M", "nowhere")
    assert said.returncode == 2 and f"Fix: choose one with -M: devcluster, {far.name}" in said.stderr
    number, run = here.submit(job, "-M", far.name)
    wait_for(is_stepping(run, 0))
    status = here.status(run)
    assert (status["state"], status["cluster"]) == ("running", far.name)
    assert here.ok("status", f"{number};{far.name}", "--json") and far.name in here.ok("status")
    enough.touch()
    assert here.wait(run).returncode == 0
    assert json.loads(here.ok("efficiency", run.run_id, "--json"))["source"] == "sacct"
    here.ok("session", "start", "-M", far.name, "-N", "1", "-t", "5", "--name", far.name)
    assert here.ok("session", "exec", far.name, "--", "sh", "-c", "echo $SLURM_CLUSTER_NAME") == f"{far.name}\n"
    here.ok("session", "stop", far.name)
    _when_it_is_down(here, far, job)


def _when_it_is_down(here: Site, far: Any, job: Path) -> None:
    pid = process_in_node(far, "controller", "slurmctld")
    assert pid is not None
    kill_and_wait([pid])
    said = here.toolkit("submit", job, "-M", far.name)
    assert said.returncode in (2, 3) and far.name in said.stderr
    assert not list((here.folder / "runs").glob("*/*/submitting-*"))


def test_whose_accounting_cannot_be_shared(cluster: Any) -> None:
    layout = make_layout(f"{cluster.layout.name}-lone", cluster.folder.parent / f"{cluster.layout.name}-lone")
    for name, error in (("nobody", NotFoundError), (layout.name, ToolkitError)):
        with pytest.raises(error):
            devcluster.up(layout, ClusterSpec(1, 0, "", True, "", accounting_of=name))
    assert not layout.folder.exists()
