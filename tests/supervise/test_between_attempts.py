"""What a supervisor writes down between attempts: when it fails itself, when its files pause, and when Slurm is silent."""

import errno
import json
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from toolkit.errors import OWN_FAILURE
from toolkit.rundir.claims import claim_attempt, claim_start, read_claim
from toolkit.rundir.files import read_json, utc_now, write_json
from toolkit.rundir.run_files import read_folder
from toolkit.rundir.states import Cause, Next, RunState, decide
from toolkit.runs.status.restarts import RestartNews
from toolkit.runs.status.state_table import recorded_state
from toolkit.supervise.allocation import Allocation
from toolkit.supervise.continuation import close_unfinished
from toolkit.supervise.ending import record_end
from toolkit.supervise.failures import AttemptEnd
from toolkit.supervise.requests import StopRequest
from toolkit.supervise.retry import Retry
from toolkit.supervise.shape import Shape
from toolkit.supervise.supervisor import Supervisor

FULL = OSError(errno.ENOSPC, "No space left on device")
JOB = {
    "job": {"requeue": True, "entry": "a.py:main"}, "scheduler": {}, "launcher": {"kind": "local"},
    "restart": {"crashes": 1, "walltimes": -1, "preemptions": -1, "warn_s": 120},
}  # fmt: skip


@pytest.fixture
def supervisor(run_directory):
    """A supervisor that has claimed its start."""

    def make(start=0, *, in_slurm=False, nodes=1):
        job_id = "7" if in_slurm else "local-1"
        claim_start(run_directory, first=start, job_id=job_id, host="n1", pid=1, process_started=1)
        allocation = Allocation(job_id, nodes, in_slurm, in_slurm, time.time() + 3600, node_list="n[1-2]")
        return Supervisor(
            run_directory, JOB, start, allocation, Shape.of(nodes, 1), run_directory.script(0), StopRequest()
        )

    return make


def begun(run, *, start=0, end=""):
    """Another attempt of the run, ended by a crash, by a damaged file, or not yet."""
    attempt = claim_attempt(run)
    write_json(attempt.start_file, {"start": start, "job_id": "local-1", "nodes": 1, "ranks": 1, "time": utc_now()})
    if end == "crashed":
        decision = decide(Cause.CRASHED, budgets={"crashes": 1}, spent={}, again=None)
        record_end(attempt, AttemptEnd(Cause.CRASHED, "ValueError", 1, 0, "n1"), decision, 1.0, Retry(StopRequest(), 0))
    elif end == "damaged":
        attempt.exit_file.write_text("{")
    return attempt


def end_of_start(run, start=0):
    return read_json(run.start(start) / "end.json")


def test_a_restart_that_the_supervisor_cannot_begin_ends_the_run(supervisor, run_directory):
    """The next attempt could not be claimed: the crash before it is the last word now, and must be a final one."""
    one = supervisor()
    attempt = begun(run_directory, end="crashed")
    assert recorded_state(read_folder(run_directory)) is None
    one.fail(FULL)
    end = read_json(attempt.exit_file)
    assert (end["cause"], end["next"], end["final"], end["exit_code"]) == ("crashed", "end", True, OWN_FAILURE)
    assert "the supervisor could not continue: OSError: [Errno 28]" in end["decision"]
    assert recorded_state(read_folder(run_directory))[0] is RunState.FAILED
    assert (end_of_start(run_directory)["state"], run_directory.attempt_numbers()) == ("failed", [0])


def test_a_supervisor_that_fails_before_any_attempt_leaves_a_whole_one(supervisor, run_directory):
    supervisor().fail(FULL)
    attempt = run_directory.attempt(0)
    assert read_json(attempt.start_file)["start"] == 0
    assert read_json(attempt.exit_file)["cause"] == "supervisor_failed"
    assert recorded_state(read_folder(run_directory))[0] is RunState.FAILED


def test_an_attempt_that_was_claimed_and_not_begun_is_the_one_that_failed(supervisor, run_directory):
    one = supervisor()
    attempt = claim_attempt(run_directory)
    one.fail(FULL)
    assert run_directory.attempt_numbers() == [0]
    assert read_json(attempt.start_file)["launcher"] == "local"
    assert recorded_state(read_folder(run_directory))[0] is RunState.FAILED


