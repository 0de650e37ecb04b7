"""Times are read as Slurm reads them: a wrong reading is a job killed hours early."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.slurm.times import format_slurm_time, parse_slurm_time


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90 * 60),
        ("90:00", 90 * 60),
        ("0:30", 30),
        ("02:00:00", 7200),
        ("00:90:00", 5400),
        ("1-", 24 * 3600),
        ("1-12", 36 * 3600),
        ("1-12:30", 36 * 3600 + 30 * 60),
        ("1-12:30:15", 36 * 3600 + 30 * 60 + 15),
        ("0", 0),
        ("UNLIMITED", None),
        ("infinite", None),
        ("-1", None),
    ],
)
def test_every_form_of_the_manual(text, seconds):
    assert parse_slurm_time(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "2h", "1:2:3:4", "1-:5", "1-2:", "-5", "1-2-3", " 5", "5 ", "1.5", "٣", "1:-2", "12:"]
)
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError, match="is not a valid Slurm time"):
        parse_slurm_time(text)


@given(st.integers(min_value=0, max_value=10**9) | st.none())
def test_what_is_written_is_read_back(seconds):
    assert parse_slurm_time(format_slurm_time(seconds)) == seconds


@given(st.tuples(*[st.integers(0, 999)] * 4))
def test_the_fields_add_up(fields):
    days, hours, minutes, seconds = fields
    total = days * 86400 + hours * 3600 + minutes * 60 + seconds
    assert parse_slurm_time(f"{days}-{hours}:{minutes}:{seconds}") == total
    assert parse_slurm_time(f"{hours}:{minutes}:{seconds}") == total - days * 86400
    assert parse_slurm_time(f"{minutes}:{seconds}") == minutes * 60 + seconds


def test_a_negative_time_cannot_be_written():
    with pytest.raises(ValueError, match="cannot be negative"):
        format_slurm_time(-1)
