"""What the system does to whoever writes a shard file: less than it was asked for, and errors in the middle."""

from __future__ import annotations

import errno
import os
from collections import Counter
from pathlib import Path

import pytest
import xxhash

from toolkit.checkpoint.saving import node_file
from toolkit.checkpoint.saving.shard_writer import open_for_writing
from toolkit.errors import OwnFailureError

CONTENT = bytes(range(251)) * 100


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "x.h5"
    path.write_bytes(CONTENT)
    return path


@pytest.mark.parametrize("most", [1, 1000, 10**6])
def test_a_digest_is_of_all_bytes_however_few_the_system_gives_at_a_time(file, monkeypatch, most):
    read, asked = os.pread, []

    def less(descriptor: int, count: int, offset: int) -> bytes:
        asked.append(count)
        return read(descriptor, min(count, most), offset)

    monkeypatch.setattr(os, "pread", less)
    with file.open("rb") as stream:
        found = node_file._digest_of(stream.fileno(), 100, 5100)
    assert found == xxhash.xxh3_128_hexdigest(CONTENT[100:5100])
    assert asked == list(range(5000, 0, -most))  # and never a byte twice, or behind the end


def test_a_file_that_ends_before_what_was_written_is_an_error_and_no_digest(file):
    with file.open("rb") as stream, pytest.raises(OwnFailureError, match="ends at byte 25100, although 900 more"):
        node_file._digest_of(stream.fileno(), 25000, 26000)


def test_a_linked_file_that_cannot_be_made_anew_is_closed_once(file, monkeypatch):
    (file.parent / "kept").hardlink_to(file)
    closed: Counter[int] = Counter()
    opened, close = os.open, os.close

    def no_room(path: Path, flags: int, mode: int) -> int:
        if flags & os.O_EXCL:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return opened(path, flags, mode)

    def counted(descriptor: int) -> None:
        closed[descriptor] += 1
        close(descriptor)

    monkeypatch.setattr(os, "open", no_room)
    monkeypatch.setattr(os, "close", counted)
    with pytest.raises(OSError) as failed, open_for_writing(file):
        raise AssertionError("it was opened")
    assert (failed.value.errno, failed.value.filename) == (errno.ENOSPC, str(file))
    assert list(closed.values()) == [1]  # a number that is closed again may be another thread's file by then
    assert (file.parent / "kept").read_bytes() == CONTENT
