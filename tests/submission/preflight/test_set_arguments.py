"""Keys of [args] that a command sets, for functions that declare none: compared with the job file and the source."""

from __future__ import annotations

import pytest

from toolkit.config.request import JobRequest, resolve
from toolkit.submission.preflight.arguments import check_set_arguments

FUNCTION = "def main(world, config):\n    print(config.args['lr'], config.args.get('seed', 0))\n"


@pytest.fixture
def found(tmp_path):
    def check(
        *settings, args="[args]\nlr = 0.1\nopt = { beta = 0.9 }\n", swept=None, environ=None, entry="work.py:main"
    ):
        (tmp_path / "work.py").write_text(FUNCTION)
        path = tmp_path / "work.toml"
        path.write_text(f'[job]\nentry = "{entry}"\n{args}')
        job = resolve(JobRequest(str(path), settings), None, environ=environ or {})
        return [(one.term, one.where, one.what, one.fix) for one in check_set_arguments(job, swept)]

    return check


def test_a_key_that_no_one_reads(found):
    what = "args.lrr is neither in [args] of work.toml nor in work.py"
    assert found("args.lrr=1") == [("warning", "--set args.lrr=1", what, "write args.lr")]
    assert found(environ={"TOOLKIT_ARGS_LRR": "1"}) == [("warning", "TOOLKIT_ARGS_LRR", what, "write args.lr")]
    sweep = "--sweep args.lrr=1"
    assert found(swept={"args.lrr": sweep}) == [
        ("refusal", sweep, f"{what}, so all tasks may compute the same", "write args.lr")
    ]
    assert found("args.lrr=1", args="")[0][3] == "write args.lr"
    assert found("args.lrr=1", entry="work:main")[0][3] == "write args.lr"
    assert found("args.opt.bta=1")[0][3] == "write args.opt.beta"
    assert found("args.momentum=1")[0][3] == "add momentum to [args] of work.toml"


@pytest.mark.parametrize(
    "setting", ["args.lr=1", "args.opt.beta=1", "args.opt={beta=1}", "args.seed=3", "train.steps=3"]
)
def test_a_key_that_is_known(found, setting):
    assert found(setting) == [] and found(swept={setting.partition("=")[0]: "--sweep"}) == []


def test_without_names_to_compare_with(found):
    assert found("args.momentum=1", args="") == []  # the function may read any key
    assert found(args="[args]\nlr = 1\nrate = 2\n") == []  # keys of the file are not compared with the source