def test_the_end_of_an_earlier_start_is_left_as_it_is(supervisor, run_directory):
    attempt = begun(run_directory, end="crashed")
    before = attempt.exit_file.read_text()
    supervisor(1).fail(FULL)
    assert attempt.exit_file.read_text() == before
    assert read_json(run_directory.attempt(1).start_file)["start"] == 1
    assert recorded_state(read_folder(run_directory))[0] is RunState.FAILED


def test_a_damaged_record_of_before_keeps_no_end_from_being_written(supervisor, run_directory):
    one = supervisor()
    begun(run_directory, end="damaged")
    attempt = begun(run_directory)
    one.fail(ValueError("a mistake of ours"))
    assert read_json(attempt.exit_file)["reason"] == "ValueError: a mistake of ours"
    assert end_of_start(run_directory)["exit_code"] == OWN_FAILURE


def test_a_damaged_last_record_is_said_and_the_start_ends(supervisor, run_directory, capsys):
    one = supervisor()
    begun(run_directory, end="damaged")
    one.fail(FULL)
    assert "cannot record that the supervisor failed: " in capsys.readouterr().out
    assert end_of_start(run_directory)["state"] == "failed"


def test_a_supervisor_that_fails_after_another_start_has_the_run_claims_nothing(supervisor, run_directory):
    """Its claim would rename the other one's unfinished saves."""
    one = supervisor()
    supervisor(0)  # the same job, requeued
    assert read_claim(run_directory, 1) is not None
    one.fail(FULL)
    assert run_directory.attempt_numbers() == []


def test_who_waits_hears_that_the_start_which_closes_a_lost_attempt_goes_on(run_directory):
    """It may be the user's own resume, of which Slurm knows nothing."""
    attempt = begun(run_directory)
    news = RestartNews(run_directory)
    close_unfinished(run_directory)
    (line,) = news.new()
    assert line.startswith(f"attempt {attempt.number} supervisor_lost (its supervisor was killed")
    assert line.endswith("); another start continues")


def test_a_pause_of_the_file_system_loses_no_end(run_directory, capsys):
    """The attempt's folder is away for a while, as on a file server that fails over."""
    attempt = begun(run_directory)
    away = attempt.path.with_name("away")
    attempt.path.rename(away)
    timer = threading.Timer(1.5, partial(away.rename, attempt.path))
    timer.start()
    decision = decide(Cause.COMPLETED, budgets={}, spent={}, again=None)
    record_end(attempt, AttemptEnd(Cause.COMPLETED, "every rank is done"), decision, 1.0, Retry(StopRequest(), 30))
    assert recorded_state(read_folder(run_directory))[0] is RunState.COMPLETED
    assert '"ended"' in attempt.events.read_text()
    assert "does not respond" in capsys.readouterr().out


def test_a_pause_of_the_file_system_fails_no_claim(supervise, local_job, run_directory):
    away = run_directory.path / "away"
    run_directory.attempts.rename(away)
    job = supervise(local_job(["true"], ranks=1))
    time.sleep(2)
    away.rename(run_directory.attempts)
    assert job.wait() == 0
    assert "the run directory does not respond" in job.log
    assert job.end()["cause"] == "completed"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_what_no_waiting_mends_is_raised_at_once(number):
    calls = []

    def act():
        calls.append(1)
        raise OSError(number, "no room")

    with pytest.raises(OSError, match="no room"):
        Retry(StopRequest(), 60).wait_for(act)
    assert calls == [1]


def test_room_is_waited_for_where_an_end_would_be_lost(capsys):
    calls = []

    def act():
        calls.append(1)
        if len(calls) == 1:
            raise FULL

    Retry(StopRequest(), 60, room_seconds=30).wait_for(act)
    assert len(calls) == 2
    assert "the run directory cannot be written ([Errno 28]" in capsys.readouterr().out


def test_a_full_disk_under_the_jobs_log_ends_nothing():
    program = "import os; from toolkit.supervise.log import say; say('lost'); say('too'); os._exit(7)"
    with Path("/dev/full").open("w") as full:
        assert subprocess.run([sys.executable, "-c", program], stdout=full, check=False).returncode == 7


def test_a_file_system_that_stays_away_is_given_up(tmp_path):
    with pytest.raises(FileNotFoundError):
        Retry(StopRequest(), 0.5).wait_for((tmp_path / "gone").stat)
    with pytest.raises(FileNotFoundError):
        Retry(StopRequest(kill=True), 60).wait_for((tmp_path / "gone").stat)


