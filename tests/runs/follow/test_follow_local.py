"""Status, history, logs, wait and cancel of runs on this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from toolkit.rundir.claims import read_claim
from toolkit.rundir.files import write_json

SCHEMA = json.loads((Path(__file__).parents[3] / "docs" / "schemas" / "run-directory.schema.json").read_text())


def state(toolkit, run) -> str:
    status = json.loads(toolkit.ok("status", run.run_id, "--json"))
    jsonschema.validate(status, {**SCHEMA, "$ref": "#/$defs/status"})
    return str(status["state"])


def started(run) -> bool:
    return bool(run.attempt_numbers()) and run.attempt(0).rank_file(0).exists()


def test_every_state_of_a_local_run(toolkit, wait_until) -> None:
    toolkit.ok("render", toolkit.job("true", name="rendered"))
    good = toolkit.submit(toolkit.job("true", name="good"))
    bad = toolkit.submit(toolkit.job("exit 4", name="bad", more="[restart]\ncrashes = 0\n"))
    lives = toolkit.submit(toolkit.job("sleep 60", name="lives"))
    wait_until(lambda: started(lives))
    assert state(toolkit, lives) == "running"
    refused = toolkit("resume", lives.run_id)
    assert (refused.code, "is running" in refused.err) == (1, True)

    began = time.monotonic()
    toolkit.ok("cancel", lives.run_id)
    assert state(toolkit, lives) in ("cancelling", "cancelled")
    assert time.monotonic() - began < 30
    assert toolkit("wait", lives.run_id).code == 143
    assert toolkit("wait", good.run_id).code == 0
    assert toolkit("wait", bad.run_id).code == 4
    again = toolkit("cancel", lives.run_id)
    assert (again.code, "was cancelled; there is nothing to cancel" in again.err) == (1, True)

    listed = json.loads(toolkit.ok("history", "--json"))
    for one in listed:
        jsonschema.validate(one, {**SCHEMA, "$ref": "#/$defs/status"})
    assert [(one["job_name"], one["state"]) for one in listed] == [
        ("lives", "cancelled"), ("bad", "failed"), ("good", "completed"), ("rendered", "created"),
    ]  # fmt: skip
    assert [one["job_name"] for one in json.loads(toolkit.ok("history", "--json", "-n", 1))] == ["lives"]
    assert [one["job_name"] for one in json.loads(toolkit.ok("history", "--json", "-J", "bad"))] == ["bad"]


def test_a_killed_supervisor_is_lost_and_never_completed(toolkit, wait_until) -> None:
    run = toolkit.submit(toolkit.job("sleep 60"))
    wait_until(lambda: started(run))
    claim = read_claim(run, 0)
    os.kill(claim.pid, signal.SIGKILL)
    wait_until(lambda: state(toolkit, run) == "lost")
    assert toolkit("wait", run.run_id).code == 125
    # Its ranks do not outlive it.
    rank = json.loads(run.attempt(0).rank_file(0).read_text())["pid"]
    wait_until(lambda: not Path(f"/proc/{rank}").exists() or "Z" in Path(f"/proc/{rank}/stat").read_text())
    # The lost start is closed, and the run can go on.
    (toolkit.folder / "work.toml").unlink()
    assert toolkit("resume", run.run_id, "--set", 'job.entry=["true"]', "--wait").code == 0
    assert (run.start(0) / "lost.json").exists()


def test_another_process_of_the_same_number_does_not_keep_a_run_alive(toolkit, wait_until) -> None:
    run = toolkit.submit(toolkit.job("sleep 60"))
    wait_until(lambda: started(run))
    claim = read_claim(run, 0)
    os.kill(claim.pid, signal.SIGKILL)
    path = run.start(0) / "claim.json"
    record = json.loads(path.read_text())
    write_json(path, {**record, "pid": os.getpid()})  # the number lives, its start time is another
    assert state(toolkit, run) == "lost"


def test_a_run_of_another_host_is_neither_judged_nor_signalled_from_here(toolkit) -> None:
    toolkit.ok("wait", toolkit.submit(toolkit.job("true")).run_id)
    (run,) = toolkit.runs.glob("*/*")
    claim = json.loads((run / "starts/000/claim.json").read_text())
    write_json(run / "starts/000/claim.json", {**claim, "host": "elsewhere"})
    (run / "attempts/000/exit.json").unlink()
    status = json.loads(toolkit.ok("status", "--json"))
    assert (status["state"], "elsewhere" in status["reason"]) == ("unknown", True)
    assert toolkit("resume", "last").code == 1  # it may live there


def test_a_damaged_record_hides_no_other_run(toolkit) -> None:
    toolkit.ok("render", toolkit.job("true", name="good"))
    toolkit.ok("render", toolkit.job("true", name="old"))
    (run,) = toolkit.runs.glob("old/*")
    record = json.loads((run / "record.json").read_text())
    del record["job"]["train"]
    write_json(run / "record.json", record)
    said = toolkit("status", run.name)
    assert (said.code, said.err.count("\n"), "record.json" in said.err) == (2, 1, True)
    listed = json.loads(toolkit.ok("history", "--json"))
    assert {one["job_name"]: one["state"] for one in listed} == {"good": "created", "old": "unknown"}


def test_an_end_between_two_looks_is_not_a_loss(toolkit, monkeypatch) -> None:
    """The run writes its result after its files were read and before the process table is."""
    from toolkit.runs.status import state as module

    run = toolkit.submit(toolkit.job("true"))
    toolkit.ok("wait", run.run_id)
    real = module.read_run
    unfinished = real(run)
    unfinished = replace(unfinished, folder=replace(unfinished.folder, attempt=None))
    for _ in range(50):
        looks = iter([unfinished])
        monkeypatch.setattr(module, "read_run", lambda one, looks=looks: next(looks, None) or real(one))
        state = module.run_status(run).state.value
        if state != "running":  # the supervisor lives for a moment after its last word
            break
        time.sleep(0.1)
    assert state == "completed"


def test_a_job_that_begins_after_its_cancel_starts_no_rank(toolkit) -> None:
    """As one whose sbatch had not answered when it was cancelled."""
    toolkit.ok("render", toolkit.job("true"))
    (path,) = toolkit.runs.glob("*/*")
    (path / "control" / "cancel").touch()
    done = subprocess.run(["bash", path / "job.sbatch"], env={**os.environ, "TOOLKIT_LOCAL": "1"}, check=False)
    status = json.loads(toolkit.ok("status", path.name, "--json"))
    assert (done.returncode, status["state"], status["exit_code"]) == (143, "cancelled", 143)
    assert not list(path.glob("attempts/*/ranks/*"))


def test_names_of_runs(toolkit) -> None:
    toolkit.ok("render", toolkit.job("true"))
    (path,) = toolkit.runs.glob("*/*")
    near = path.name[:-1] + ("0" if path.name[-1] != "0" else "1")
    said = toolkit("status", near)
    assert (said.code, path.name in said.err) == (4, True)
    for command in ("status", "logs", "wait", "cancel", "resume"):
        said = toolkit(command, "nothing-like-it")
        assert (said.code, said.err.count("\n"), "toolkit history" in said.err) == (4, 1, True)
    assert toolkit("status", "--runs", toolkit.folder / "empty").code == 4


def test_logs(toolkit) -> None:
    lines = toolkit.job("for i in 1 2 3; do echo line $i; done; printf end", more="")
    run = toolkit.submit(lines, "-n", 2)
    toolkit.ok("wait", run.run_id)
    assert toolkit.ok("logs", "--rank", 1) == "line 1\nline 2\nline 3\nend\n"
    assert toolkit.ok("logs", "--rank", 1, "-n", 2) == "line 3\nend\n"
    assert toolkit.ok("logs", "--rank", "all", "-n", 1) == "[0] end\n[1] end\n"
    assert toolkit.ok("logs", "--attempt", 0, "-n", 1) == "[0] end\n[1] end\n"
    assert re.search(r"attempt 0 ended: completed", toolkit.ok("logs"))
    for words, fix in (
        (["--rank", 2], "--rank 0 to 1"),
        (["--rank", "x"], "--rank 0 to 1"),
        (["--attempt", 4], "--attempt 0 to 0"),
    ):
        said = toolkit("logs", *words)
        assert (said.code, fix in said.err) == (4, True), said


def test_many_last_lines(toolkit) -> None:
    toolkit.ok("wait", toolkit.submit(toolkit.job("seq -f %0200g 1 1000")).run_id)
    assert [int(line) for line in toolkit.ok("logs", "--rank", 0, "-n", 900).split()] == list(range(101, 1001))


def test_follow_begins_before_the_log_and_ends_with_the_run(toolkit, wait_until) -> None:
    """`logs -f` right after submit: there is no rank log yet; it gets every line once, whenever it was written."""
    gate = toolkit.folder / "gate"
    run = toolkit.submit(
        toolkit.job(f"echo one; printf half; until test -e {gate}; do sleep 0.1; done; echo ' done'; printf two")
    )
    threading.Timer(1.0, gate.touch).start()
    assert toolkit.ok("logs", run.run_id, "--rank", 0, "-f").splitlines() == ["one", "half done", "two"]
    assert state(toolkit, run) == "completed"


def test_waiting_reads_only_the_end_of_the_metrics(toolkit) -> None:
    from toolkit.metrics.training import TrainRecord, last_record

    toolkit.ok("render", toolkit.job("true"))
    (path,) = toolkit.runs.glob("*/*")
    run = toolkit.run(path.name)
    record = TrainRecord(7, 9, 1.5, (1.5).hex(), 0.1, 1.0, 1, 1, 0.1, 1.0, "t", 0, 1)
    (run.metrics / "train.jsonl").write_text("damaged\n" + record.to_line() + "\n" + record.to_line()[:20])
    found = last_record(run.metrics / "train.jsonl")
    assert found is not None and found.step == 7


def test_a_wait_elsewhere_says_each_thing_once(toolkit, monkeypatch) -> None:
    """Not on a terminal: while nothing changes no line is repeated, however often it looks."""
    from toolkit.runs.follow import follow

    monkeypatch.setattr(follow, "LINE_PERIOD_S", 0.0)
    monkeypatch.setattr(follow, "MARKER_PERIOD_S", 0.05)
    run = toolkit.submit(toolkit.job("sleep 1"))
    said = toolkit("wait", run.run_id)
    lines = said.err.splitlines()
    assert lines and len(lines) == len(set(lines)), lines


@pytest.mark.parametrize("command", [["submit", "--wait"], ["run"]])
def test_a_restart_is_told_and_a_failure_told_once(toolkit, command: list[str]) -> None:
    job = toolkit.job("echo try $TOOLKIT_ATTEMPT; exit $((3 + TOOLKIT_ATTEMPT))", more="[restart]\ncrashes = 1\n")
    said = toolkit(*command, job)
    lines = said.err.splitlines()
    assert said.code == 4
    (restart,) = [line for line in lines if line.startswith("attempt 0 crashed (rank 0 on ")]
    assert "exit code 3" in restart and restart.endswith("; restarting")
    assert [line for line in lines if "attempt 1 crashed" in line] == []
    assert len([line for line in lines if "exit code 4" in line]) == 1, lines
    again = toolkit("wait", "last")  # who comes later hears the result alone
    assert (again.code, "attempt 0" in again.err) == (4, False)


def test_ctrl_c_ends_the_wait_and_not_the_run(toolkit, wait_until) -> None:
    gate = toolkit.folder / "gate"
    run = toolkit.submit(toolkit.job(f"until test -e {gate}; do sleep 0.1; done"))
    wait_until(lambda: started(run))
    program = Path(sys.executable).with_name("toolkit")
    for words, further in (("wait", "follows it again"), ("logs -f", "shows more")):
        argv = [program, *words.split(), run.run_id]
        waiting = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        first = waiting.stdout.readline()  # it follows now
        waiting.send_signal(signal.SIGINT)
        said = first + waiting.communicate(timeout=240)[0]
        assert (waiting.returncode, said.splitlines()[-1]) == (
            130,
            f"toolkit: the run continues; `toolkit {words} {run.run_id}` {further}, `toolkit cancel {run.run_id}` ends it",
        )
    gate.touch()
    assert toolkit("wait", run.run_id).code == 0


def test_status_tells_the_last_step_and_the_ranks_that_ran(toolkit) -> None:
    """The heartbeat is at most one a second; a range of nodes says nothing of what Slurm gave."""
    from toolkit.metrics.training import TrainRecord

    run = toolkit.submit(toolkit.job("true", name="ran"), "-N", "1-3", "--ntasks-per-node", 2)
    toolkit.ok("wait", run.run_id)

    def status() -> tuple[object, ...]:
        answer = json.loads(toolkit.ok("status", run.run_id, "--json"))
        return answer["step"], answer["nodes"], answer["ranks"]

    attempt = run.attempt(0)
    end = json.loads(attempt.exit_file.read_text())
    write_json(attempt.heartbeat, {"step": 7, "time": "t"})
    assert status() == (7, 1, 2)
    write_json(attempt.exit_file, {**end, "step": 9})
    assert status() == (9, 1, 2)
    record = TrainRecord(10, 12, 1.5, (1.5).hex(), 0.1, 1.0, 1, 1, 0.1, 1.0, "t", 0, 1)
    (run.metrics / "train.jsonl").write_text(record.to_line() + "\n")
    assert status() == (10, 1, 2)
    write_json(attempt.start_file, {**json.loads(attempt.start_file.read_text()), "nodes": 3, "ranks": 6})
    assert status() == (10, 3, 6)


def test_what_a_foreign_program_can_be_asked_for(toolkit, wait_until) -> None:
    run = toolkit.submit(toolkit.job("sleep 60"))
    wait_until(lambda: started(run))
    said = toolkit("save", run.run_id)
    assert (said.code, "cannot save on request" in said.err, "toolkit.should_save" in said.err) == (1, True, True), said
    assert not (run.control / "save").exists()
    write_json(run.attempt(0).heartbeat, {"step": 7, "time": "t"})  # as a script that calls world.should_stop
    toolkit.ok("save", run.run_id)
    assert "saves at its next step boundary and ends" in toolkit.ok("stop", run.run_id)
    toolkit("wait", run.run_id)
    assert state(toolkit, run) == "stopped"


SAVES_SLOWLY = """trap 'sleep 1.5; touch $1/saved; exit 0' TERM
touch $1/ready
while true; do sleep 0.1; done"""


DEAF = "trap '' TERM; touch {folder}/ready; while true; do sleep 0.1; done"


def test_a_stop_gives_time_to_save_and_a_second_one_kills(toolkit, wait_until) -> None:
    """The shell that the guard started exits at TERM; its program still saves, and the attempt waits for it."""
    script = toolkit.folder / "inner.sh"
    script.write_text(SAVES_SLOWLY)
    run = toolkit.submit(toolkit.job(f"bash {script} {toolkit.folder}; echo next"))
    wait_until(lambda: (toolkit.folder / "ready").exists())
    said = toolkit.ok("stop", run.run_id)
    assert "receives TERM now, and KILL after 120 s" in said
    assert toolkit("wait", run.run_id).code == 130
    assert (toolkit.folder / "saved").exists()
    explained = toolkit.ok("explain", run.run_id)
    assert re.search(r"it was asked to stop: its processes exited \d+ s after the request", explained), explained
    assert "asked to save" not in explained


def test_a_second_stop_kills_at_once(toolkit, wait_until) -> None:
    run = toolkit.submit(toolkit.job(DEAF.format(folder=toolkit.folder)))
    wait_until(lambda: (toolkit.folder / "ready").exists())
    assert "KILL after 3690 s" in toolkit.ok("stop", run.run_id, "--within", "1:01:30")
    refused = toolkit("stop", run.run_id, "--within", "2h")
    assert (refused.code, "--within cannot change its time now" in refused.err) == (1, True), refused
    assert "its ranks are killed" in toolkit.ok("stop", run.run_id)
    assert toolkit("wait", run.run_id).code == 130
    assert re.search(r"it was asked to stop: killed \d+ s after the request", toolkit.ok("explain", run.run_id))


def test_a_cancel_overrides_the_patience_of_a_stop(toolkit, wait_until) -> None:
    run = toolkit.submit(toolkit.job(DEAF.format(folder=toolkit.folder)))
    wait_until(lambda: (toolkit.folder / "ready").exists())
    toolkit.ok("stop", run.run_id, "--within", "1h")
    toolkit.ok("cancel", run.run_id)
    assert toolkit("wait", run.run_id).code == 143
    assert state(toolkit, run) == "cancelled"


EVALUATES = """
import time

