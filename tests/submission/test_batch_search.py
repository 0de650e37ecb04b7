"""The search for the largest micro-batch: few trials, a real failed allocation, a kill, other failures, the proposal."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.config.resolved import ResolvedJob
from toolkit.rundir.files import read_json
from toolkit.submission import batch_search
from toolkit.submission.batch_search import Trial, _largest, _largest_below, search_batch

TINY = ["--set=args.width=64", "--set=args.layers=2", "--set=args.context=64", "--set=args.max_bytes=100000"]


def recording(tried: list[int], largest: int):
    """Return whether a size fits, and record that it was tried."""

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= largest

    return fits


@given(st.integers(0, 300), st.integers(1, 300))
def test_the_largest_size_is_found_in_few_trials(true, limit):
    tried: list[int] = []
    fits = recording(tried, true)
    assert _largest(fits, limit) == min(true, limit)
    assert len(set(tried)) <= 2 * limit.bit_length() + 1 and max(tried) <= limit


@pytest.mark.parametrize(
    ("lasting", "largest", "micro_batch", "tried"), [(11, 11, 8, 9), (10, 10, 8, 10), (4, 4, 2, 14), (0, 0, 0, 14)]
)
def test_the_largest_size_must_fit_for_more_steps(local_job, monkeypatch, lasting, largest, micro_batch, tried):
    """11 fits for the few steps of a trial, `lasting` also for the steps in which the heap still grows."""
    job = ResolvedJob.from_json(json.dumps(local_job("toolkit.jobs.train_lm:main", ranks=1)))
    job = job.model_copy(update={"train": job.train.model_copy(update={"batch": 64})})
    reported = []

    def trial(job, runs, size, share, data_ranks, steps):
        return Trial(size, steps, size <= (11 if steps <= 4 else lasting), 1.0, "")

    monkeypatch.setattr(batch_search, "_tried", trial)
    found = search_batch(job, Path(), headroom=0.1, most=None, report=reported.append)
    assert (found.largest, found.micro_batch, found.is_limited) == (largest, micro_batch, False)
    assert len(reported) == len(found.trials) == tried


@given(st.integers(0, 300), st.integers(0, 300))
def test_a_size_that_does_not_last_is_lowered_in_few_trials(true, found):
    tried: list[int] = []
    fits = recording(tried, true)
    assert _largest_below(fits, found) == min(true, found)
    assert len(tried) <= 2 * found.bit_length() + 1


@pytest.fixture
def memory_of_ranks():
    """A limit for what this process and its ranks allocate."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    yield lambda size: resource.setrlimit(resource.RLIMIT_DATA, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_DATA, before)


ENTRY = """
import os, signal
from pathlib import Path

from toolkit.metrics.training import TrainLog, TrainRecord

def main(world, config):
    size = config.train.micro_batch
    if size > {most}:
        {end}
    if world.rank:  # two ranks must not write one log
        return
    with TrainLog(world.run_dir / "metrics" / "train.jsonl") as log:
        for step in range(1, config.train.steps + 1):
            log.write(TrainRecord(
                step=step, steps=config.train.steps, loss=1.0, loss_hex=(1.0).hex(), lr=0.1, grad_norm=1.0,
                samples=step * config.train.batch, tokens=step, seconds=0.5, tokens_per_s=1.0,
                time="2026-01-01T00:00:00.000+00:00", attempt=0, world=1,
            ))
"""
JOB = '[job]\nname = "sample"\nentry = "entry.py:main"\nranks_per_node = {ranks}\n[train]\nbatch = 16\n'


@pytest.fixture
def search(toolkit):
    def run(most: int, end: str, *options: str, ranks: int = 1):
        (toolkit.folder / "entry.py").write_text(ENTRY.format(most=most, end=end))
        (toolkit.folder / "job.toml").write_text(JOB.format(ranks=ranks))
        return toolkit("bench", "batch", str(toolkit.folder / "job.toml"), "--site", "local", *options)

    return run


@pytest.mark.evidence
def test_a_kill_is_a_result(search):
    result = search(3, "os.kill(os.getpid(), signal.SIGKILL)", "--json", ranks=2)
    found = json.loads(result.out)
    assert (result.code, found["largest"], found["data_ranks"]) == (0, 3, 2)
    assert (found["micro_batch"], found["accumulation"]) == (2, 4), "at most 2.7, and a divisor of 8"
    assert {trial["micro_batch"]: trial["fits"] for trial in found["trials"]} == {1: True, 2: True, 3: True, 4: False}
    assert found["trials"][0]["samples_per_s"] == 2 * 2 * 2, (
        "two ranks, two passes beside the gradients of the first, 0.5 s"
    )


def test_a_failed_allocation_is_a_result(search):
    result = search(1, 'raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB")', "--json", "--most", "2")
    assert (result.code, json.loads(result.out)["largest"]) == (0, 1)


def test_another_failure_ends_the_search(search):
    result = search(0, 'raise ValueError("wrong shape")')
    assert result.code != 0 and "a trial with micro_batch = 1 failed" in result.err and "toolkit explain" in result.err


def test_a_size_that_was_not_allowed_to_fail_is_said(search):
    result = search(1000, "pass", "--most", "1")
    assert "the largest size is 1, and no larger one was tried: set train.micro_batch = 1" in result.out


def test_trials_send_no_notifications_and_need_no_checkpoint(search, toolkit, monkeypatch):
    monkeypatch.setenv("HOOK", "http://127.0.0.1:9/")
    guard = ("--set=train.guard=roll_back", "--set=train.guard_window=32", "--set=checkpoint.every_steps=2")
    result = search(1000, "pass", "--most", "1", "--set=notify.webhook=env:HOOK", *guard)
    assert result.code == 0, result.err
    jobs = [read_json(path) for path in toolkit.folder.rglob("job.json")]
    assert jobs and {(job["notify"]["webhook"], job["train"]["guard"]) for job in jobs} == {("", "off")}


def test_nothing_fits(search):
    result = search(0, "os.kill(os.getpid(), signal.SIGKILL)")
    assert result.code == 1 and "not even one sample per rank fits" in result.err


def test_wrong_options(toolkit):
    for option, value, named in (("--headroom", "100", "0 to 99"), ("--most", "0", "at least 1")):
        result = toolkit("bench", "batch", "train_lm", option, value)
        assert result.code == 2 and named in result.err


@pytest.mark.evidence
@pytest.mark.timeout(1200)
def test_a_real_limit(toolkit, memory_of_ranks, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    memory_of_ranks(700 << 20)
    given = ("train_lm", "--site", "local", "-n", "1", "--set=train.batch=1024", *TINY)
    found = json.loads(toolkit("bench", "batch", *given, "--json").out)
    assert 1 < found["micro_batch"] < found["largest"] < 1024
    steps = ("--set=train.steps=50", f"--set=train.micro_batch={found['micro_batch']}")
    assert toolkit("run", *given, *steps, f"--set=train.batch={found['micro_batch']}").code == 0
