"""`toolkit watch`: how far runs are, how rarely Slurm is asked, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from queued_runs import claim, submitted

from toolkit.metrics.training import TrainRecord
from toolkit.rundir.claims import claim_attempt
from toolkit.rundir.files import write_json
from toolkit.rundir.states import RunState
from toolkit.runs.follow import watch as module
from toolkit.runs.follow.progress import Progress, progress_of
from toolkit.runs.follow.rendering import line_of, screen_of, sparkline
from toolkit.runs.status.state import run_status
from toolkit.slurm.job_facts import JobFacts
from toolkit.units import round_duration


def train(run, *, steps, attempt=0, seconds=2.0):
    """Records up to now of a run of 1000 steps, one each `seconds`."""
    now = datetime.now(UTC)
    with (run.metrics / "train.jsonl").open("a") as stream:
        for step in range(1, steps + 1):
            moment = (now - timedelta(seconds=seconds * (steps - step))).isoformat()
            loss = 5.0 - step / 100
            record = TrainRecord(step, 1000, loss, loss.hex(), 0.1, 1.0, step, step, seconds, 800.0, moment, attempt, 4)
            stream.write(record.to_line() + "\n")


@pytest.fixture
def running(toolkit):
    """A run that Slurm would call running, 100 steps into 1000 at a step each 2 s: 30 min are left."""
    run = submitted(toolkit, "7", "work")
    claim(run)
    attempt = claim_attempt(run)
    write_json(attempt.start_file, {"start": 0, "job_id": "7", "nodes": 1, "ranks": 4, "time": "2026-11-22T12:00:00Z"})
    write_json(attempt.heartbeat, {"step": 100, "time": "t"})
    train(run, steps=100)
    return run


@pytest.mark.parametrize(("minutes", "said"), [(42, "12 min before the walltime"), (20, "10 min after the walltime")])
def test_the_end_beside_the_walltime(toolkit, running, minutes, said) -> None:
    status = run_status(running, {"7": JobFacts("7", "RUNNING", source="squeue")})
    end_time = (datetime.now() + timedelta(minutes=minutes)).isoformat(timespec="seconds")
    found = progress_of(running, status, JobFacts("7", "RUNNING", end_time=end_time))
    assert abs(found.steps_per_s - 0.5) < 0.01 and abs(found.ends_in_s - 1800) < 30
    (running.checkpoints / "step-00000090").mkdir()
    line = line_of(progress_of(running, status, JobFacts("7", "RUNNING", end_time=end_time)))
    assert line == (
        "work running: step 100/1000 (10 %), 0.5 steps/s, 800 tokens/s, ends in 30 min, "
        f"{said}, loss 4, saved step 90"
    )  # fmt: skip
    assert "walltime" not in line_of(progress_of(running, status, JobFacts("7", "RUNNING", end_time="N/A")))


def test_a_new_attempt_has_no_pace_yet_and_its_ranks_are_counted(running) -> None:
    status = run_status(running, {"7": JobFacts("7", "RUNNING", source="squeue")})
    attempt = claim_attempt(running)
    write_json(attempt.rank_file(0), {"rank": 0, "host": "n1", "pid": 1})
    found = progress_of(running, status, None)
    assert (found.attempt, found.steps_per_s, found.ends_in_s, found.ranks_started) == (1, None, None, 1)
    assert "attempt 1" in line_of(found) and "1 of 4 ranks started" in line_of(found)
    attempt.error_file(0).write_text("{}")
    assert "1 rank of 4 failed" in line_of(progress_of(running, status, None))


def test_slurm_is_asked_once_in_10_s_for_all_runs(toolkit, squeue, dev_cluster_conf, monkeypatch, running) -> None:
    waiting = submitted(toolkit, "8", "queued")
    calls = squeue(("7", "RUNNING", "None"), ("8", "PENDING", "Priority"))
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now.s))
    watch = module.Watch([running, waiting])
    for _ in range(41):
        first, second = watch.look()
        assert not watch.are_over([first, second])
        now.s += 1.0
    assert (first.status.state, second.status.state) == (RunState.RUNNING, RunState.PENDING)
    assert line_of(second) == "queued pending: Slurm: PENDING (Priority)"
    assert len([call for call in calls() if "squeue" in call]) == 5
    # A job that Slurm was not asked for yet waits for the next question, too.
    write_json(waiting.submitted(1), {"job_id": "9", "start": 1, "time": "2026-11-22T12:00:00Z"})
    watch.look()
    assert len(calls()) == 5


def test_the_step_comes_from_the_files_at_each_look(toolkit, squeue, dev_cluster_conf, running) -> None:
    squeue(("7", "RUNNING", "None"))
    watch = module.Watch([], all_of=[toolkit.runs])
    (first,) = watch.look()
    (attempt,) = [running.attempt(number) for number in running.attempt_numbers()]
    write_json(attempt.heartbeat, {"step": 150, "time": "t"})
    (second,) = watch.look()  # Slurm is not asked again for 10 s
    assert (first.step, second.step, second.status.step) == (100, 150, 150)


def test_ascii_alone_draws_a_bar_too(running) -> None:
    from rich.console import Console

    status = run_status(running, {"7": JobFacts("7", "RUNNING", source="squeue")})
    console = Console(width=70)
    one = replace(progress_of(running, status, None), last_line="long " * 40)
    for found in ([one], [one, one]):
        with console.capture() as said:
            console.print(screen_of(found, unicode=False))
        assert said.get().isascii()
        assert "[###..........................." in said.get() or len(found) > 1


def test_a_run_without_steps_shows_its_last_line_and_gives_its_exit_code(toolkit) -> None:
    run = toolkit.submit(toolkit.job("echo first; echo the last; exit 7", more="[restart]\ncrashes = 0\n"))
    said = toolkit("watch", run.run_id)
    assert (said.code, said.out.splitlines()[-1]) == (7, "work failed: last line: the last")
    assert "exit code 7" in said.err
    lines = [json.loads(line) for line in toolkit("watch", run.run_id, "--json").out.splitlines()]
    assert [(line["state"], line["last_line"], line["loss"]) for line in lines] == [("failed", "the last", None)]


def test_all_that_live_are_watched_until_none_does(toolkit) -> None:
    assert "no run is active" in toolkit("watch").err
    runs = [toolkit.submit(toolkit.job("sleep 1", name=name)) for name in ("one", "two")]
    said = toolkit("watch")
    assert said.code == 0
    ends = {line.partition(":")[0] for line in said.out.splitlines() if " completed: " in line}
    assert ends == {f"{run.run_id} {run.job_name} completed" for run in runs}


def test_a_damaged_run_is_told_alone_and_hides_no_other(toolkit) -> None:
    run, other = (toolkit.submit(toolkit.job("sleep 2", name=name)) for name in ("one", "two"))
    watch = module.Watch([], all_of=[toolkit.runs])
    assert {one.status.job_name for one in watch.look()} == {"one", "two"}
    record = run.record.read_text()
    run.record.write_text("{")
    states = {one.status.job_name: one.status.state.value for one in watch.look()}
    assert states["one"] == "unknown" and states["two"] != "unknown"
    said = toolkit("watch", run.run_id)
    assert (said.code, "record.json" in said.err) == (2, True)
    assert "one" not in {one.status.job_name for one in module.Watch([], all_of=[toolkit.runs]).look()}
    run.record.write_text(record)
    for name in (run.run_id, other.run_id):
        assert toolkit("wait", name).code == 0


def test_ctrl_c_leaves_the_run_alone(toolkit, terminal) -> None:
    gate = toolkit.folder / "gate"
    run = toolkit.submit(toolkit.job(f"until test -e {gate}; do sleep 0.1; done"))
    program = str(Path(sys.executable).with_name("toolkit"))
    screen = terminal([program, "watch", run.run_id], cwd=toolkit.folder, env={**os.environ, "TERM": "xterm"})
    screen.until("running")
    screen.interrupt()
    assert screen.wait() == 130
    assert f"the run continues; `toolkit watch {run.run_id}`" in screen.screen.replace("\r\n", "")
    assert run_status(run).state is RunState.RUNNING
    gate.touch()
    assert toolkit("wait", run.run_id).code == 0


@pytest.mark.parametrize("command", ["watch", "wait"])
def test_a_command_that_is_ended_gives_the_cursor_back(toolkit, terminal, wait_until, command) -> None:
    gate = toolkit.folder / "gate"
    run = toolkit.submit(toolkit.job(f"until test -e {gate}; do sleep 0.1; done"))
    program = str(Path(sys.executable).with_name("toolkit"))
    screen = terminal(
        ["sh", "-c", f'{program} {command} {run.run_id} & echo $! > pid; wait $!; echo "code $?"'],
        cwd=toolkit.folder, env={**os.environ, "TERM": "xterm"},
    )  # fmt: skip
    screen.until("running")
    os.kill(int((toolkit.folder / "pid").read_text()), signal.SIGTERM)
    screen.until("code 143")
    assert screen.screen.rfind("\x1b[?25h") > screen.screen.rfind("\x1b[?25l") >= 0
    gate.touch()
    assert toolkit("wait", run.run_id).code == 0


def test_several_runs_stand_in_a_table(running) -> None:
    from rich.console import Console

    status = run_status(running, {"7": JobFacts("7", "RUNNING", source="squeue")})
    one = progress_of(running, status, None)
    console = Console(width=140, file=None, record=True, quiet=False)
    with console.capture() as said:
        console.print(
            screen_of([one, Progress(replace(status, state=RunState.PENDING, reason="[bold]waits"))], unicode=True)
        )
    rows = said.get().splitlines()
    assert rows[0].split() == ["RUN", "JOB", "STATE", "STEP", "STEPS/S", "LOSS", "SAVED", "ENDS"]
    assert "100/1000 (10 %)" in rows[1] and "in 30 min" in rows[1]
    assert rows[2].rstrip().endswith("[bold]waits")  # a reason is no markup


def test_sparklines_and_spans() -> None:
    assert sparkline([1, 2, float("nan"), 8]) == "▁▂ █"
    assert sparkline([3.0, 3.0]) == "▁▁" and sparkline([]) == ""
    assert [round_duration(seconds) for seconds in (12, 720, 12_000, 7200, 200_000)] == [
        "12 s",
        "12 min",
        "3 h 20 min",
        "2 h",
        "2 d 7 h",
    ]
