"""A real Slurm: what `sbatch --test-only` takes and can never run is refused, and what a run used is counted."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from on_slurm import Site, make_site

from toolkit.config.request import JobRequest
from toolkit.errors import ToolkitError
from toolkit.submission.create import preflight as api_preflight

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]

# Each rank works for some seconds with 100 MB.
BUSY = "python3 -c 'x = bytearray(100_000_000); import time; end = time.process_time() + 0.8\nwhile time.process_time() < end: pass'"


def takes(here: Site, *argv: str) -> bool:
    """Whether `sbatch --test-only` says when the job would start."""
    said = here.command(["sbatch", "--test-only", "--output=/dev/null", *argv, "--wrap=true"])
    return "to start at" in said.stderr


def preflight(here: Site, *argv: str) -> list[dict[str, Any]]:
    said = here.toolkit("preflight", here.job("true"), "--json", *argv)
    assert said.returncode in (0, 1), said
    told = json.loads(said.stdout)
    assert not told["not_answered"]
    return [one for one in told["findings"] if one["severity"] == "refusal"]


def efficiency(here: Site, *, sacct: bool = True) -> dict[str, Any]:
    """Of the last run; without `sacct` as where there is no accounting."""
    silent = here.folder / "silent"
    silent.mkdir(exist_ok=True)
    (silent / "sacct").write_text("#!/bin/sh\nexit 1\n")
    (silent / "sacct").chmod(0o755)
    path = here.cluster.env["PATH"]
    told: dict[str, Any] = json.loads(here.ok("efficiency", "--json", PATH=path if sacct else f"{silent}:{path}"))
    return told


def busy_array(here: Site) -> None:
    """Two tasks, of which one works."""
    job = here.folder / "busy.toml"
    entry = json.dumps(["bash", "-c", f"test $SLURM_ARRAY_TASK_ID = 0 || {BUSY}"])
    job.write_text(
        f"[job]\nentry = {entry}\nnodes = 2\nranks_per_node = 2\ncpus_per_rank = 2\nmem_gb_per_node = 4\ntime = '30'\n"
    )
    run = here.submit(job, "-a", "0-1", "--wait")[1]
    assert not run.task(1).attempt(0).usage.exists()  # the task is done, and keeps them in its exit.json
    told = efficiency(here, sacct=False)
    assert told["source"] == "own samples"
    assert told["walltime_s"]["asked"] == 1800 and 1 < told["walltime_s"]["used"] < 900
    # Four ranks, 0.8 s each; the first of a node counts until its own end, whatever the other has still to do.
    assert 1.5 < told["cpu_s"]["used"] < 60
    assert 0.2e9 < told["memory_bytes"]["used"] < 1e9  # two ranks on a node
    assert told["memory_bytes"]["asked"] == 4 * 2**30
    idle, busy = told["tasks"]
    assert idle["memory_peak_bytes"] < 0.2e9 < busy["memory_peak_bytes"]
    assert told["advice"][0]["flag"] == "-t 0-00:05:00"


def test_scripts_that_sbatch_rejects(here: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """preflight rejects each script that sbatch rejects, and accepts the others."""
    spec = importlib.util.spec_from_file_location("preflight_verdicts", ROOT / "benchmarks" / "preflight_verdicts.py")
    assert spec is not None and spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, benchmark)
    spec.loader.exec_module(benchmark)
    environment = {**here.cluster.env, "TOOLKIT_SITE": str(here.file), "TOOLKIT_RUNS": str(here.folder / "runs")}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for number, lines in enumerate(benchmark.SCRIPTS[::4][:20]):
        path = here.folder / f"script-{number}.sh"
        path.write_text(benchmark.script_with(lines))
        accepted = here.command(["sbatch", "--test-only", str(path)]).returncode == 0
        try:
            found = api_preflight(JobRequest(str(path))).refusals
        except ToolkitError as error:
            found = [error]
        assert (not found) == accepted, (lines, found)


def test_what_slurm_would_take_and_never_run(here: Site) -> None:
    """And what it would refuse: in a moment, with a fix, before anything is written."""
    for argv in (["--time=2-0"], ["--output=/no/such/folder/%j.out"]):
        assert takes(here, *argv)
    assert [one["fix"] for one in preflight(here, "--time", "2-0")] == ['time = "1-00:00:00"']
    (finding,) = preflight(here, "--output", "/no/such/folder/%j.out")
    assert finding["fix"] == "mkdir -p /no/such/folder"
    assert preflight(here, "-a", "0-3,10500") == []  # `submit` splits an array above MaxArraySize
    gres = ("--set", "job.sbatch=--gres=fpga:1")
    checks = {
        one["check"] for one in preflight(here, "-N", "9", "--set", "job.mem_gb_per_node=99", "-C", "gold", *gres)
    }
    assert checks == {"nodes", "memory", "constraint", "gpu_dialect"}
    refused = here.toolkit("submit", here.job("true"), "--gpus-per-node", "5", "--ntasks-per-node", "5")
    assert refused.returncode == 2 and "no node has more than 4" in refused.stderr
    assert not (here.folder / "runs").exists()


def test_with_accounting(accounting_cluster: Any, shared_path: Any) -> None:
    """Accounts, the limits of a QOS, and efficiency after sacct, with which what the run sampled itself agrees."""
    here = make_site(accounting_cluster, shared_path)
    accounting_cluster.run("sacctmgr", "-i", "-Q", "add", "qos", "tight", "set", "MaxTRES=node=1", "MaxWall=5")
    accounting_cluster.run("sacctmgr", "-i", "-Q", "modify", "user", "root", "set", "qos+=tight")
    try:
        assert takes(here, "--qos=tight", "-N", "2", "--time=9")
        found = preflight(here, "-q", "tight", "-N", "2", "-t", "9")
        assert {one["what"] for one in found} == {
            "2 nodes, but QOS tight allows at most 1 per job", "walltime 0-00:09:00, but QOS tight allows at most 0-00:05:00",
        }  # fmt: skip
        (account,) = preflight(here, "-A", "nobody")
        assert account["what"] == "root may not charge account nobody" and "toolkit" in account["fix"]
        busy_array(here)
        own, accounted = efficiency(here, sacct=False), efficiency(here)
        assert accounted["source"] == "sacct"
        # sacct also counts the supervisor and its launcher, of each of two tasks.
        assert -1 < accounted["cpu_s"]["used"] - own["cpu_s"]["used"] < 6
        assert -2 < accounted["walltime_s"]["used"] - own["walltime_s"]["used"] < 15
        assert accounted["memory_bytes"] == own["memory_bytes"]
    finally:
        subprocess.run(["sacctmgr", "-i", "-Q", "delete", "qos", "tight"], env=accounting_cluster.env, check=True)
