"""Records are found in long files without reading them."""

import json
from pathlib import Path

import pytest

from toolkit.metrics.record_search import first_where, samples_of


@pytest.fixture
def numbers(tmp_path):
    """A file of the even numbers below 200,000; some lines are damaged, and the last one has no end."""
    path = tmp_path / "numbers.jsonl"
    lines = ["damaged" if number % 5000 == 0 else json.dumps(number) for number in range(0, 200_000, 2)]
    path.write_text("\n".join(lines) + "\n200")
    return path


@pytest.mark.parametrize(
    ("wanted", "found"),
    [(-1, 2), (2, 2), (3, 4), (5000, 5002), (123_457, 123_458), (199_998, 199_998), (199_999, None)],
)
def test_the_first_record_that_is_reached(numbers, wanted, found) -> None:
    before = int(Path("/proc/self/io").read_text().split()[1])
    assert first_where(numbers, json.loads, lambda number: number >= wanted) == found
    assert int(Path("/proc/self/io").read_text().split()[1]) - before < numbers.stat().st_size / 3


def test_samples_are_spread_over_the_file(numbers, tmp_path) -> None:
    found = samples_of(numbers, json.loads, 10)
    assert len(found) == 10 and found == sorted(found)
    assert all(abs(number - place * 20_000) < 12_000 for place, number in enumerate(found))
    short = tmp_path / "short"
    short.write_text("1\n2\n3\n")
    assert samples_of(short, json.loads, 10) == [1, 2, 3]
    assert samples_of(tmp_path / "none", json.loads, 3) == []
