"""`toolkit timeline`: what a run did with its time, read from its files and drawn."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from queued_runs import SAMPLES

from toolkit.metrics.checkpoints import SaveRecord
from toolkit.metrics.training import TrainRecord
from toolkit.rundir.claims import claim_attempt, claim_start
from toolkit.rundir.files import append_line, write_json
from toolkit.rundir.layout import RunDirectory

BEGUN, ENDED = (json.loads((SAMPLES / f"attempt_{name}.json").read_text()) for name in ("start", "exit"))
NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)


def at(second: float) -> str:
    return (NOON + timedelta(seconds=second)).isoformat().replace("+00:00", "Z")


def amend(path: Path, **changed) -> None:
    write_json(path, {**json.loads(path.read_text()), **changed})


def start(run, number, *, claimed, ended=None, state="requeue", submitted=None):
    claim_start(run, first=0, job_id="7", host="n1", pid=1, process_started=1)
    amend(run.start(number) / "claim.json", claimed=at(claimed))
    if submitted is not None:
        write_json(run.submitted(number), {"job_id": "7", "start": number, "time": at(submitted)})
    if ended is not None:
        write_json(run.start(number) / "end.json", {"state": state, "exit_code": 0, "time": at(ended)})


def attempt(run, number, *, began, ended, steps, saves=(), **end):
    """An attempt of `start` that makes a step a second from second `steps[0]` on."""
    one = claim_attempt(run)
    write_json(one.start_file, {**BEGUN, "start": number, "time": at(began)})
    first_second, first_step, last_step = steps
    lines = [
        TrainRecord(step, 60, 1.0, (1.0).hex(), 0.1, 1.0, 1, 1, 1.0, 1.0, at(first_second + 1 + step - first_step), one.number, 1)
        for step in range(first_step, last_step + 1)
    ]  # fmt: skip
    with (run.metrics / "train.jsonl").open("a") as stream:
        stream.writelines(line.to_line() + "\n" for line in lines)
    for step, second, waited in saves:
        save = SaveRecord(step, "every_steps", waited, waited, 1, None, None, at(second), one.number)
        append_line(run.metrics / "checkpoints.jsonl", asdict(save))
    for event in end.pop("events", ()):
        append_line(one.events, event)
    write_json(one.exit_file, {**ENDED, "time": at(ended), "step": last_step, "rank": None, "host": None, **end})
    return one


@pytest.fixture
def run(toolkit) -> RunDirectory:
    toolkit.ok("render", toolkit.job("true"))
    (path,) = toolkit.runs.glob("*/*")
    return RunDirectory(path)


@pytest.fixture
def requeued(run) -> RunDirectory:
    """10 s in the queue; a crash at step 20, of which 15 are kept; a walltime; 30 s in the queue; and to the end."""
    start(run, 0, submitted=0, claimed=10, ended=80)
    attempt(run, 0, began=11, ended=40, steps=(20, 1, 20), saves=[(15, 36, 1.0)], cause="crashed", next="restart")
    stop = {"time": at(76), "event": "stop_requested", "cause": "walltime"}
    attempt(
        run,
        0,
        began=40,
        ended=80,
        steps=(50, 16, 41),
        saves=[(41, 79, 3.0)],
        cause="walltime",
        next="requeue",
        events=[stop],
    )
    start(run, 1, claimed=110, ended=130, state="completed")
    attempt(
        run,
        1,
        began=111,
        ended=130,
        steps=(115, 42, 56),
        cause="completed",
        next="end",
        final=True,
        state="completed",
        exit_code=0,
    )
    return run


def spans(row):
    began = {one["what"]: one["began"] for one in reversed(row["spans"])}
    return {what: (datetime.fromisoformat(time) - NOON).total_seconds() for what, time in began.items()}


def test_what_a_run_did_with_its_time(toolkit, requeued) -> None:
    told = json.loads(toolkit.ok("timeline", requeued.run_id, "--json"))
    assert [(row["name"], row["end"]) for row in told["rows"]] == [
        ("attempt 0", "crashed"), ("attempt 1", "walltime"), ("attempt 2", "completed"),
    ]  # fmt: skip
    crashed, walltime, completed = map(spans, told["rows"])
    # Step 16 was made again: what came after 15 was in vain, and the second of the save is none of it.
    assert crashed == {"waiting": 0, "starting": 11, "steps": 20, "saving": 35, "lost": 36}
    assert walltime == {"starting": 40, "steps": 50, "saving": 76}
    assert completed == {"waiting": 80, "starting": 111, "steps": 115}
    assert told["seconds"] == {"waiting": 40, "starting": 23, "steps": 57, "saving": 4, "lost": 4}
    words = [event["words"] for row in told["rows"] for event in row["events"]]
    assert words[0] == "crashed at step 20: killed by SIGKILL (out of memory?); restarted"
    assert words[1:] == ["asked to save and exit: walltime", "walltime at step 41; requeued", "completed at step 56"]


def test_steps_are_lost_though_the_log_tells_every_tenth(toolkit, run) -> None:
    start(run, 0, submitted=0, claimed=10, ended=120)
    attempt(run, 0, began=11, ended=50, steps=(20, 1, 28), saves=[(20, 41, 1.0)], cause="crashed", next="restart")
    attempt(
        run, 0, began=50, ended=120, steps=(55, 21, 60), cause="completed", next="end", final=True, state="completed"
    )
    log = run.metrics / "train.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(line for line in lines if json.loads(line)["step"] % 10 == 0))
    first, _ = json.loads(toolkit.ok("timeline", run.run_id, "--json"))["rows"]
    assert spans(first)["lost"] == 41


@pytest.mark.parametrize(("columns", "width"), [(20, 60), (60, 60), (117, 117), (400, 200)])
def test_the_picture_fits_and_has_the_proportions(toolkit, monkeypatch, requeued, columns, width) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    lines = toolkit.ok("timeline", requeued.run_id).splitlines()
    picture = lines[: lines.index("")]
    assert lines[0].endswith(": completed, 2 min 10 s") and all(line.isascii() for line in lines)
    assert width - 2 <= max(map(len, picture)) <= width
    first, second, third = (line.split(" ", 2)[2] for line in picture if line.startswith("attempt"))
    assert [first.index(letter) < first.rindex("x") for letter in ".-="] == [True] * 3
    assert abs(first.count("=") / len(third) - 15 / 130) < 0.06
    assert second.lstrip().startswith("-") and third.lstrip().startswith(".")
    marks = [line.split() for line in picture if line.startswith(" ")][1:]
    assert marks == [["C"], ["We"], ["E"]] or marks == [["C"], ["W", "e"], ["E"]]


def test_letters_of_a_terminal_that_knows_more(toolkit, requeued) -> None:
    assert "█" in toolkit.ok("timeline", requeued.run_id) and "x lost" not in toolkit.ok("timeline", requeued.run_id)


def test_a_lost_supervisor_ended_when_it_was_last_heard_of(toolkit, run) -> None:
    """The next start writes down the end, here an hour later; until then nobody lived the run."""
    start(run, 0, submitted=0, claimed=1)
    one = attempt(
        run,
        0,
        began=1,
        ended=3600,
        steps=(5, 1, 9),
        cause="supervisor_lost",
        next="await_slurm",
        decision="another start began",
    )
    write_json(one.heartbeat, {"step": 9, "time": at(14)})
    start(run, 1, claimed=3600, ended=3700, state="stopped")
    attempt(
        run, 1, began=3601, ended=3700, steps=(3610, 1, 80), cause="stopped", next="end", final=True, state="stopped"
    )
    first, second = json.loads(toolkit.ok("timeline", run.run_id, "--json"))["rows"]
    assert first["spans"][-1]["ended"].startswith("2026-11-22T12:00:14")
    assert spans(second)["waiting"] == 14


def test_a_run_that_never_began(toolkit, run) -> None:
    said = toolkit.ok("timeline", run.run_id)
    assert said.splitlines() == [f"work {run.run_id}: created", "rendered, not submitted"]


@pytest.mark.parametrize(
    ("file", "text"),
    [("starts/000/end.json", "[]"), ("starts/000/end.json", '{"state": "completed", "exit_code": 0}'),
     ("starts/000/job.json", "{}"), ("attempts/000/events.jsonl", None)],
)  # fmt: skip
def test_a_damaged_file_is_named_by_whatever_reads_it(toolkit, file, text) -> None:
    run = toolkit.submit(toolkit.job("true"))
    toolkit("wait", run.run_id)
    path = run.path / file
    path.unlink()
    path.mkdir() if text is None else path.write_text(text)
    told = [toolkit(command, run.run_id) for command in ("timeline", "efficiency")]
    refused = [said.err for said in told if said.code]
    assert refused and all(str(path) in said and "Fix: restore the file or start a new run" in said for said in refused)
    assert all(said.code in (0, 2) for said in told)
