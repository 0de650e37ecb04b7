"""Metrics that a program of the user records reach every view of its run."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from pathlib import Path

import jsonschema
import pytest

from toolkit.metrics.window_file import WindowReader
from toolkit.rundir.attempt_records import AttemptRecord
from toolkit.runs.follow.pages import Pages
from toolkit.runs.follow.progress import progress_of
from toolkit.runs.follow.rendering import line_of
from toolkit.runs.status.state import run_status
from toolkit.submission.run_handle import Run

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/schemas/run-directory.schema.json").read_text())
PROGRAM = """
import os, sys, time, toolkit
for n in range(1, 10):
    time.sleep(0.3)
    toolkit.record("loss", float("nan") if n == 9 and "nan" in sys.argv else 9.0 / n)
    toolkit.record("gap", int(os.environ["TOOLKIT_RANK"]))
    if n == 4:
        toolkit.record("val_acc", 0.25)
    toolkit.step(n)
if "kill" in sys.argv:
    os.kill(os.getpid(), 9)
time.sleep(0.4)
toolkit.record("test_acc", 0.75)
"""


@pytest.fixture
def runs(toolkit):
    """One run that completed, and one that was killed after a loss that is not finite."""
    (toolkit.folder / "p.py").write_text(PROGRAM)

    def submit(argument: str):
        more = "ranks_per_node = 2\n[restart]\ncrashes = 0\n[observe]\nmetrics = ['gap:mean']\n"
        job = toolkit.job(f"exec {sys.executable} {toolkit.folder}/p.py {argument}", name="own", more=more)
        run = toolkit.submit(job)
        toolkit("wait", run.run_id)
        return run

    return submit("good"), submit("nan kill")


def test_every_view_shows_them(toolkit, runs):
    good, killed = runs
    status = json.loads(toolkit.ok("status", good.run_id, "--json"))
    jsonschema.validate(status, {**SCHEMA, "$ref": "#/$defs/status"})
    assert (status["loss"], status["metrics"]) == (1.0, {"loss": 1.0, "val_acc": 0.25, "test_acc": 0.75, "gap": 0.5})
    status = json.loads(toolkit.ok("status", killed.run_id, "--json"))
    jsonschema.validate(status, {**SCHEMA, "$ref": "#/$defs/status"})
    # The last values before kill -9 are kept.
    nan = {"$float": "nan"}
    assert (status["state"], status["step"], status["loss"]) == ("failed", 9, None)
    assert status["metrics"] == {"loss": nan, "val_acc": 0.25, "gap": 0.5}
    for _ in range(2):  # the second one is from the cache
        lines = toolkit.ok("history").splitlines()
        assert (
            "loss nan, val_acc 0.25, gap 0.5" in lines[1] and "loss 1, val_acc 0.25, test_acc 0.75, gap 0.5" in lines[2]
        )

    found = progress_of(killed, run_status(killed), None)
    assert line_of(found) == "own failed: step 9, loss nan, val_acc 0.25, gap 0.5"
    assert found.losses[-1] != found.losses[-1] and found.losses[0] > 1.0
    assert json.loads(found.as_json())["metrics"] == status["metrics"]
    result = {
        row["key"]: (row["a"], row["b"])
        for row in json.loads(toolkit.ok("diff", *(one.run_id for one in runs), "--json"))["result"]
    }
    assert (result["loss"], result["test_acc"], result["gap"]) == ((1.0, nan), (0.75, None), (0.5, 0.5))
    assert re.search(r"loss +1.0 +NaN", toolkit.ok("diff", *(one.run_id for one in runs)))

    rows = Run(good.path).metrics()
    assert [row["step"] for row in rows] == sorted(row["step"] for row in rows)
    (row,) = (row for row in rows if "val_acc" in row)
    assert (row["step"], row["val_acc"]) == (4, 0.25)
    assert (rows[-1]["step"], rows[-1]["loss"], rows[-1]["test_acc"], rows[-1]["gap"]) == (9, 1.0, 0.75, 0.5)
    table = list(csv.DictReader(io.StringIO(toolkit.ok("metrics", "export", killed.run_id, "--csv", "-"))))
    assert (table[-1]["step"], table[-1]["loss"], table[-1]["gap"]) == ("9", "nan", "0.5")
    assert {row["step"]: row["val_acc"] for row in table if row["val_acc"]} == {"4": "0.25"}
    toolkit.ok("metrics", "export", good.run_id, "--otlp", toolkit.folder / "spans.json")
    (spans,) = json.loads((toolkit.folder / "spans.json").read_text())["resourceSpans"][0]["scopeSpans"]
    (last,) = (one for one in spans["spans"] if one["name"] == "step 9")
    assert {"key": "test_acc", "value": {"stringValue": "0.75"}} in last["attributes"]
    assert int(last["endTimeUnixNano"]) > int(last["startTimeUnixNano"])


def test_the_page_has_a_curve_of_each(toolkit, runs):
    good, killed = runs
    pages = Pages([good, killed])
    rows = {row["run_id"]: row["loss"] for row in pages.look("")[0]["overview"]}
    assert rows == {good.run_id: 1.0, killed.run_id: {"$float": "nan"}}
    shown = pages.look(good.run_id)[0]
    json.dumps(shown, allow_nan=False)
    assert shown["run"]["metrics"]["test_acc"] == 0.75
    assert set(shown["view"]["own"]) == {"val_acc", "test_acc", "gap"}
    assert (shown["view"]["own"]["val_acc"]["step"], shown["view"]["own"]["val_acc"]["mean"]) == ([4], [0.25])
    assert (shown["view"]["loss"]["step"][-1], shown["view"]["loss"]["mean"][-1]) == (9, 1.0)
    shown = pages.look(killed.run_id)[0]["view"]["loss"]
    assert (shown["step"][-1], shown["mean"][-1]) == (9, None)


def test_tensorboard_has_a_scalar_of_each(toolkit, runs):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    good, folder = runs[0], toolkit.folder / "tb"
    toolkit.ok("metrics", "export", good.run_id, "--tensorboard", folder)
    events = EventAccumulator(str(folder / good.job_name / good.run_id)).Reload()
    assert set(events.Tags()["scalars"]) == {"train/loss", "train/val_acc", "train/test_acc", "train/gap"}
    assert [(one.step, one.value) for one in events.Scalars("train/val_acc")] == [(4, 0.25)]


def test_a_running_program_has_a_rate_and_its_last_values(toolkit, wait_until):
    (toolkit.folder / "p.py").write_text(PROGRAM.replace("range(1, 10)", "range(1, 5000)"))
    run = toolkit.submit(toolkit.job(f"exec {sys.executable} {toolkit.folder}/p.py"))
    found = []

    def has_rate() -> bool:
        if run.attempt_numbers():
            found.append(progress_of(run, run_status(run), None))
        return bool(found) and found[-1].steps_per_s is not None and "val_acc" in found[-1].metrics

    wait_until(has_rate)
    assert 0.1 < found[-1].steps_per_s < 4
    assert re.fullmatch(r"work running: step \d+, [\d.]+ steps/s, loss [\d.]+, gap 0, val_acc 0.25", line_of(found[-1]))
    toolkit.ok("cancel", run.run_id)


def test_a_metric_without_a_step_hides_no_printed_steps(toolkit):
    (toolkit.folder / "p.py").write_text("""
