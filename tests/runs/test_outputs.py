"""What other programs read of an export: CSV, and TensorBoard's own reader."""

from __future__ import annotations

import csv
import io
import json
import sys
import time
from datetime import datetime

import pytest
from recorded_runs import add_verdicts, record_all, record_steps, straggler

from toolkit.metrics.validation import ValidationLog, ValidationRecord
from toolkit.rundir.claims import claim_attempt
from toolkit.rundir.files import write_json
from toolkit.rundir.layout import RunDirectory


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_csv_has_a_row_for_each_record(toolkit, run_directory):
    write_json(
        run_directory.record,
        json.loads(RunDirectory(toolkit.submit(toolkit.job("true"), "--wait").path).record.read_text()),
    )
    record_all(run_directory)
    record_steps(claim_attempt(run_directory), 2, loss=float("nan"))

    def export(what: str) -> list[dict[str, str]]:
        return rows(toolkit.ok("metrics", "export", run_directory.path, "--csv", "-", "--what", what))

    training = export("training")
    assert [(row["step"], row["attempt"], row["loss"]) for row in training] == [("1", "1", "nan"), ("2", "1", "nan")]
    assert {row["run_id"] for row in training} == {run_directory.run_id}
    (verdict,) = export("verdicts")
    assert (verdict["kind"], verdict["ranks"], json.loads(verdict["evidence"])) == ("straggler", "1", {"excess": 0.3})
    windows = export("windows")
    work = [row for row in windows if (row["metric"], row["rank"]) == ("work_s", "7")]
    assert [(row["host"], row["steps"], float(row["p95"])) for row in work] == [("n1", "50", pytest.approx(0.107))] * 2
    assert len(windows) == 8 * 2 * 13
    file = toolkit.folder / "steps.csv"
    toolkit.ok("metrics", "export", run_directory.path, "--csv", file)
    assert rows(file.read_text()) == training


def test_an_export_without_records_or_place_says_what_to_do(toolkit, monkeypatch):
    run = toolkit.submit(toolkit.job("true"), "--wait")
    add_verdicts(run, [straggler(time.time())])
    for options, code, said in (
        ((), 2, "expected --csv"), (("--csv", "-"), 4, "no training records"), (("--csv", "-", "--what", "windows"), 4, "--what"),
        (("--csv", "/dev/full", "--what", "verdicts"), 2, "No space"), (("--csv", "no/such", "--what", "verdicts"), 1, "No such file"),
    ):  # fmt: skip
        refused = toolkit("metrics", "export", run.path, *options)
        assert (refused.code, refused.err.count("\n")) == (code, 1) and said in refused.err, refused
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    refused = toolkit("metrics", "export", run.path, "--tensorboard", "tb")
    assert (refused.code, refused.err.count("\n")) == (2, 1) and "toolkit[tensorboard]" in refused.err


def test_tensorboard_reads_each_scalar_once_after_two_exports(toolkit):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = toolkit.submit(toolkit.job("true"), "--wait")
    record_steps(run.attempt(0), 3)
    with ValidationLog(run.metrics / "validation.jsonl") as log:
        log.write(ValidationRecord(3, 8, {"top-1": 0.5}, False, "2026-11-24T00:00:00.000+00:00", 0))
    folder = toolkit.folder / "tb"
    for _ in range(2):
        toolkit.ok("metrics", "export", run.path, "--tensorboard", folder)
    events = EventAccumulator(str(folder / run.job_name / run.run_id)).Reload()
    assert set(events.Tags()["scalars"]) == {
        "train/loss", "train/lr", "train/grad_norm", "train/tokens_per_s", "train/seconds", "train/mfu", "validation/top-1",
    }  # fmt: skip
    assert [(one.step, one.value) for one in events.Scalars("train/loss")] == [(1, 2.5), (2, 2.5), (3, 2.5)]
    (validation,) = events.Scalars("validation/top-1")
    assert (validation.step, validation.wall_time) == (
        3,
        datetime.fromisoformat("2026-11-24T00:00:00+00:00").timestamp(),
    )
