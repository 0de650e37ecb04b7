"""The watch over one attempt: its patience with file systems and launchers, and its clock. Nothing is started here."""

import threading
import time
from pathlib import Path

import pytest

from toolkit.errors import OwnFailureError
from toolkit.rundir.claims import claim_attempt
from toolkit.rundir.files import write_json
from toolkit.rundir.states import Cause
from toolkit.supervise.attempt import AttemptWatch
from toolkit.supervise.requests import StopRequest
from toolkit.supervise.shape import Shape


def test_the_grace_time_is_taken_once(run_directory):
    """What is left until walltime shrinks as the ranks save; they get all of it, not the half."""
    attempt = claim_attempt(run_directory)
    ends_at = time.monotonic() + 2.0
    request = StopRequest(cause=Cause.WALLTIME)
    watch = AttemptWatch(
        run_directory, attempt, Shape.of(1, 1), request, FakeReasons(lambda: ends_at - time.monotonic()), stall_s=900, is_unmanaged=True,
    )  # fmt: skip
    ranks = FakeRanks()
    began = time.monotonic()
    watch.follow(ranks)
    assert time.monotonic() - began > 1.7
    assert ranks.killed


@pytest.mark.parametrize(("foreign", "cause"), [(False, Cause.STALLED), (True, Cause.WALLTIME)])
def test_a_hang_before_the_first_step_is_a_stall(run_directory, foreign, cause):
    """A script writes no heartbeat, so its silence says nothing: it is ended by the request that comes later."""
    request = StopRequest()
    watch = AttemptWatch(
        run_directory, claim_attempt(run_directory), Shape.of(1, 1), request, FakeReasons(), stall_s=0.5, is_unmanaged=foreign,
    )  # fmt: skip
    timer = threading.Timer(1.5, request.ask, [Cause.WALLTIME])
    timer.start()
    assert watch.follow(FakeRanks()).cause is cause
    timer.cancel()


PRINTED = {"step": 7, "time": "2026-01-01T00:00:00Z", "saves": False}


@pytest.mark.parametrize("is_set", [False, True])
@pytest.mark.parametrize(
    ("more", "cause"),
    [
        ({"total": 9, "steps_per_s": 2.0}, Cause.STALLED),
        ({"total": 7, "steps_per_s": 2.0}, Cause.WALLTIME),  # after its last step it tests or uploads
        ({"steps_per_s": None}, Cause.WALLTIME),  # the reader has failed
    ],
)
def test_printed_steps_stall_while_more_are_expected(run_directory, monkeypatch, is_set, more, cause):
    monkeypatch.setattr("toolkit.supervise.attempt.LONGEST_PAUSES", 0)
    monkeypatch.setattr("toolkit.supervise.stacks.PATIENCE_S", 0.1)
    attempt, request = claim_attempt(run_directory), StopRequest()
    write_json(attempt.heartbeat, PRINTED | more)
    watch = AttemptWatch(
        run_directory, attempt, Shape.of(1, 1), request, FakeReasons(), stall_s=0.5, is_unmanaged=True,
        is_stall_set=is_set, reads_steps=True,
    )  # fmt: skip
    timer = threading.Timer(1.5, request.ask, [Cause.WALLTIME])
    timer.start()
    end = watch.follow(FakeRanks())
    timer.cancel()
    assert end.cause is cause
    assert ("read from the output of one rank" in end.reason) is (cause is Cause.STALLED)


@pytest.mark.parametrize(("is_set", "cause"), [(False, Cause.WALLTIME), (True, Cause.STALLED)])
def test_steps_that_a_program_reports_itself_stall_only_if_stall_s_is_set(run_directory, monkeypatch, is_set, cause):
    monkeypatch.setattr("toolkit.supervise.attempt.LONGEST_PAUSES", 0)
    monkeypatch.setattr("toolkit.supervise.stacks.PATIENCE_S", 0.1)
    attempt, request = claim_attempt(run_directory), StopRequest()
    write_json(attempt.heartbeat, PRINTED)
    watch = AttemptWatch(
        run_directory, attempt, Shape.of(1, 1), request, FakeReasons(), stall_s=0.5, is_unmanaged=True,
        is_stall_set=is_set, reads_steps=True,
    )  # fmt: skip
    timer = threading.Timer(1.5, request.ask, [Cause.WALLTIME])
    timer.start()
    end = watch.follow(FakeRanks())
    timer.cancel()
    assert end.cause is cause
    assert "read from the output" not in end.reason


def test_a_pause_of_the_file_system_is_waited_out(run_directory, capsys):
    """The run directory is away for a while, as a file server that fails over; the attempt goes on."""
    attempt = claim_attempt(run_directory)
    request = StopRequest()
    watch = AttemptWatch(
        run_directory, attempt, Shape.of(1, 1), request, FakeReasons(), stall_s=900, is_unmanaged=False
    )

    def outage():
        attempt.heartbeat.symlink_to(attempt.heartbeat)  # every look at it ends with ELOOP
        time.sleep(1.0)
        attempt.heartbeat.unlink()
        time.sleep(0.5)
        request.ask(Cause.STOPPED)
        request.kill = True

    thread = threading.Thread(target=outage)
    thread.start()
    assert watch.follow(FakeRanks()).cause is Cause.STOPPED
    thread.join()
    said = capsys.readouterr().out
    assert "does not respond" in said
    assert "responds again" in said


