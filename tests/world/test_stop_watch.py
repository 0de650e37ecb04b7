"""The stop request as one rank sees it."""

import contextlib
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from toolkit.rundir.claims import claim_attempt
from toolkit.rundir.files import read_json
from toolkit.world import stop
from toolkit.world.facts import World
from toolkit.world.stop import StopWatch


@pytest.fixture
def clock(monkeypatch):
    """The watch's clock, moved by hand."""
    now = [1000.0]
    monkeypatch.setattr(stop.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def watch(run_directory, clock):
    return StopWatch(run_directory, claim_attempt(run_directory))


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_a_signal_is_a_request_and_no_death(number):
    before = {each: signal.getsignal(each) for each in (signal.SIGUSR2, signal.SIGTERM)}
    try:
        watch = StopWatch()
        watch.install()
        assert not watch.look(1, rank=0)
        os.kill(os.getpid(), number)
        assert watch.look(2, rank=0)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@pytest.mark.parametrize("flag", ["control/stop", "control/cancel", "attempts/000/stop"])
def test_rank_0_finds_each_flag_file(run_directory, watch, flag):
    assert not watch.look(1, rank=0)
    (run_directory.path / flag).touch()
    stop_after = StopWatch(run_directory, watch.attempt)
    assert stop_after.look(2, rank=0)


def test_the_shared_file_system_is_asked_every_five_seconds_at_most(run_directory, watch, clock):
    assert not watch.look(1, rank=0)
    (run_directory.control / "stop").touch()
    clock[0] += 4.9
    assert not watch.look(2, rank=0)
    clock[0] += 0.2
    assert watch.look(3, rank=0)


def test_other_ranks_touch_no_file(run_directory, watch):
    (run_directory.control / "stop").touch()
    assert not watch.look(1, rank=1)
    assert not watch.attempt.heartbeat.exists()


def test_the_heartbeat_tells_the_step_once_a_second(watch, clock):
    watch.look(5, rank=0)
    watch.look(6, rank=0)
    assert read_json(watch.attempt.heartbeat)["step"] == 5
    clock[0] += 1.0
    watch.look(7, rank=0)
    assert read_json(watch.attempt.heartbeat)["step"] == 7


def test_the_heartbeat_has_the_last_step_when_all_stop_and_when_the_rank_ends(watch):
    for step in (5, 6):
        watch.look(step, rank=0)
    assert not watch.agree(stop.SAVE)
    assert read_json(watch.attempt.heartbeat)["step"] == 5
    assert watch.agree(stop.STOP)
    assert read_json(watch.attempt.heartbeat)["step"] == 6
    watch.look(7, rank=0)
    watch.tell_last_step()
    assert read_json(watch.attempt.heartbeat)["step"] == 7


def test_the_heartbeat_has_the_last_step_of_a_loop_that_hangs(run_directory, wait_until):
    watch = StopWatch(run_directory, claim_attempt(run_directory))
    for step in range(1, 30):
        watch.beat(step)
    wait_until(lambda: read_json(watch.attempt.heartbeat)["step"] == 29)
    wait_until(lambda: not watch._has_thread)  # it exists only as long as a step is missing
    watch.beat(30)
    watch.beat(31)
    wait_until(lambda: read_json(watch.attempt.heartbeat)["step"] == 31)


def test_a_last_step_that_cannot_be_written_is_said_and_no_more(watch, capsys):
    watch.look(5, rank=0)
    watch.look(6, rank=0)
    shutil.rmtree(watch.attempt.path)
    watch.tell_last_step()
    assert "does not respond" in capsys.readouterr().err


def test_outside_a_run_there_is_nothing_to_write():
    watch = StopWatch()
    assert not watch.look(1, rank=0)
    watch.tell_last_step()


def test_a_world_notes_what_was_agreed():
    world = World(0, 0, 1, 1, 0, 1, "here", "cpu", "none", "test", stop_watch=StopWatch(asked=True))
    assert not world.stop_watch.stop_agreed
    assert world.should_stop(3)
    assert world.stop_watch.stop_agreed
    assert not world.stop_agreed(0)
    assert not world.stop_watch.stop_agreed


def test_a_save_is_asked_by_a_file_and_once(run_directory, watch, clock):
    world = World(0, 0, 1, 1, 0, 1, "here", "cpu", "none", "test", stop_watch=watch)
    (run_directory.control / "save").touch()
    assert not world.should_stop(1)
    assert world.should_save()
    assert not (run_directory.control / "save").exists()
    clock[0] += 6
    assert not world.should_stop(2)
    assert not world.should_save()


@pytest.mark.parametrize(
    ("asked", "stops", "saves"),
    [
        ([stop.GO_ON, stop.GO_ON], False, False),
        ([stop.SAVE, stop.GO_ON], False, True),
        ([stop.SAVE, stop.SAVE], False, True),
        ([stop.GO_ON, stop.STOP], True, False),
        ([stop.SAVE, stop.STOP], True, False),
        ([stop.STOP, stop.STOP], True, False),
    ],
)
def test_the_sum_and_the_largest_of_what_ranks_ask_for_mean_the_same(asked, stops, saves):
    for total in (sum(asked), max(asked)):
        watch = StopWatch()
        assert (watch.agree(total), watch.save_agreed) == (stops, saves)


def test_a_pause_of_the_file_system_does_not_end_a_rank(run_directory, watch, clock, capsys):
    shutil.rmtree(watch.attempt.path)
    assert not watch.look(1, rank=0)
    assert "does not respond" in capsys.readouterr().err


def test_the_time_left_follows_an_end_that_moves(run_directory, watch, clock, monkeypatch):
    monkeypatch.setenv("TOOLKIT_ENDS_AT", f"{time.time() + 100:.0f}")
    assert watch.time_left() == pytest.approx(100, abs=2)
    watch.attempt.ends_at.write_text(f"{time.time() + 500:.0f}\n")
    assert watch.time_left() == pytest.approx(100, abs=2)  # it is read once a minute
    clock[0] += 61
    assert watch.time_left() == pytest.approx(500, abs=2)
    watch.attempt.ends_at.write_bytes(b"\xff")
    clock[0] += 61
    assert watch.time_left() == pytest.approx(500, abs=2)
    assert StopWatch().time_left() == pytest.approx(100, abs=2)  # outside a run: what the launcher's variables say


def test_a_full_disk_under_heartbeat_and_log_does_not_end_a_rank(watch, monkeypatch):
    watch.attempt.heartbeat.mkdir()  # no heartbeat can be written
    with Path("/dev/full").open("w", buffering=1) as log:
        monkeypatch.setattr("sys.stderr", log)
        assert not watch.look(1, rank=0)
        (watch.run.control / "stop").touch()
        watch._looked_at = float("-inf")
        assert watch.look(2, rank=0)  # and files are read all the same
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            log.close()


def test_many_ranks_that_ask_for_a_save_ask_for_no_stop():
    """Each rank asks for itself: failing health, say, which many nodes may find in the same step."""
    watch = StopWatch()
    watch.ask_save("health")
    watch.ask_save("asked")
    assert watch.save_asked == "health"
    total = watch.look(1, rank=1) * 1_000_000
    assert not watch.agree(total) and watch.save_agreed and watch.save_asked == ""
    assert watch.agree(total + stop.STOP) and not watch.save_agreed
