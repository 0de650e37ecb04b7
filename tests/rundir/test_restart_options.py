"""The arguments of a program that continues: what replaces an option, what is appended, what is left out, what is refused."""

import pytest

from toolkit.errors import ToolkitError
from toolkit.rundir.arguments import continued, expanded


@pytest.mark.parametrize(
    ("arguments", "more", "expected"),
    [
        (["--init_from=scratch", "x"], ["--init_from=resume"], ["--init_from=resume", "x"]),
        (["--init-from", "scratch"], ["--init_from", "resume"], ["--init-from", "resume"]),
        (["x", "--init-from=scratch", "y"], ["--init_from", "resume"], ["x", "--init-from=resume", "y"]),
        (["ckpt_path=null"], ["ckpt_path=last"], ["ckpt_path=last"]),
        (["--lr", "-1"], ["--lr", "-2"], ["--lr", "-2"]),
        (["x"], ["--resume", "y", "z"], ["x", "--resume", "y", "z"]),
        (["x", "--resume", "old"], ["--resume", "new"], ["x", "--resume", "new"]),
        (["--resume", "--fast"], ["--resume", "new"], ["--resume", "new", "--fast"]),
        (["conf.yaml", "--resume"], ["--resume=true"], ["conf.yaml", "--resume", "true"]),
        (["--resume", "x", "y"], ["--resume"], ["--resume", "x", "y"]),  # a flag that is there stays
        (["x"], ["--fast", "--resume"], ["x", "--fast", "--resume"]),
        (["resume"], ["resume"], ["resume", "resume"]),
        (["x"], ["-o", "a=1", "-o", "b=2"], ["x", "-o", "a=1", "-o", "b=2"]),
        (["x"], ["a=1", "a=2"], ["x", "a=1", "a=2"]),
    ],
)
def test_options_are_replaced_and_others_appended(arguments, more, expected):
    assert continued(arguments, more, where="restart.argv") == expected


@pytest.mark.parametrize(
    ("more", "newest", "expected"),
    [
        (["--from={newest}/w"], "out/a", ["--from=out/a/w"]),
        (["--resume", "{newest}", "--fast"], "out/a", ["--resume", "out/a", "--fast"]),
        (["-o", "{newest}", "-o", "b"], "out/a", ["-o", "out/a", "-o", "b"]),
        (["--resume", "{newest}"], "out/{newest}", ["--resume", "out/{newest}"]),
        (["--resume", "{newest}", "--fast"], None, ["--fast"]),
        (["--resume={newest}"], None, []),
        (["resume", "{newest}"], None, ["resume"]),
    ],
)
def test_without_a_path_its_argument_is_left_out_with_its_option(more, newest, expected):
    assert expanded(more, newest) == expected


@pytest.mark.parametrize(
    ("arguments", "more", "message", "fix"),
    [
        (["--lr=1", "--lr", "2"], ["--lr=3"],
         "lr occurs 2 times in the arguments: --lr=1 --lr", "write it once in the arguments"),
        (["-o", "a=1"], ["-o", "b=2", "-o", "c=3"],
         "o occurs 2 times in the arguments: -o -o", "write it once in restart.argv"),
        (["--resume", "conf.yaml"], ["--resume=true"],
         "--resume conf.yaml in the arguments: conf.yaml may be a value of --resume or not",
         "write --resume=conf.yaml, or write what is not its value before --resume"),
        (["--files", "a", "b", "--x"], ["--files", "c"],
         "--files a b in the arguments: b may be a value of --files or not",
         "write --files=a, or write what is not its value before --files"),
    ],
)  # fmt: skip
def test_what_may_be_replaced_in_two_ways_is_refused(arguments, more, message, fix):
    with pytest.raises(ToolkitError) as caught:
        continued(arguments, more, where="job.toml:3")
    assert (caught.value.message, caught.value.where, caught.value.fix) == (message, "job.toml:3", fix)
