"""Failures on purpose, on a real Slurm: the run goes on, and what it cost is told in steps and seconds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from on_slurm import Site, make_site, wait_for

from toolkit.rundir.files import read_json_or_none
from toolkit.rundir.layout import RunDirectory

pytestmark = pytest.mark.cluster

# Steps like a training job, without torch: each start of it begins again.
STEPS = """
import time
from toolkit.world.discover import discover

world = discover()
for step in range(2000):
    world.stop_watch.look(step, rank=world.rank)
    time.sleep(0.05)
"""
# Keeps its step at every tenth, and when it is asked to stop.
KEEPING = """
import time

def main(world, config):
    mark = world.run_dir / "metrics" / "mark"
    step = int(mark.read_text()) if mark.exists() else 0
    while step < 9000:
        stop = world.should_stop(step)
        if world.rank == 0 and (stop or step % 10 == 0):
            mark.write_text(str(step))
        if stop:
            return
        time.sleep(0.1)
        step += 1
"""


@pytest.fixture
def here(cluster: Any, shared_path: Path) -> Site:
    return make_site(cluster, shared_path)


def start(here: Site, entry: str, text: str, lines: str) -> tuple[str, RunDirectory]:
    (here.folder / "steps.py").write_text(text)
    path = here.folder / "steps.toml"
    path.write_text(f"[job]\nentry = {entry}\n{lines}\n[restart]\nwarn_s = 10\ncrashes = 1\n")
    job_id, run = here.submit(path)
    wait_for(lambda: step_of(run) > 5)
    return job_id, run


def step_of(run: RunDirectory) -> int:
    attempt = run.last_attempt()
    beat = read_json_or_none(attempt.heartbeat) if attempt else None
    return beat["step"] if beat else 0


def rehearse(here: Site, run: RunDirectory, *failure: object) -> dict[str, Any]:
    done = here.toolkit("rehearse", run.run_id, *failure, "--yes", "--json", timeout_s=200)
    assert done.returncode == 0, done
    cost: dict[str, Any] = json.loads(done.stdout)
    return cost


def test_a_rank_on_another_node_is_killed_and_the_run_goes_on(here: Site) -> None:
    entry = f"[{sys.executable!r}, {str(here.folder / 'steps.py')!r}]"
    _, run = start(here, entry, STEPS, 'nodes = 2\nranks_per_node = 1\ntime = "5"')
    cost = rehearse(here, run, "kill-rank", 1)
    assert (cost["cause"], cost["done"].split(" on ")[0]) == ("crashed", "sent KILL to rank 1")
    assert cost["steps_repeated"] == cost["steps"] > 0 and cost["lost_s"] > 0
    end = json.loads(run.attempt(0).exit_file.read_text())
    assert (end["rank"], end["reason"].split(" (")[0]) == (1, "killed by SIGKILL")
    again = here.toolkit("rehearse", run.run_id, "kill-rank", 1, "--yes")
    assert (again.returncode, "would end this run" in again.stderr) == (1, True)
    here.ok("cancel", run.run_id)
    here.wait(run)


@pytest.mark.evidence
@pytest.mark.timeout(600)
def test_preemption_walltime_and_a_lost_node(here: Site) -> None:
    job_id, run = start(here, '"steps.py:main"', KEEPING, 'nodes = 2\nranks_per_node = 1\ntime = "10"')
    cost = rehearse(here, run, "preempt")
    assert (cost["cause"], cost["steps_repeated"]) == ("preempted", 0)
    cost = rehearse(here, run, "walltime")
    assert (cost["cause"], cost["steps_repeated"]) == ("walltime", 0)
    assert here.command(["squeue", "-h", "-j", job_id, "-o", "%l"]).stdout.strip() == "10:00"
    nodes = {json.loads(path.read_text())["host"] for path in run.last_attempt().ranks.glob("rank-*.json")}
    cost = rehearse(here, run, "kill-node")
    assert cost["cause"] in ("node_lost", "supervisor_lost") and cost["done"].split()[1] in nodes
    assert cost["steps_repeated"] <= 15  # a tenth step is kept, and a heartbeat is up to ten steps old
    assert "down" not in here.command(["sinfo", "-h", "-N", "-o", "%T"]).stdout
    assert "bad since run" not in here.ok("site", "bad-nodes")
    here.ok("cancel", run.run_id)
    here.wait(run)
