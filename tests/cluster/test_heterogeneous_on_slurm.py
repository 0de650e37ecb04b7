"""A heterogeneous job on a real Slurm: one world over its components, a rank that fails, and a cancel."""

from __future__ import annotations

import json

import pytest
from on_slurm import Site, wait_for

pytestmark = pytest.mark.cluster

COMPONENTS = """
[[component]]
cpus_per_rank = 2
mem_gb_per_node = 1
[[component]]
nodes = 2
ranks_per_node = 2
"""
WHO = "echo $TOOLKIT_RANK of $TOOLKIT_WORLD_SIZE, $OMP_NUM_THREADS threads"


def test_one_world_over_two_components(here: Site) -> None:
    here.await_empty()
    job = here.job(WHO, COMPONENTS + "[restart]\nhealth = 'requeue'\n")
    job_id, run = here.submit(job)
    done = here.wait(run)
    assert done.returncode == 0, done
    said = [(run.attempt(0).path / "logs" / f"rank-{rank}.log").read_text().strip() for rank in range(5)]
    assert said == [f"{rank} of 5, {2 if rank == 0 else 1} threads" for rank in range(5)]
    status = here.status(run)
    assert (status["nodes"], status["ranks"]) == (3, 5)
    assert json.loads(here.ok("status", f"{job_id}+1", "--json"))["run_id"] == run.run_id
    assert "node's health is not known" not in next(run.path.glob("slurm-*.out")).read_text()


def test_a_rank_of_the_second_component_that_fails_ends_the_run(here: Site) -> None:
    job = here.job("test $TOOLKIT_RANK != 4 || exit 7; sleep 100", COMPONENTS + "[restart]\ncrashes = 0\n")
    _, run = here.submit(job)
    assert here.wait(run).returncode == 7
    assert json.loads(run.attempt(0).exit_file.read_text())["rank"] == 4


def test_a_cancel_ends_all_components(here: Site) -> None:
    job_id, run = here.submit(here.job("sleep 100", COMPONENTS))
    wait_for(run.attempt(0).rank_file(4).exists)
    here.ok("cancel", run.run_id)
    wait_for(lambda: here.status(run)["state"] == "cancelled")
    wait_for(lambda: job_id not in here.command(["squeue", "--noheader", "--format=%i"]).stdout)
