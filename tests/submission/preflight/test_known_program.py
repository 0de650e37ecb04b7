"""The presets that a submission offers for scripts which it recognizes by their imports."""

import pytest

ARGV = 'restart.argv = "{0}" continues it after a walltime'
LINES = 'observe.step_line = "{0}" shows its steps'
NANOGPT = "from model import GPTConfig, GPT\n"


@pytest.fixture
def noted(toolkit):
    def submit(text, *, entry='"train.py"', more=""):
        (toolkit.folder / "train.py").write_text(text)
        job = toolkit.folder / "job.toml"
        job.write_text(f"[job]\nentry = {entry}\n{more}")
        rendered = toolkit("render", job, "--site", "local")
        assert rendered.code == 0, rendered
        return [line.removeprefix("toolkit: note: ") for line in rendered.err.splitlines() if "looks like" in line]

    return submit


@pytest.mark.parametrize("entry", ['"train.py"', '["python", "train.py"]'])
def test_one_line_offers_what_the_preset_has(noted, entry):
    expected = f"train.py looks like nanogpt: {ARGV}, {LINES}".format("nanogpt")
    assert noted(f"import no_such_module\n{NANOGPT}", entry=entry) == [expected]


@pytest.mark.parametrize(
    ("text", "name", "takes_argv"),
    [
        ("import lightning as L", "lightning", False),
        ("import lightning.pytorch.callbacks", "lightning", False),
        ("from lightning.pytorch.cli import LightningCLI", "lightning", True),
        ("from lightning.pytorch import cli", "lightning", True),
        ("def f():\n    from transformers import Trainer", "hf", False),
        ("from transformers import HfArgumentParser, TrainingArguments", "hf", True),
        ("import deepspeed", "deepspeed", False),
        ("from megatron.training import pretrain", "megatron", False),
        ("import lightning\nfrom litgpt.pretrain import setup", "litgpt", True),
    ],
)
def test_scripts_are_recognized_by_their_imports(noted, text, name, takes_argv):
    (line,) = noted(text)
    assert line.startswith(f"train.py looks like {name}: ")
    assert (ARGV.format(name) in line) is takes_argv


@pytest.mark.parametrize(
    "text",
    ["import torch", "from transformers import AutoTokenizer", "from .model import GPTConfig", "import model", "(", ""],
)
def test_nothing_is_offered_for_other_scripts(noted, text):
    assert noted(text) == []


@pytest.mark.parametrize("more", ["[restart]\nargv = ['--x']\n", "[observe]\nstep_line = ['step (?P<step>[0-9]+)']\n"])
def test_nothing_is_offered_to_a_job_that_sets_one_of_the_keys(noted, more):
    assert noted(NANOGPT, more=more) == []


def test_nothing_is_offered_for_a_function(noted):
    assert noted(f"{NANOGPT}def main(world, config): ...\n", entry='"train.py:main"') == []


def test_a_program_that_continues_by_itself_gets_the_pattern_of_its_files(noted):
    text = "from megatron.training import pretrain"
    (line,) = noted(text)
    assert 'restart.progress = "*/iter_[0-9]*" shows its progress' in line
    assert not any("progress" in one for one in noted(text, more="[restart]\nprogress = 'x'\n"))
