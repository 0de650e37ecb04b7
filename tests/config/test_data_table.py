import pytest
from pydantic import ValidationError

from toolkit.config.data import DataTable
from toolkit.errors import ToolkitError


def test_workers_are_auto_or_a_number():
    assert [DataTable(workers=value).workers for value in ("auto", 0, 256)] == ["auto", 0, 256]


@pytest.mark.parametrize("wrong", [{"workers": -1}, {"workers": 257}, {"workers": "2"}, {"workers": True}, {"prefetch": 0}, {"broken": "drop"}, {"broken_limit": 1.5}])  # fmt: skip
def test_values_that_mean_nothing_are_refused(wrong):
    with pytest.raises(ValidationError):
        DataTable(**wrong)


def test_the_numbers_of_workers_that_are_named_are_those_that_are_taken(resolve):
    with pytest.raises(ToolkitError) as refused:
        resolve("", "[data]\nworkers = 257")
    assert str(refused.value).endswith(
        ':5:data.workers: 257 is not a valid value for this key. Fix: use "auto" or a whole number, at least 0, at most 256'
    )
