"""Durations and byte counts, as they are printed and as users type them."""

import pytest

from toolkit.units import format_bytes, format_bytes_in, format_duration, parse_bytes, round_duration, shorten_duration


def test_durations_in_each_form():
    seconds = (0.35, 8.2, 12, 200, 14_700, 183_600)
    assert [format_duration(one) for one in seconds] == ["0.3 s", "8.2 s", "12 s", "3 min 20 s", "4 h 5 min", "2 d 3 h"]
    assert [round_duration(one) for one in seconds] == ["0 s", "8 s", "12 s", "3 min", "4 h 5 min", "2 d 3 h"]
    assert [shorten_duration(one) for one in seconds] == ["0.35 s", "8.2 s", "12 s", "3.3 min", "4.1 h", "2.1 d"]


def test_byte_counts_in_each_form():
    assert [format_bytes(one) for one in (0, 512, 2**16, 1.5 * 2**20, 2**40)] == [
        "0 B",
        "512 B",
        "64 KiB",
        "1.5 MiB",
        "1024 GiB",
    ]
    assert (format_bytes_in(2**28, "GiB", digits=2), format_bytes_in(1200 * 2**20, "MiB", digits=0)) == (
        "0.25 GiB",
        "1,200 MiB",
    )


@pytest.mark.parametrize(
    ("text", "decimal", "binary"),
    [("8", 8, 8), ("5GB", 5 * 10**9, 5 * 2**30), ("2GiB", 2 * 2**30, 2 * 2**30), ("64k", 64_000, 65_536), ("1.5 MB", 1_500_000, 3 * 2**19)],
)  # fmt: skip
def test_byte_counts_that_users_type(text, decimal, binary):
    assert (parse_bytes(text), parse_bytes(f" {text} ", binary=True)) == (decimal, binary)


@pytest.mark.parametrize("text", ["", "GB", "5XB", "-1", "1e3", "5 0", "1.", "٣MB", "5MMB"])
def test_other_forms_are_no_byte_count(text):
    assert parse_bytes(text) is None
