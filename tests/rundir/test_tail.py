"""The last lines of long files, and how little of them is read."""

import os
from pathlib import Path

import pytest

from toolkit.rundir.tail import CUT, LONGEST_LINE_BYTES, SEARCHED_BYTES, last_lines


def read_bytes() -> int:
    """Bytes that this process has read so far, as the kernel counts them."""
    return int(Path("/proc/self/io").read_text().split()[1])


def last(path, wanted, *, shown=lambda line: line, unfinished=True):
    return last_lines(path, wanted, shown=shown, unfinished=unfinished)


@pytest.fixture
def log(tmp_path):
    """A log that is a hole of 10 GB, and then some lines."""
    path = tmp_path / "long.log"

    def write(text: bytes, size: int = 10 << 30) -> Path:
        with path.open("wb") as stream:
            stream.truncate(size)
            stream.seek(0, os.SEEK_END)
            stream.write(text)
        return path

    return write


def test_of_10_gb_some_blocks_are_read(log):
    path = log(b"\n" + b"".join(b"line %d\n" % number for number in range(20_000)))
    before = read_bytes()
    tail = last(path, 50)
    assert tail.lines == [f"line {number}" for number in range(19_950, 20_000)]
    assert (tail.end, tail.gave_up) == (path.stat().st_size, False)
    assert read_bytes() - before < 1 << 18


def test_of_a_line_of_10_gb_the_end_is_told(log):
    path = log(b" its end\nlast")
    before = read_bytes()
    tail = last(path, 50)
    assert tail.lines[1:] == ["last"] and tail.gave_up
    assert tail.lines[0].startswith(CUT.decode()) and tail.lines[0].endswith(" its end")
    assert read_bytes() - before < 2 * LONGEST_LINE_BYTES
    assert last(path, 1) == (["last"], path.stat().st_size, False)


def test_one_ranks_lines_are_not_looked_for_in_all_of_it(log):
    block = b"[1] " + b"x" * 1000 + b"\n"
    path = log(b"[7] first\n" + block * (SEARCHED_BYTES // len(block) + 1000), size=0)
    before = read_bytes()
    tail = last(path, 5, shown=lambda line: line if line.startswith("[7]") else None)
    assert (tail.lines, tail.gave_up) == ([], True)
    assert read_bytes() - before < SEARCHED_BYTES + (1 << 18)


@pytest.mark.parametrize(
    "text", ["", "a", "a\n", "\n", "a\n\nb", "a\nb\n", "ä\r\nb\n" * 9000, "x" * 70_000 + "\ny\n" * 3]
)
@pytest.mark.parametrize("wanted", [1, 2, 3, 100_000])
def test_the_lines_are_those_of_the_whole_file(tmp_path, text, wanted):
    path = tmp_path / "log"
    path.write_bytes(text.encode())
    lines = text.split("\n") if text else []
    lines = lines[:-1] if text.endswith("\n") else lines
    assert last(path, wanted).lines == lines[-wanted:]


def test_an_unfinished_line_is_left_for_later(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\nthr")
    assert last(path, 2, unfinished=False) == (["one", "two"], 8, False)
    assert last(path, 2).lines == ["two", "thr"]
