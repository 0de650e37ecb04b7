import pytest
from pydantic import ValidationError

from toolkit.config.data import DataTable


def test_workers_are_auto_or_a_number():
    assert [DataTable(workers=value).workers for value in ("auto", 0, 256)] == ["auto", 0, 256]


@pytest.mark.parametrize("wrong", [{"workers": -1}, {"workers": 257}, {"workers": "2"}, {"workers": True}, {"prefetch": 0}, {"broken": "drop"}, {"broken_limit": 1.5}])  # fmt: skip
def test_values_that_mean_nothing_are_refused(wrong):
    with pytest.raises(ValidationError):
        DataTable(**wrong)
