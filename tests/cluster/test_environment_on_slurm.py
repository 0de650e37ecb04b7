"""What ranks inherit on a real Slurm: a job that is submitted from inside another one knows nothing of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from on_slurm import TOOLKIT, Site, make_site, mpi_of, wait_for

import toolkit

pytestmark = pytest.mark.cluster

SHOWS = "import json, os; print(json.dumps(dict(os.environ)))"


@pytest.fixture
def here(cluster: Any, shared_path: Path) -> Site:
    return make_site(cluster, shared_path)


def test_a_job_that_is_submitted_inside_another_is_its_own(here: Site) -> None:
    """Outside are 3 GiB a node and 2 CPUs a task; inside are 500 MiB a CPU, which srun takes no second number beside."""
    job = here.folder / "inner.toml"
    entry = json.dumps([sys.executable, "-c", SHOWS])
    job.write_text(f"[job]\nentry = {entry}\ntime = '5'\nsbatch = ['--mem-per-cpu=500M']\n")
    outer = ["salloc", "-N2", "--ntasks-per-node=2", "-c2", "--mem=3G"]
    rank = "PMI_RANK" if mpi_of(here.cluster.layout)[0] == "pmi2" else "PMIX_RANK"
    stale = {rank: "5", "TMPDIR": "/the/outer/jobs", "LD_PRELOAD": "", "PYTHONPATH": "/outer"}
    done = here.command([*outer, *TOOLKIT, "submit", str(job), "--wait"], **stale)
    assert done.returncode == 0, done
    shown = json.loads(here.ok("logs", "--rank", 0))
    assert (shown["SLURM_MEM_PER_CPU"], shown["SLURM_CPUS_PER_TASK"], shown["SLURM_NNODES"]) == ("500", "1", "1")
    assert shown[rank] == "0"
    assert shown["TMPDIR"] != stale["TMPDIR"]
    assert not {"SLURM_MEM_PER_NODE", "LD_PRELOAD", "PYTHONPATH"} & set(shown)


def test_ranks_run_in_the_environment_on_their_nodes_disk(here: Site, cluster: Any) -> None:
    """Each node has a /tmp of its own; nothing of the environment stays in it."""
    venv = here.folder / "an env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (packages,) = venv.glob("lib/python*/site-packages")
    (packages / "toolkit.pth").write_text(f"{Path(toolkit.__file__).parents[1]}\n")
    here.file.write_text(here.file.read_text() + '[paths]\nlocal_scratch = "/tmp"\n')
    job = here.folder / "work.toml"
    shows = "import os, sys; print(os.environ['SLURMD_NODENAME'], sys.prefix)"
    job.write_text(
        f"[job]\nentry = {json.dumps(['python', '-c', shows])}\ntime = '5'\nnodes = 2\n[env]\nstage = {json.dumps(str(venv))}\n"
    )
    job_id, run = here.submit(job)
    assert here.wait(run).returncode == 0
    said = [line.partition("] ")[2].split() for line in here.ok("logs", "--rank", "all").splitlines()]
    assert {prefix.rpartition("-")[0] for _, prefix in said} == {f"/tmp/toolkit-env-{job_id}-0"}
    assert len({node for node, _ in said}) == 2
    wait_for(lambda: not here.command(["squeue", "-h", "-j", job_id, "-t", "R,CG"]).stdout.strip())
    for node, _ in said:
        assert "toolkit-env" not in cluster.exec(node, ["ls", "/tmp"]).stdout
