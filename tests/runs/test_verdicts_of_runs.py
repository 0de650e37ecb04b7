"""What commands show of the faults of a running run, besides what its supervisor wrote."""

from __future__ import annotations

import json

import pytest
from step_windows import window

from toolkit.metrics.detectors import disk
from toolkit.metrics.samples import DiskSample
from toolkit.metrics.verdicts import VerdictKind
from toolkit.metrics.window_file import WindowFile
from toolkit.metrics.windows import NOT_MEASURED, STEP, WORK, WORK_CPU, Window, statistics_of
from toolkit.observe.readings import RunReadings
from toolkit.observe.view import view_of
from toolkit.observe.window_grid import WindowGrid
from toolkit.rundir.attempt_records import StartRecord
from toolkit.rundir.claims import claim_attempt
from toolkit.runs.follow.progress import progress_of
from toolkit.runs.follow.rendering import line_of
from toolkit.runs.status.state import run_status
from toolkit.runs.verdicts import raised_verdicts, unmeasured


def record(run_directory, *metrics: str, ranks: int = 2) -> None:
    attempt = claim_attempt(run_directory)
    StartRecord(0, "1", 1, ranks, "2026-11-24T00:00:00Z").write(attempt)
    values = {name: statistics_of([0.1]) for name in metrics}
    slots = [Window(rank, "n0", 10.0 * slot, 10, 1, 50, 50, values) for slot in range(3) for rank in range(ranks)]
    WindowFile(attempt.windows_file(0), "n0").append(slots)


def page(run_directory) -> list[str]:
    readings = RunReadings(run_directory, grid=WindowGrid())
    readings.update()
    return view_of(readings)["problems"]


def test_a_script_that_only_reports_its_steps_is_said_to_be_unmeasured_wherever_verdicts_are_shown(
    run_directory,
) -> None:
    record(run_directory, STEP, WORK_CPU)
    assert unmeasured(run_directory) == NOT_MEASURED and "record exposed_s" in NOT_MEASURED
    assert page(run_directory) == [NOT_MEASURED]


@pytest.mark.parametrize(("metrics", "ranks"), [((STEP, WORK, WORK_CPU), 2), ((STEP, WORK_CPU), 1)])
def test_measured_work_and_single_ranks_need_no_note(run_directory, metrics, ranks) -> None:
    record(run_directory, *metrics, ranks=ranks)
    assert unmeasured(run_directory) == "" and page(run_directory) == []


def test_the_command_never_says_that_there_is_no_verdict_on_unmeasured_work(toolkit, wait_until) -> None:
    run = toolkit.submit(toolkit.job("sleep 120"), "-n", "2")
    wait_until(lambda: run.attempt_numbers() and run.attempt(0).start_file.exists())
    assert toolkit.ok("verdict", "last").strip() == "no verdict"
    values = {STEP: 0.1, WORK_CPU: 0.1}
    steps = [window(rank, 0, host="n0", **values) for rank in (0, 1)]
    metrics = [{name: one.metrics[name] for name in values} for one in steps]
    WindowFile(run.attempt(0).windows_file(0), "n0").append(
        [Window(one.rank, "n0", 0.0, 10, 1, 50, 50, own) for one, own in zip(steps, metrics, strict=True)]
    )
    said, watched = toolkit.ok("verdict", "last").strip(), progress_of(run, run_status(run), None)
    toolkit.ok("cancel", "last")
    assert said == NOT_MEASURED and NOT_MEASURED in line_of(watched)
    assert json.loads(watched.as_json())["note"] == NOT_MEASURED


def test_a_full_run_directory_is_shown_although_nothing_could_be_written_there(run_directory, monkeypatch) -> None:
    record(run_directory, STEP, WORK)
    full = DiskSample(0.0, str(run_directory.path), 0, 64 << 20, full="no space left")
    monkeypatch.setattr(disk, "disk_sample", lambda folder: full)
    (verdict,) = raised_verdicts(run_directory)
    assert (verdict.kind, verdict.cause, verdict.severity.value) == (VerdictKind.DISK, "full", "critical")
    readings = RunReadings(run_directory)
    readings.update()
    assert [one.kind for one in readings.raised] == [VerdictKind.DISK]
    run_directory.attempt(0).exit_file.write_text("{}")
    assert raised_verdicts(run_directory) == [], "the disk may have other contents since the run has ended"


def test_a_quota_is_noticed_by_a_trial(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(disk, "why_unwritable", lambda folder: "Disk quota exceeded")
    assert (
        disk.disk_sample(tmp_path).full == "" and disk.disk_sample(tmp_path, writes=True).full == "Disk quota exceeded"
    )