import time, toolkit
for n in range(1, 6):
    print(f"iter {n} loss {9 / n}", flush=True)
    time.sleep(0.6)
toolkit.record("temp", 5)
""")
    more = "[observe]\nstep_line = ['iter (?P<step>[0-9]+) loss (?P<loss>[0-9.]+)']\n"
    run = toolkit.submit(toolkit.job(f"exec {sys.executable} {toolkit.folder}/p.py", more=more), "--wait")
    status = json.loads(toolkit.ok("status", run.run_id, "--json"))
    assert (status["step"], status["metrics"]) == (5, {"loss": 1.8})
    rows = Run(run.path).metrics()
    assert rows[-1]["step"] == 5 and len(rows) > 2


def test_metrics_that_cannot_be_written_cost_no_windows(toolkit, wait_until):
    (toolkit.folder / "p.py").write_text(f"""
import os
for name in "own", "means":
    os.makedirs(os.environ["TOOLKIT_RUN_DIR"] + f"/metrics/{{name}}.jsonl", exist_ok=True)
{PROGRAM}""")
    more = "ranks_per_node = 2\n[observe]\nmetrics = ['gap:mean']\n"
    run = toolkit.submit(toolkit.job(f"exec {sys.executable} {toolkit.folder}/p.py", more=more))
    wait_until(lambda: run.attempt_numbers() and AttemptRecord.read(run.attempt(0)))
    windows = WindowReader(run.attempt(0).windows_file(0)).new()
    assert {one.rank: one.last_step for one in windows} == {0: 9, 1: 9}
    (log,) = run.path.glob("slurm-*.out")
    for path, name in (log, "means.jsonl"), (run.attempt(0).log_file(0), "own.jsonl"):
        (problem,) = (line for line in path.read_text().splitlines() if "Is a directory" in line)
        assert name in problem


def test_a_program_that_starts_again_keeps_its_last_step_until_the_next_one(toolkit):
    (toolkit.folder / "again.py").write_text(
        "import os, sys, toolkit\nif os.environ['TOOLKIT_ATTEMPT'] == '1': sys.exit(4)\n"
        "for n in range(4):\n    toolkit.record('loss', 6 - n)\n    toolkit.step(n)\nsys.exit(3)\n"
    )
    command = f"exec {sys.executable} {toolkit.folder}/again.py"
    run = toolkit.submit(toolkit.job(command, name="again", more="[restart]\ncrashes = 1\n"))
    toolkit("wait", run.run_id)
    status = json.loads(toolkit.ok("status", run.run_id, "--json"))
    assert (status["attempts"], status["step"], status["loss"]) == (2, 3, 3.0)
