"""Worker processes: they end with the loader and with the rank, leave stop requests to it, and change nothing."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from sample_sources import Numbers

from toolkit.errors import ToolkitError
from toolkit.train.data import Loader, LoaderSettings, MapSource, choose_loader_settings
from toolkit.train.data.reading import BatchReader, Plan


def is_there(process: int) -> bool:
    """Alive, and no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def loader_of(dataset, workers=2, **options):
    return Loader(MapSource(dataset), batch=4, seed=0, settings=LoaderSettings(workers), **options)


class Worker(Numbers):
    """Each sample is the process that read it."""

    def __getitem__(self, position):
        return os.getpid()


def test_workers_are_gone_when_the_loader_is_closed():
    with loader_of(Worker()) as loader:
        batches = loader.batches()
        processes = {int(next(batches)[0]) for _ in range(4)}
        assert len(processes) == 2 and os.getpid() not in processes and all(map(is_there, processes))
    assert not any(map(is_there, processes))


def test_one_that_hangs_in_a_read_is_gone_as_well(monkeypatch):
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)  # torch's patience
    with loader_of(Hanging(), workers=1) as loader:
        batches = loader.batches()
        process = int(next(batches)[0])
        time.sleep(0.6)  # by now it hangs
    assert not is_there(process)


class Hanging(Worker):
    def __getitem__(self, position):
        from torch.utils.data import get_worker_info

        info = get_worker_info()
        info.dataset.read_before = getattr(info.dataset, "read_before", 0) + 1
        if info.dataset.read_before > 4:
            time.sleep(0.3)  # until the batch before is sent
            ctypes.PyDLL(None).sleep(3600)  # with the interpreter's lock: no thread of it hears a signal
        return os.getpid()


def test_an_error_ends_the_workers():
    class Failing(Worker):
        def __getitem__(self, position):
            if position == 9:
                raise ValueError("bad")
            return os.getpid()

    loader = loader_of(Failing(), shuffle=False)
    batches = loader.batches()
    processes = {int(next(batches)[0]) for _ in range(2)}
    with pytest.raises(ToolkitError, match="sample 9 of Failing: ValueError: bad"):
        next(batches)
    assert not any(map(is_there, processes))


def test_a_worker_that_dies_is_told_with_the_fix():
    class Dying(Numbers):
        def __getitem__(self, position):
            if position == 9:
                os.kill(os.getpid(), signal.SIGKILL)
            return position

    with (
        loader_of(Dying(), shuffle=False) as loader,
        pytest.raises(ToolkitError, match=r"data\.workers: a worker process") as told,
    ):
        batches = loader.batches()
        for _ in range(4):
            next(batches)
    assert "below 2" in told.value.fix


RANK = """
import os, signal, sys, time
sys.path[:0] = {path!r}
signal.signal(signal.SIGTERM, lambda *_: None)
signal.signal(signal.SIGUSR2, lambda *_: None)
from test_loader_workers import Worker, loader_of
loader = loader_of(Worker())
batches = loader.batches()
print(*{{int(next(batches)[0]) for _ in range(4)}}, flush=True)
for line in sys.stdin:
    print(int(next(batches)[0]), flush=True)
"""


def rank_with_workers():
    folders = [str(Path(__file__).parent), *filter(None, os.environ.get("PYTHONPATH", "").split(":"))]
    program = textwrap.dedent(RANK).format(path=folders)
    rank = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    workers = list(map(int, rank.stdout.readline().split()))
    assert len(workers) == 2
    return rank, workers


def test_a_stop_request_to_all_processes_is_the_ranks_alone():
    """Slurm sends it to each process of a step. The rank reads on until it has saved, and ends. That it forgets to close the loader keeps nothing alive."""
    rank, workers = rank_with_workers()
    for number in (signal.SIGTERM, signal.SIGUSR2):
        os.killpg(rank.pid, number)
    for _ in range(20):  # more than what was read ahead
        rank.stdin.write("\n")
        rank.stdin.flush()
        assert int(rank.stdout.readline()) in workers
    rank.stdin.close()
    assert rank.wait(20) == 0
    assert not any(map(is_there, workers))


def test_workers_go_with_a_rank_that_is_killed(wait_until):
    rank, workers = rank_with_workers()
    rank.kill()
    rank.wait()
    wait_until(lambda: not any(map(is_there, workers)), 3)


def test_starting_workers_draws_nothing_from_the_trainings_streams():
    """Else a run that was cut would drop other units than one that was not."""
    torch.manual_seed(1)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with loader_of(Numbers()) as loader:
        next(loader.batches())
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]


class Drawing(Numbers):
    def __getitem__(self, position):
        return torch.tensor([torch.rand(()).item(), np.random.rand(), random.random()])


@pytest.mark.parametrize("workers", [1, 2])
def test_what_a_dataset_draws_follows_the_seed_and_the_sample(workers):
    def drawn(first, count):
        with Loader(MapSource(Drawing()), batch=4, seed=5, settings=LoaderSettings(workers)) as loader:
            batches = loader.batches(first)
            return [next(batches).tolist() for _ in range(count)]

    whole = drawn(0, 5)
    assert whole[3:] == drawn(12, 2), "a resume draws the same"
    assert len({str(batch) for batch in whole}) == 5
    with Loader(MapSource(Drawing()), batch=4, seed=6, settings=LoaderSettings(workers)) as loader:
        assert next(loader.batches()).tolist() != whole[0]


class Slow(Numbers):
    def __getitem__(self, position):
        time.sleep(0.015)
        return position


def test_the_fastest_number_of_workers_is_kept_and_told(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    said = []
    reader = BatchReader(MapSource(Slow()), 0)
    settings = choose_loader_settings(reader, Plan(4), candidates=(0, 2), budget_s=1.6, tell=said.append)
    assert settings == LoaderSettings(2, prefetch=2)
    assert said[0].startswith("batches are read by 2 worker processes, ") and " with 0)" in said[0]
    quick = choose_loader_settings(
        BatchReader(MapSource(Numbers()), 0), Plan(4), candidates=(0, 1), budget_s=1.0, tell=said.append
    )
    assert quick.workers == 0, "workers cost more than they read"
    assert said[1].startswith("batches are read by the rank itself, ")


def test_a_rank_with_one_cpu_tries_one_worker_at_most(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    tried = []
    monkeypatch.setattr(
        "toolkit.train.data.loader_settings._seconds_per_batch",
        lambda reader, plan, first, workers, *_: tried.append(workers) or 1.0,
    )
    choose_loader_settings(BatchReader(MapSource(Numbers()), 0), Plan(4), tell=lambda text: None)
    assert tried == [0, 1]


def test_auto_chooses_when_the_first_batch_is_asked_for(monkeypatch):
    monkeypatch.setattr("toolkit.train.data.loader_settings.BUDGET_S", 0.1)
    said = []
    with Loader(MapSource(Numbers()), batch=4, seed=0, tell=said.append) as loader:
        assert loader.settings.workers == "auto" and not said
        first = next(loader.batches(8)).tolist()
        assert isinstance(loader.settings.workers, int) and len(said) == 1
    with loader_of(Numbers(), workers=0) as plain:
        assert first == next(plain.batches(8)).tolist()
