"""A record that cannot be read is named, and fatal or replaced by the next good one: the others stay in their places."""

from __future__ import annotations

import json

import numpy as np
import pytest
from sample_sources import Numbers
from torch.utils.data import IterableDataset

from toolkit.errors import ToolkitError
from toolkit.train.data import BrokenRecordError, IterableSource, JsonLinesSource, Loader, LoaderSettings, MapSource
from toolkit.train.data.broken import FEWEST_JUDGED, BrokenShare, SkipCount, check_share
from toolkit.world.facts import World

BROKEN = {5, 6, 28}
ALONE = World(0, 0, 1, 1, 0, 1, "here", "cpu", "none", "alone")


class Fragile(Numbers):
    def __getitem__(self, position):
        if position in BROKEN:
            raise ValueError(f"no picture {position}")
        return position


class FragileTogether(Fragile):
    def __getitems__(self, positions):
        return [self[position] for position in positions]


class FragileStream(IterableDataset):
    def __iter__(self):
        for number in range(29):
            yield BrokenRecordError("no picture", where=f"shard.tar:{number}") if number in BROKEN else number


def lines(folder):
    path = folder / "numbers.jsonl"
    path.write_text("".join("{oops\n" if number in BROKEN else f"{json.dumps(number)}\n" for number in range(29)))
    return path


def fragile(kind, folder, broken):
    if kind == "lines":
        return JsonLinesSource([lines(folder)], broken=broken)
    if kind == "stream":
        return IterableSource(FragileStream(), broken=broken)
    return MapSource({"map": Fragile, "together": FragileTogether}[kind](), broken=broken)


KINDS = ("map", "together", "lines", "stream")


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("map", "sample 5 of Fragile"),
        ("together", "sample 5 of FragileTogether"),
        ("lines", "numbers.jsonl:6"),
        ("stream", "shard.tar:5"),
    ],
)
def test_the_first_broken_record_is_named_and_ends_the_reading(kind, place, workers, tmp_path):
    settings = LoaderSettings(workers)
    with Loader(fragile(kind, tmp_path, "fail"), batch=4, seed=0, shuffle=False, settings=settings) as loader:
        batches = loader.batches()
        assert next(batches).tolist() == [0, 1, 2, 3]
        with pytest.raises(BrokenRecordError) as told:
            next(batches)
    assert place in told.value.where
    if kind != "stream":
        assert "skip" in told.value.fix
    if kind in ("map", "together"):
        assert "ValueError: no picture 5 (in test_broken_records.py:" in told.value.message


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 3])
def test_the_next_good_record_stands_in_whatever_the_number_of_ranks(kind, size, workers, tmp_path):
    said, read, skipped_samples = [], {}, 0
    for rank in range(size):
        with Loader(
            fragile(kind, tmp_path, "skip"), batch=29, seed=0, rank=rank, size=size, shuffle=False,
            settings=LoaderSettings(workers), tell=said.append,
        ) as loader:  # fmt: skip
            read[rank] = next(loader.batches()).tolist()
            skipped_samples += loader.skips.skipped
    expected = [7 if number in (5, 6) else 0 if number == 28 else number for number in range(29)]
    assert [number for rank in range(size) for number in read[rank]] == expected
    assert skipped_samples == 3, "each counts once, however far the next good one is"
    skipped = [text for text in said if text.startswith("skipped")]
    # Of each rank the first is told: with three, those of 5 and 6 are of one rank, that of 28 of another.
    assert len(skipped) == (1 if size == 1 else 2), said
    assert skipped[0].startswith("skipped 1 of ") and "samples read; the last broken one: " in skipped[0]


def test_skips_are_said_now_and_then_and_too_many_of_them_are_an_error():
    said = []
    skips = SkipCount(said.append)
    for _ in range(20):
        skips.add(10, ["f:1: bad"] * 10)
    check_share(0.2, skips.read, skips.skipped, lambda: skips.last)
    assert said == [
        "skipped 1 of 10 samples read; the last broken one: f:1: bad",
        "skipped 101 of 110 samples read; the last broken one: f:1: bad",
    ]
    with pytest.raises(
        ToolkitError, match=r"201 of 201 samples are broken, more than the allowed fraction 0.2; the last: f:1: bad"
    ):
        check_share(0.2, 201, 201, lambda: skips.last)
    assert FEWEST_JUDGED == 1000


def test_the_share_is_of_what_was_read():
    skips = SkipCount(lambda text: None)
    for _ in range(50):
        skips.add(100, ["f:1: bad"])
    assert (skips.read, skips.skipped) == (5000, 50)
    check_share(0.01, 5000, 50, lambda: skips.last)
    with pytest.raises(ToolkitError, match="51 of 5,000 samples"):
        check_share(0.01, 5000, 51, lambda: skips.last)


@pytest.mark.parametrize("limit", [0.0, None])
def test_a_loader_judges_what_it_reads_or_leaves_that_to_the_loop(limit):
    settings = LoaderSettings(0)
    source = MapSource(Fragile(), broken="skip")
    with Loader(source, batch=29, seed=0, shuffle=False, settings=settings, broken_limit=limit) as loader:
        if limit is None:
            next(loader.batches())
        else:
            with pytest.raises(ToolkitError, match="3 of 29 samples are broken"):
                next(loader.batches())
        assert (loader.skips.read, loader.skips.skipped) == (29, 3)


def test_a_rank_tells_the_loop_what_is_new_and_only_what_no_other_rank_counts():
    skips = SkipCount(lambda text: None)
    skips.add(4, ["trial"])
    own, twin = (BrokenShare(ALONE, skips, 0.5, counts=counts) for counts in (True, False))
    skips.add(4, ["a", "b"])
    assert (own.new(), own.new(), twin.new()) == (2, 0, 0)


def test_data_of_which_nothing_can_be_read_is_an_error_with_skip_as_well():
    class Nothing(Numbers):
        def __getitem__(self, position):
            raise OSError("the disk is gone")

    with pytest.raises(ToolkitError, match="100 consecutive records are broken; the last: OSError: the disk is gone"):
        MapSource(Nothing(1000), broken="skip").take(np.arange(2))


def test_samples_that_make_no_batch_are_no_traceback():
    class Ragged(Numbers):
        def __getitem__(self, position):
            return [position] * position

    with (
        Loader(MapSource(Ragged()), batch=4, seed=0, settings=LoaderSettings(0)) as loader,
        pytest.raises(
            ToolkitError, match=r"cannot collate 4 samples into a batch: .*PadSamples\(\) pads sequences to one length"
        ),
    ):
        next(loader.batches())