def test_patience_leaves_time_for_the_requeue(supervisor):
    one = supervisor()
    for left_s, patience_s in ((3600, 600), (100, 70), (10, 5)):
        one.allocation.ends_at = time.time() + left_s
        assert one.retry.seconds == pytest.approx(patience_s, abs=1)


@pytest.fixture
def sinfo(fake_slurm, monkeypatch):
    """Set what sinfo prints; squeue and scontrol fail."""
    monkeypatch.setenv("PATH", f"{fake_slurm.folder}:/bin")
    for command in ("squeue", "scontrol"):
        fake_slurm.respond(command, code=1)
    return lambda text: fake_slurm.respond("sinfo", f"{text}\n")


@pytest.mark.parametrize("cause", [Cause.LAUNCH_FAILED, Cause.CRASHED])
@pytest.mark.parametrize(
    ("nodes", "symptom", "next_one"),
    [("n1 allocated\nn2 down*", "", Next.AWAIT), ("n1 allocated\nn2 allocated", "node_lost", Next.AWAIT),
     ("n1 allocated\nn2 allocated", "", None)],
)  # fmt: skip
def test_ranks_that_a_node_took_along_before_they_began_are_no_failed_launch(
    supervisor, sinfo, cause, nodes, symptom, next_one
):
    """srun says "Node failure on n2" before Slurm calls it down; either word is enough."""
    sinfo(nodes)
    decision = supervisor(in_slurm=True, nodes=2)._decision(AttemptEnd(cause, "", 1, symptom=symptom))
    assert decision.cause is (cause if next_one is None else Cause.NODE_LOST)
    assert next_one is None or decision.next is next_one


def test_the_pause_after_a_failed_launch_ends_with_a_request_to_end(supervisor, run_directory, monkeypatch):
    monkeypatch.setattr("toolkit.supervise.supervisor.LAUNCH_PAUSE_S", 1.5)
    one = supervisor(in_slurm=True)

    def paused_s():
        began = time.monotonic()
        one._let_old_steps_end()
        return time.monotonic() - began

    assert paused_s() > 1.4
    monkeypatch.setattr("toolkit.supervise.supervisor.LAUNCH_PAUSE_S", 60.0)
    (run_directory.control / "stop").touch()
    assert paused_s() < 30
    (run_directory.control / "stop").unlink()
    one.request.on_signal(signal.SIGTERM, None)
    assert paused_s() < 30


def test_a_preemption_that_slurm_did_not_confirm_says_so(supervisor, sinfo, run_directory):
    sinfo("n1 allocated")
    one = supervisor(in_slurm=True)
    one.request.terminated = True
    cause = one.why_terminated()
    attempt = begun(run_directory)
    end = AttemptEnd(cause, f"ended on request ({cause.value})")
    one._record(attempt, end, one._decision(end), 1.0)
    said = json.loads(attempt.exit_file.read_text())
    assert (said["cause"], said["next"]) == ("preempted", "await_slurm")
    assert said["reason"] == "ended on request (preempted); Slurm did not report why"


def test_who_waits_is_told_of_a_checkpoint_that_is_damaged(run_directory):
    (run_directory.checkpoints / "step-00000020.bad-0").mkdir(parents=True)
    news = RestartNews(run_directory)
    assert list(news.new()) == []
    (run_directory.checkpoints / "step-00000040.bad-1").mkdir()
    (line,) = news.new()
    assert line.startswith("checkpoint step-00000040 is damaged; the run continues from an earlier one")
    assert list(news.new()) == []


def test_a_line_of_the_supervisor_begins_a_line_after_output_without_a_newline(tmp_path):
    program = "from toolkit.supervise.log import say; say('attempt 0 ended'); say('next: end')"
    for written, expected in (("loss 0.3", "loss 0.3\n"), ("loss 0.3\n", "loss 0.3\n"), ("", "")):
        log = tmp_path / "slurm-7.out"
        log.write_text(written)
        with log.open("ab") as output:
            subprocess.run([sys.executable, "-c", program], stdout=output, check=True)
        assert log.read_text() == f"{expected}toolkit: attempt 0 ended\ntoolkit: next: end\n"
