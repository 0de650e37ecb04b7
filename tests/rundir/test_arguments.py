"""The arguments of a program that continues: what replaces an option, what is appended, what is left out."""

import pytest

from toolkit.errors import ToolkitError
from toolkit.rundir.arguments import continued


@pytest.mark.parametrize(
    ("arguments", "more", "expected"),
    [
        (["--init_from=scratch", "x"], ["--init_from=resume"], ["--init_from=resume", "x"]),
        (["--init-from", "scratch", "x"], ["--init_from=resume"], ["--init-from", "resume", "x"]),
        (["ckpt_path=null"], ["ckpt_path=last"], ["ckpt_path=last"]),
        (["--lr", "-1"], ["--lr", "-2"], ["--lr", "-2"]),
        (["x"], ["--resume", "y", "z"], ["x", "--resume", "y", "z"]),
        (["--resume", "old", "x"], ["--resume", "new"], ["--resume", "new", "x"]),
        (["--resume", "--fast"], ["--resume", "new"], ["--resume", "new", "--fast"]),
        (["--resume", "x"], ["--resume"], ["--resume", "x"]),  # a flag that is there stays
        (["x"], ["--fast", "--resume"], ["x", "--fast", "--resume"]),
        (["resume"], ["resume"], ["resume", "resume"]),
        (["--from=0"], ["--from={newest}/w"], ["--from=out/a/w"]),
        (["x"], ["--resume", "{newest}", "--fast"], ["x", "--resume", "out/a", "--fast"]),
    ],
)
def test_options_are_replaced_and_others_appended(arguments, more, expected):
    assert continued(arguments, more, newest="out/a", where="restart.argv") == expected


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--resume", "{newest}", "--fast"], ["--resume", "old", "--fast"]),
        (["--resume={newest}"], ["--resume", "old"]),
        (["resume", "{newest}"], ["--resume", "old", "resume"]),
    ],
)
def test_without_a_path_its_argument_is_left_out_with_its_option(more, expected):
    assert continued(["--resume", "old"], more, newest=None, where="restart.argv") == expected


def test_an_option_that_occurs_twice_is_refused():
    with pytest.raises(ToolkitError, match="lr occurs 2 times in the arguments: --lr=1 --lr") as caught:
        continued(["--lr=1", "--lr", "2"], ["--lr=3"], newest=None, where="job.toml:3")
    assert (caught.value.where, caught.value.fix) == ("job.toml:3", "write it once in the arguments")