def test_a_file_system_that_stays_away_ends_the_attempt_in_words(run_directory, monkeypatch):
    attempt = claim_attempt(run_directory)
    monkeypatch.setattr("toolkit.supervise.attempt.FILE_SYSTEM_PATIENCE_S", 0.5)
    watch = AttemptWatch(
        run_directory, attempt, Shape.of(1, 1), StopRequest(), FakeReasons(), stall_s=900, is_unmanaged=False
    )
    attempt.heartbeat.symlink_to(attempt.heartbeat)
    with pytest.raises(OwnFailureError, match="has not responded"):
        watch.follow(FakeRanks())


def test_signals_reach_the_ranks_while_the_file_system_is_away(run_directory, monkeypatch):
    """The first one asks them to save, though nobody can look up why it came; a second Ctrl-C ends them."""
    request = StopRequest(terminated=True)
    reasons = FakeReasons()
    monkeypatch.setattr(reasons, "refuse_superseded", Path("/dev/null/none").stat)
    watch = AttemptWatch(
        run_directory, claim_attempt(run_directory), Shape.of(1, 1), request, reasons, stall_s=900, is_unmanaged=False
    )
    ranks = FakeRanks()
    timer = threading.Timer(0.5, setattr, [request, "kill", True])
    timer.start()
    with pytest.raises(OwnFailureError, match="has not responded"):
        watch.follow(ranks)
    assert ranks.asked
    assert ranks.killed


def test_the_ranks_are_asked_although_the_disk_is_full(run_directory, capsys, monkeypatch):
    """Neither the event nor the flag file can be written; the signal needs none of them, and they may save in peace."""
    monkeypatch.setattr("toolkit.supervise.attempt.FILE_SYSTEM_PATIENCE_S", 0.5)
    attempt = claim_attempt(run_directory)
    for path in (attempt.events, attempt.stop_flag):
        path.mkdir()  # every write to it fails
    request = StopRequest(cause=Cause.WALLTIME)
    watch = AttemptWatch(
        run_directory, attempt, Shape.of(1, 1), request, FakeReasons(lambda: 2.5), stall_s=900, is_unmanaged=False
    )
    ranks = FakeRanks()
    threading.Timer(1.2, attempt.stop_flag.rmdir).start()  # somebody makes room
    began = time.monotonic()
    assert watch.follow(ranks).cause is Cause.WALLTIME
    assert time.monotonic() - began > 2
    assert ranks.asked
    said = capsys.readouterr().out
    assert said.count(f"cannot write {attempt.stop_flag}") == 1
    assert f"cannot write {attempt.events}" in said
    assert attempt.stop_flag.read_text() == "walltime\n"


def test_ranks_hear_of_a_signal_while_a_look_hangs(run_directory, monkeypatch):
    """A hard mount does not report that its server is away: a look at a file does not return."""
    request = StopRequest()
    reasons = FakeReasons()
    ranks = FakeRanks()
    # The look returns after the ranks were asked, or too late for the last assertion.
    monkeypatch.setattr(reasons, "refuse_superseded", lambda: ranks.was_asked.wait(60))
    watch = AttemptWatch(
        run_directory, claim_attempt(run_directory), Shape.of(1, 1), request, reasons, stall_s=900, is_unmanaged=False
    )
    came_at = time.monotonic() + 0.5
    threading.Timer(0.5, request.ask, [Cause.WALLTIME]).start()
    watch.follow(ranks)
    assert 0 <= ranks.asked_at - came_at < 30


@pytest.mark.parametrize(
    ("word", "foreign", "cause"),
    [("done", False, Cause.COMPLETED), ("done", True, Cause.COMPLETED), ("stopped", False, Cause.STOPPED)],
)
def test_a_launcher_that_outlives_its_ranks_changes_nothing(run_directory, monkeypatch, capsys, word, foreign, cause):
    monkeypatch.setattr("toolkit.supervise.attempt.LAUNCHER_PATIENCE_S", 1.0)
    attempt = claim_attempt(run_directory)
    watch = AttemptWatch(
        run_directory, attempt, Shape.of(1, 2), StopRequest(), FakeReasons(), stall_s=1.5, is_unmanaged=foreign
    )

    def end():
        for rank in (0, 1):
            attempt.done_marker(rank).write_text(f"{word}\n")

    threading.Timer(0.5, end).start()
    ranks = FakeRanks()
    assert watch.follow(ranks).cause is cause
    assert ranks.killed
    assert "the launcher did not exit after every rank had" in capsys.readouterr().out


def test_a_request_after_the_last_marker_comes_too_late(run_directory):
    """The program had ended by itself; nobody is to run it again because walltime was near."""
    attempt = claim_attempt(run_directory)
    attempt.done_marker(0).write_text("done\n")
    request = StopRequest(cause=Cause.WALLTIME)
    watch = AttemptWatch(run_directory, attempt, Shape.of(1, 1), request, FakeReasons(), stall_s=900, is_unmanaged=True)
    assert watch.follow(FakeRanks()).cause is Cause.COMPLETED


class FakeReasons:
    """What the supervisor would say of signals: here nobody sends any."""

    def __init__(self, grace_s=lambda: 0.0):
        self.left_s = grace_s

    def grace_s(self, _cause):
        return self.left_s()

    def refresh_end(self, _attempt):
        pass

    def refuse_superseded(self):
        pass


class FakeRanks:
    """Ranks that never end by themselves: only the watch's clock is under test."""

    killed = False
    asked = False

    def __init__(self):
        self.was_asked = threading.Event()

    def exit_code(self):
        return -9 if self.killed else None

    def report_a_death(self):
        return False

    def forward_stop(self):
        self.asked = True
        self.asked_at = time.monotonic()
        self.was_asked.set()
        return True

    def ask_for_stacks(self):
        return True

    def terminate(self):
        pass

    def kill(self):
        self.killed = True
