"""Programs that only print their steps, on two nodes: the run shows them, finds a NaN, and survives a lost rank."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from on_slurm import Site, make_site, wait_for

pytestmark = pytest.mark.cluster

PROGRAM = """
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
int main(void) {
    int start = 0;
    int prints = atoi(getenv("SLURM_PROCID")) == 0;
    FILE *state = fopen("state.txt", "r");
    if (state != NULL && fscanf(state, "%d", &start) != 1) start = 0;
    for (int step = start + 1; step <= 5000; step++) {
        usleep(100000);
        if (!prints) continue;
        printf("step %d/5000\\n  loss = %.4e\\n", step, step == 40 ? NAN : 5 / sqrt(step));
        fflush(stdout);
        if (step % 20 == 0) {
            state = fopen("state.txt", "w");
            fprintf(state, "%d", step);
            fclose(state);
        }
    }
}
"""
JOB = """
[job]
entry = ["./program"]
nodes = 2
ranks_per_node = 1
time = "5"
[observe]
step_line = ['step (?P<step>\\d+)/(?P<total>\\d+)', 'loss = (?P<loss>\\S+)']
[alerts.rules.high]
when = "loss > 0.1"
"""


@pytest.fixture
def here(cluster: Any, shared_path: Path) -> Site:
    return make_site(cluster, shared_path)


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_c_program_is_followed_judged_and_rehearsed(here: Site) -> None:
    here.await_empty()
    (here.folder / "program.c").write_text(PROGRAM)
    subprocess.run(["cc", "-o", here.folder / "program", here.folder / "program.c", "-lm"], check=True)
    (here.folder / "job.toml").write_text(JOB)
    _, run = here.submit(here.folder / "job.toml")
    verdicts = run.metrics / "verdicts.jsonl"
    wait_for(lambda: verdicts.exists() and "loss_not_finite" in verdicts.read_text())
    (not_finite,) = [json.loads(line) for line in verdicts.read_text().splitlines() if "loss_not_finite" in line]
    assert not_finite["first_step"] == 40
    wait_for(lambda: "loss.mean is" in here.ok("alerts", run.run_id))
    assert here.status(run)["step"] > 40
    beat = json.loads(run.attempt(0).heartbeat.read_text())
    assert beat["total"] == 5000
    assert 4 < beat["steps_per_s"] < 11
    done = here.toolkit("rehearse", run.run_id, "kill-rank", 1, "--yes", "--json", timeout_s=200)
    cost = json.loads(done.stdout)
    assert (cost["cause"], cost["next_attempt"]) == ("crashed", 1)
    assert 0 < cost["steps_repeated"] < cost["steps"]
    watched = json.loads(here.ok("status", run.run_id, "--json"))
    assert watched["step"] > cost["steps"]
    here.ok("cancel", run.run_id)
    here.wait(run)
