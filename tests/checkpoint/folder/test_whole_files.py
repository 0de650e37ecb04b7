"""Whole files are read by several threads: every byte once, and what the disk does not give is named by its byte."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from toolkit.checkpoint.errors import CorruptCheckpointError, reading
from toolkit.checkpoint.folder import whole_files
from toolkit.checkpoint.folder.whole_files import BLOCKS_AT_ONCE, Unreadable, blocks_of_span, read_whole
from toolkit.checkpoint.format.digests import BLOCK_BYTES, digests_of_file
from toolkit.errors import OwnFailureError

span_bytes = BLOCKS_AT_ONCE * BLOCK_BYTES
SIZES = [
    0,
    1,
    BLOCK_BYTES - 1,
    BLOCK_BYTES,
    BLOCK_BYTES + 1,
    span_bytes - 1,
    span_bytes,
    span_bytes + 5,
    3 * span_bytes,
]


def test_blocks_are_those_that_one_thread_finds_and_every_byte_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(whole_files, "BLOCKS_AT_ONCE", 2)
    page = os.urandom(BLOCK_BYTES + 4099)  # no two blocks of a file are alike
    files = []
    for size in SIZES:
        path = tmp_path / str(size)
        path.write_bytes((page * (size // len(page) + 1))[:size])
        files.append((path, size))
    told: list[int] = []
    found = list(read_whole(files, told.append))
    assert [path for path, _ in found] == [path for path, _ in files]
    for path, blocks in found:
        assert tuple(blocks) == digests_of_file(path).blocks
    assert sum(told) == sum(SIZES)


def test_what_the_disk_does_not_give_is_named_by_its_byte():
    """The first page of a process's memory is not mapped: reading it is an input/output error like a disk's."""
    first, second = blocks_of_span(Path("/proc/self/mem"), range(BLOCK_BYTES + 100), lambda count: None)
    assert first == Unreadable(0, "cannot be read from byte 0 on: Input/output error")
    assert second == Unreadable(BLOCK_BYTES, f"cannot be read from byte {BLOCK_BYTES} on: Input/output error")


def test_a_disk_that_gives_nothing_is_told_from_a_host_that_may_not_read(tmp_path):
    """The system's own words name no file where an open one is read."""
    place = tmp_path / "shard"
    with (
        Path("/proc/self/mem").open("rb", buffering=0) as memory,
        pytest.raises(CorruptCheckpointError) as damaged,
        reading(place),
    ):
        memory.read(10)
    assert str(damaged.value) == f"{place}: cannot be read: Input/output error"
    with pytest.raises(OwnFailureError, match="EISDIR") as refused, reading(place):
        os.read(os.open(tmp_path, os.O_RDONLY), 10)
    assert refused.value.where == str(place) and refused.value.fix


def test_a_file_that_became_shorter_or_went_away_meanwhile(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * (BLOCK_BYTES + 10))
    told: list[int] = []
    whole, cut, gone = blocks_of_span(path, range(2 * BLOCK_BYTES + 1), told.append)
    assert whole == digests_of_file(path).blocks[0]
    assert cut == Unreadable(BLOCK_BYTES + 10, f"ends too early, at byte {BLOCK_BYTES + 10}")
    assert gone == Unreadable(2 * BLOCK_BYTES, f"ends too early, at byte {2 * BLOCK_BYTES}")
    assert sum(told) == BLOCK_BYTES + 10
    assert blocks_of_span(tmp_path / "none", range(10), told.append) == [Unreadable(0, "is missing")]


def test_who_is_not_willing_to_wait_is_not_made_to(tmp_path):
    """What waits for its turn is dropped when the reader stops, as at Ctrl-C."""
    span_bytes = BLOCKS_AT_ONCE * BLOCK_BYTES
    files = [(tmp_path / "first", span_bytes), (tmp_path / "second", 400 * span_bytes)]
    for path, size in files:
        with path.open("wb") as file:
            file.truncate(size)
    told: list[int] = []
    answers = read_whole(files, told.append)
    next(answers)
    answers.close()
    assert sum(told) < 100 * span_bytes


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(OwnFailureError, match="ELOOP"):
        blocks_of_span(tmp_path / "link", range(1), lambda count: None)
