"""Cut off and begun again on other numbers of ranks, every source gives every sample once an epoch."""

from __future__ import annotations

from collections import Counter

import pytest
from sample_sources import COUNT, KINDS, numbers_in, source_of

from toolkit.train.data import Loader, LoaderSettings

BATCH = 12
CUTS = ((1, 3), (4, 2), (3, 5), (2, 4))  # ranks, and steps until the next cut: 168 samples, more than 5 epochs


def read_by(kind, folder, *, workers, size, first, steps, micro_batch=0):
    """What each step of all ranks reads, in the order of the global samples."""
    read = [[] for _ in range(steps)]
    for rank in range(size):
        settings = LoaderSettings(workers, prefetch=2)
        with Loader(
            source_of(kind, folder),
            batch=BATCH,
            seed=7,
            rank=rank,
            size=size,
            micro_batch=micro_batch,
            settings=settings,
        ) as loader:
            batches = loader.batches(first)
            for step in range(steps):
                share = (rank + 1) * BATCH // size - rank * BATCH // size
                for _ in range(-(-share // micro_batch) if micro_batch else 1):
                    read[step] += numbers_in(next(batches))
    return [number for step in read for number in step]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_every_sample_is_read_once_an_epoch_over_cuts_and_numbers_of_ranks(kind, workers, tmp_path):
    read, first = [], 0
    for size, steps in CUTS:
        read += read_by(kind, tmp_path, workers=workers, size=size, first=first, steps=steps)
        first += BATCH * steps
    epochs = [read[begin : begin + COUNT] for begin in range(0, len(read), COUNT)]
    assert all(Counter(epoch) == Counter(range(COUNT)) for epoch in epochs[:-1]) and len(epochs) > 5
    assert len(set(epochs[-1])) == len(epochs[-1])
    shuffled = len({tuple(epoch) for epoch in epochs[:-1]})
    assert shuffled == (1 if kind == "iterable" else len(epochs) - 1), "streams keep their own order"
    # And the same samples in the same order as one rank that nobody cut.
    assert read == read_by(kind, tmp_path, workers=0, size=1, first=0, steps=first // BATCH)


@pytest.mark.parametrize("kind", KINDS)
def test_two_workers_and_micro_batches_change_nothing(kind, tmp_path):
    whole = read_by(kind, tmp_path, workers=0, size=2, first=24, steps=4)
    assert read_by(kind, tmp_path, workers=2, size=2, first=24, steps=4, micro_batch=4) == whole


def test_the_loop_may_ask_for_samples_out_of_turn(tmp_path):
    """As a rehearsal of a step does, and a run that goes back to an older checkpoint."""
    order = read_by("map", tmp_path, workers=0, size=1, first=0, steps=8)
    with Loader(source_of("map", tmp_path), batch=BATCH, seed=7, settings=LoaderSettings(1)) as loader:
        for first, last in ((0, 1), (24, 36), (36, 48), (48, 49), (48, 60), (12, 24)):
            assert numbers_in(loader.take_samples(range(first, last))) == order[first:last]
