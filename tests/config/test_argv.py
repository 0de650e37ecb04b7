"""One argument of a program, replaced in its list of arguments."""

import pytest

from toolkit.config.argv import replace_argument
from toolkit.errors import ToolkitError


@pytest.mark.parametrize(
    ("arguments", "name", "expected"),
    [
        (["--lr", "1", "x"], "lr", ["--lr", "9", "x"]),
        (["--lr=1"], "lr", ["--lr=9"]),
        (["-lr", "1"], "lr", ["-lr", "9"]),
        (["optim.lr=1"], "optim.lr", ["optim.lr=9"]),
        (["--batch-size", "1"], "batch_size", ["--batch-size", "9"]),
        (["--batch_size=1"], "batch-size", ["--batch_size=9"]),
        (["--lr", "-1e-3"], "lr", ["--lr", "9"]),
        (["lr", "--lrs=1"], "lr", ["lr", "--lrs=1", "--lr=9"]),
        ([], "lr", ["--lr=9"]),
        (["a", "b"], "2", ["a", "9"]),
    ],
)
def test_a_value_is_replaced_where_it_is_or_added(arguments, name, expected):
    assert replace_argument(arguments, name, "9", where="--sweep") == expected


@pytest.mark.parametrize(
    ("arguments", "name", "message"),
    [
        (["--lr=1", "--lr", "2"], "lr", "lr occurs 2 times in the arguments: --lr=1 --lr"),
        (["--lr"], "lr", "expected a value after --lr, got none"),
        (["--lr", "--verbose"], "lr", "expected a value after --lr, got --verbose"),
        (["a"], "2", "expected a position from 1 to 1, the number of arguments, got 2"),
        (["a"], "0", "expected a position from 1 to 1, the number of arguments, got 0"),
    ],
)
def test_what_is_ambiguous_is_refused(arguments, name, message):
    with pytest.raises(ToolkitError) as caught:
        replace_argument(arguments, name, "9", where="--sweep argv.lr=9")
    assert caught.value.message == message
    assert caught.value.fix
