"""What ranks inherit on a real Slurm: a job that is submitted from inside another one knows nothing of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from test_main_job import TOOLKIT, Site, make_site

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
    stale = {"PMIX_RANK": "5", "TMPDIR": "/the/outer/jobs", "LD_PRELOAD": "", "PYTHONPATH": "/outer"}
    done = here.command([*outer, *TOOLKIT, "submit", str(job), "--wait"], **stale)
    assert done.returncode == 0, done
    shown = json.loads(here.ok("logs", "--rank", 0))
    assert (shown["SLURM_MEM_PER_CPU"], shown["SLURM_CPUS_PER_TASK"], shown["SLURM_NNODES"]) == (
        "500",
        "1",
        "1",
    )
    assert shown["PMIX_RANK"] == "0"
    assert shown["TMPDIR"] != stale["TMPDIR"]
    assert not {"SLURM_MEM_PER_NODE", "LD_PRELOAD", "PYTHONPATH"} & set(shown)