def main(world, config):
    for step in range(3):
        time.sleep(0.2)
        world.should_stop(step)  # the heartbeat has the last one a second later, so mostly after the request
    world.run_dir.joinpath("evaluating").touch()
    time.sleep(600)
"""


def test_explain_names_the_longest_time_in_which_no_rank_asked(toolkit, wait_until) -> None:
    (toolkit.folder / "evals.py").write_text(EVALUATES)
    job = toolkit.folder / "evals.toml"
    job.write_text("[job]\nentry = 'evals.py:main'\n[restart]\nwarn_s = 30\n")
    run = toolkit.submit(job)
    wait_until(lambda: (run.path / "evaluating").exists())
    assert "its ranks are killed after 2 s" in toolkit.ok("stop", run.run_id, "--within", "2s")
    assert toolkit("wait", run.run_id).code == 130
    explained = toolkit.ok("explain", run.run_id)
    why = r"not every rank had saved: no rank asked within \d+ s whether to stop; the longest time in which no rank asked was \d+ s"
    assert re.search(why, explained), explained
    assert re.search(r"`toolkit stop \S+ --within \d+s`, or call world.should_stop more often", explained), explained


def test_a_folder_of_runs_that_is_named_must_be_there(toolkit, monkeypatch) -> None:
    said = toolkit("history", "--runs", toolkit.folder / "none")
    assert (said.code, "runs folder not found" in said.err) == (4, True), said
    assert toolkit("status", "--live", "--runs", toolkit.folder / "none").code == 4
    monkeypatch.setenv("TOOLKIT_RUNS", str(toolkit.folder / "later"))  # it comes with the first run
    assert json.loads(toolkit.ok("history", "--json")) == []


@pytest.mark.parametrize(("no_color", "bar"), [("1", "[....."), ("", "━")])
def test_the_bar_of_a_wait_is_plain_where_no_colours_are_wanted(toolkit, terminal, wait_until, no_color, bar) -> None:
    gate = toolkit.folder / "gate"
    run = toolkit.submit(toolkit.job(f"until test -e {gate}; do sleep 0.1; done"))
    wait_until(lambda: started(run))
    program = str(Path(sys.executable).with_name("toolkit"))
    environment = {**os.environ, "TERM": "xterm-256color", "NO_COLOR": no_color}
    waiting = terminal([program, "wait", run.run_id], cwd=toolkit.folder, env=environment)
    waiting.until(bar)
    gate.touch()
    assert waiting.wait() == 0
    coloured = [code for code in re.findall(r"\x1b\[([\d;]*)m", waiting.screen) if code not in ("", "0")]
    assert bool(coloured) != bool(no_color), waiting.screen
    assert waiting.screen.isascii() == bool(no_color)
