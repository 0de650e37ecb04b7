"""`explain` and `rehearse` of runs on this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from toolkit.rundir.claims import read_claim
from toolkit.rundir.files import read_json_or_none

PAGES = Path(__file__).parents[2] / "docs"

# Steps like a training job, without torch.
STEPS = """
import time
from toolkit.world.discover import discover

world = discover()
for step in range(600):
    world.stop_watch.look(step, rank=world.rank)
    time.sleep(0.05)
"""


def explain(toolkit, run) -> dict:
    return json.loads(toolkit.ok("explain", run.run_id, "--json"))


def documented(page: str, title: str) -> set[str]:
    """The first column of the table below a heading."""
    section = (PAGES / page).read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE))


def test_the_json_is_what_the_page_says(toolkit) -> None:
    run = toolkit.submit(toolkit.job("true"))
    toolkit.ok("wait", run.run_id)
    assert set(explain(toolkit, run)) == documented("explain.md", "JSON")


def test_every_symptom_stands_on_the_page() -> None:
    from toolkit.batch.explain_ended import _ENDS
    from toolkit.supervise.symptoms import SYMPTOMS

    words = documented("explain.md", "Symptoms")
    assert {symptom.word for symptom in SYMPTOMS} | set(_ENDS) <= words


def test_a_failed_program_is_quoted_without_its_colours(toolkit) -> None:
    job = toolkit.job("printf 'loading\\n\\033[31mno data\\033[0m\\n'; exit 3", more="[restart]\ncrashes = 0\n")
    run = toolkit.submit(job)
    assert toolkit("wait", run.run_id).code == 3
    told = explain(toolkit, run)
    assert (told["symptom"], told["rank"]) == ("exit_code", 0)
    quoted = {"source": "attempts/000/logs/rank-0.log", "line": "no data"}
    assert quoted in told["evidence"]
    assert told["follows"] == "nothing by itself (restart.crashes = 0 is spent)"
    text = toolkit.ok("explain", run.run_id)
    assert "\x1b" not in text
    assert "attempts/000/logs/rank-0.log: no data" in text and f"`toolkit resume {run.run_id}`" in text


def test_what_has_not_run_is_explained_too(toolkit, wait_until) -> None:
    toolkit.ok("render", toolkit.job("true", name="rendered"))
    (folder,) = toolkit.runs.glob("rendered/*")
    told = json.loads(toolkit.ok("explain", folder.name, "--json"))
    assert (told["symptom"], str(folder / "job.sbatch") in told["actions"][0]) == ("not_submitted", True)
    run = toolkit.submit(toolkit.job("sleep 60", name="lives"))
    wait_until(lambda: run.attempt_numbers() and run.attempt(0).rank_file(0).exists())
    told = explain(toolkit, run)
    assert (told["symptom"], "report no steps" in told["why"]) == ("running", True)
    os.kill(read_claim(run, 0).pid, signal.SIGKILL)
    wait_until(lambda: explain(toolkit, run)["state"] == "lost")
    assert explain(toolkit, run)["symptom"] == "supervisor_lost"
    toolkit.ok("explain", run.run_id)


@pytest.fixture
def stepping(toolkit, wait_until):
    (toolkit.folder / "steps.py").write_text(STEPS)
    path = toolkit.folder / "steps.toml"
    path.write_text(
        f"[job]\nentry = [{sys.executable!r}, {str(toolkit.folder / 'steps.py')!r}]\nranks_per_node = 2\n[restart]\ncrashes = 1\n"
    )
    run = toolkit.submit(path)
    wait_until(
        lambda: run.attempt_numbers() and (read_json_or_none(run.attempt(0).heartbeat) or {"step": 0})["step"] > 5
    )
    yield run
    toolkit("cancel", run.run_id)
    toolkit("wait", run.run_id)


def test_a_killed_rank_is_rehearsed_once_and_not_when_it_would_end_the_run(toolkit, stepping) -> None:
    asked = toolkit("rehearse", stepping.run_id, "kill-rank", 1)
    assert (asked.code, "give --yes" in asked.err) == (2, True), asked
    assert not stepping.attempt(0).exit_file.exists()
    cost = json.loads(toolkit.ok("rehearse", stepping.run_id, "kill-rank", 1, "--yes", "--json"))
    assert set(cost) == documented("rehearse.md", "JSON")
    assert (cost["cause"], cost["attempt"], cost["next_attempt"]) == ("crashed", 0, 1)
    assert cost["resumed_at"] == 0 and cost["steps_repeated"] == cost["steps"] > 5  # it keeps no checkpoints
    parts = [cost[part] for part in ("detect_s", "queue_s", "start_s", "first_step_s", "repeat_s")]
    assert cost["lost_s"] == pytest.approx(sum(parts), abs=1.0)
    end = json.loads(stepping.attempt(0).exit_file.read_text())
    assert (end["rank"], end["reason"].split(" (")[0]) == (1, "killed by SIGKILL")
    again = toolkit("rehearse", stepping.run_id, "kill-rank", 1, "--yes")
    assert (again.code, "would end this run" in again.err) == (1, True)
    for failure in ("preempt", "walltime", "kill-node"):
        refused = toolkit("rehearse", stepping.run_id, failure, "--yes")
        assert (refused.code, refused.err.count("\n")) == (1, 1)
    unknown = toolkit("rehearse", stepping.run_id, "kill-rank", 9, "--yes")
    assert unknown.code in (1, 2)
    assert not stepping.attempt(1).exit_file.exists()


def test_a_run_that_has_ended_is_not_rehearsed(toolkit) -> None:
    run = toolkit.submit(toolkit.job("true"))
    toolkit.ok("wait", run.run_id)
    said = toolkit("rehearse", run.run_id, "kill-rank", 0, "--yes")
    assert (said.code, "is completed; only a running one" in said.err) == (1, True)
