"""A heterogeneous job on a real Slurm: one world over its components, a rank that fails, and a cancel."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from on_slurm import Site, await_idle_nodes, wait_for

import toolkit

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
    """Each node is checked before, and the ranks run in an environment on their nodes' own disks."""
    here.await_empty()
    venv = here.folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (packages,) = venv.glob("lib/python*/site-packages")
    (packages / "toolkit.pth").write_text(f"{Path(toolkit.__file__).parents[1]}\n")
    here.file.write_text(here.file.read_text() + '[paths]\nlocal_scratch = "/tmp"\n')
    job = here.job(WHO, f"{COMPONENTS}[restart]\nhealth = 'requeue'\n[env]\nstage = '{venv}'\n")
    job_id, run = here.submit(job)
    done = here.wait(run)
    assert done.returncode == 0, done
    said = [(run.attempt(0).path / "logs" / f"rank-{rank}.log").read_text().strip() for rank in range(5)]
    assert said == [f"{rank} of 5, {2 if rank == 0 else 1} threads" for rank in range(5)]
    status = here.status(run)
    assert (status["nodes"], status["ranks"]) == (3, 5)
    assert json.loads(here.ok("status", f"{job_id}+1", "--json"))["run_id"] == run.run_id
    log = next(run.path.glob("slurm-*.out")).read_text()
    assert "cannot check the health" not in log
    assert f"toolkit: staged {venv} (0 MiB) to /tmp/toolkit-env-{job_id}-0-" in log and " on 3 nodes: packed in " in log


def test_an_unfit_node_of_the_second_component_is_left_out_by_all(here: Site) -> None:
    await_idle_nodes(here.cluster)
    job = here.job(WHO, COMPONENTS.replace("nodes = 2", "nodes = 3") + "[restart]\nhealth = 'requeue'\n")
    mount = ["mount", "-o", "remount,ro", "/dev/shm"]
    assert here.cluster.exec("node4", mount).returncode == 0
    try:
        job_id, run = here.submit(job)
        wait_for(run.attempt(0).exit_file.exists)
    finally:
        here.cluster.exec("node4", ["mount", "-o", "remount,rw", "/dev/shm"])
    end = json.loads(run.attempt(0).exit_file.read_text())
    assert (end["cause"], end["next"], end["host"]) == ("node_unfit", "requeue", "node4")
    wait_for(lambda: here.command(["scontrol", "show", "job", job_id]).stdout.count("ExcNodeList=node4\n") == 2)
    here.ok("cancel", run.run_id)


@pytest.mark.evidence
def test_mpich_starts_over_pmi2_across_components(here: Site) -> None:
    """Its ranks are one MPI world where the components' nodes stand as their names sort."""
    here.file.write_text(
        here.file.read_text() + f'[launcher]\nmpi = "pmi2"\nlibmpi = "{sys.prefix}/lib/libmpi.so.12"\n'
    )
    (here.folder / "sum.py").write_text(
        "from mpi4py import MPI\nworld = MPI.COMM_WORLD\n"
        "print(MPI.Get_library_version().split()[0], world.rank, world.allreduce(1), flush=True)\n"
    )
    job = here.folder / "sum.toml"
    first, second = "nodelist = 'node1'", "nodes = 2\nranks_per_node = 2\nnodelist = 'node[2-3]'"
    job.write_text(f"[job]\nentry = 'sum.py'\ntime = '5'\n[[component]]\n{first}\n[[component]]\n{second}\n")
    _, run = here.submit(job)
    assert here.wait(run).returncode == 0
    said = [run.attempt(0).log_file(rank).read_text().splitlines()[-1] for rank in range(5)]
    assert said == [f"MPICH {rank} 5" for rank in range(5)]


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
