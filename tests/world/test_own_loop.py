"""`toolkit.should_stop` in a script of two ranks, and what frameworks' integrations share."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
from types import SimpleNamespace

import pytest
import torch

import toolkit as public
from toolkit.errors import OwnFailureError
from toolkit.rundir.claims import claim_attempt
from toolkit.world import own_loop
from toolkit.world.step import watch_of_rank

# Rank 1 steps at another speed, and only rank 0 sees the files of requests.
SCRIPT = """
import os, signal, time
import torch.distributed as dist
import toolkit
dist.init_process_group("gloo")
rank, number = dist.get_rank(), 0
while number < 5000:
    time.sleep(0.02 * (1 + rank))
    number += 1
    stops = toolkit.should_stop(number)
    if toolkit.should_save():
        print("saves", number, flush=True)
    if stops:
        print("stops", number, flush=True)
        break
dist.destroy_process_group()
"""


def steps_of(run, word: str) -> list[str]:
    logs = [(run.attempt(0).path / "logs" / f"rank-{rank}.log").read_text() for rank in (0, 1)]
    return [line for log in logs for line in log.splitlines() if line.startswith(word)]


def test_all_ranks_of_a_script_save_and_stop_after_the_same_step(toolkit, wait_until) -> None:
    (toolkit.folder / "loop.py").write_text(SCRIPT)
    job = toolkit.folder / "loop.toml"
    job.write_text('[job]\nentry = "loop.py"\nranks_per_node = 2\n')
    run = toolkit.submit(job)
    beat = run.attempt(0).heartbeat
    wait_until(beat.exists)
    assert "saves" not in json.loads(beat.read_text())  # it accepts requests
    assert "saves at its next step boundary" in toolkit("save", run.run_id).out
    wait_until(lambda: len(steps_of(run, "saves")) == 2)
    first, second = steps_of(run, "saves")
    assert first == second
    assert "saves at its next step boundary and ends" in toolkit.ok("stop", run.run_id)
    assert toolkit("wait", run.run_id).code == 130
    assert json.loads(toolkit.ok("status", run.run_id, "--json"))["state"] == "stopped"
    first, second = steps_of(run, "stops")
    assert first == second
    assert {path.read_text() for path in run.attempt(0).ranks.glob("*.done")} == {"stopped\n"}


@pytest.fixture
def rank_0(run_directory, monkeypatch):
    """This process is rank 0 of a run, and has no group of torch; with what it registers for its exit."""
    attempt = claim_attempt(run_directory)
    for name, value in (("RUN_DIR", run_directory.path), ("ATTEMPT", 0), ("RANK", 0)):
        monkeypatch.setenv(f"TOOLKIT_{name}", str(value))
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2)}
    caches = (watch_of_rank, own_loop._answering_watch)
    for one in caches:
        one.cache_clear()
    at_exit = []
    monkeypatch.setattr(own_loop.atexit, "register", lambda *given: at_exit.append(given))
    yield SimpleNamespace(attempt=attempt, at_exit=at_exit)
    for one in caches:
        one.cache_clear()
    for number, handler in before.items():
        signal.signal(number, handler)


def _report_and_pause(pipe) -> None:
    pipe.send("runs")
    signal.pause()


def _end_of_a_forked_child() -> int:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    child = context.Process(target=_report_and_pause, args=(there,))
    child.start()
    assert here.recv() == "runs"
    child.terminate()
    child.join(20)
    return child.exitcode


@pytest.mark.filterwarnings("ignore:.*use of fork")
def test_sigterm_is_a_request_to_the_rank_and_ends_a_process_that_it_forks(rank_0) -> None:
    assert not public.should_stop(1)
    assert _end_of_a_forked_child() == -signal.SIGTERM
    os.kill(os.getpid(), signal.SIGTERM)
    assert public.should_stop(2) and public.should_stop(3)
    ((mark, pid),) = [given for given in rank_0.at_exit if given[0] is own_loop._mark_stopped]
    mark(pid + 1)  # in a forked child
    assert not rank_0.attempt.done_marker(0).exists()
    mark(pid)
    assert rank_0.attempt.done_marker(0).read_text() == "stopped\n"


def test_begin_replaces_a_handler_that_a_framework_has_set(rank_0) -> None:
    assert not public.should_stop(1)
    signal.signal(signal.SIGTERM, lambda *_: None)
    own_loop.begin(1)
    os.kill(os.getpid(), signal.SIGTERM)
    assert public.should_stop(2)


def test_a_rank_that_continues_from_an_earlier_step_than_another_fails(rank_0, monkeypatch) -> None:
    monkeypatch.setattr(own_loop, "_largest", lambda number: 120)
    with pytest.raises(OwnFailureError, match="this rank continues from step 110, another one from step 120"):
        own_loop.begin(110)
    own_loop.begin(120)


def test_nothing_happens_outside_of_a_run() -> None:
    before = signal.getsignal(signal.SIGTERM)
    own_loop.begin(7)
    own_loop.record_metrics({"loss": 1.0})
    assert not public.should_stop(8) and not public.should_save()
    assert signal.getsignal(signal.SIGTERM) is before


def test_metrics_of_a_framework_get_names_that_are_recorded(monkeypatch) -> None:
    found = {}
    monkeypatch.setattr(own_loop, "record", found.__setitem__)
    own_loop.record_metrics(
        {
            "loss": torch.tensor(2.5), "eval/F1 score": 1, "5-shot": 0.5, "nan": math.nan, "many": torch.ones(2),
            "text": "3.2", "step_s": 1.0, "late_s": math.inf,
        }
    )  # fmt: skip
    assert {name: value for name, value in found.items() if name != "nan"} == {
        "loss": 2.5, "eval/F1_score": 1, "_5-shot": 0.5,
    }  # fmt: skip
    assert math.isnan(found["nan"])


def test_the_names_are_public() -> None:
    assert (public.should_stop, public.should_save) == (own_loop.should_stop, own_loop.should_save)
