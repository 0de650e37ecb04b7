"""Variables and arguments that a script would not receive."""

import pytest

READS = """
import os
from os import environ, getenv
a = os.environ["HF_HOME"]
b = os.environ.get("WANDB_MODE", "x")
c = getenv("SEED")
d = environ["PATH"], os.environ["RANK"], os.environ["UNSET_HERE"]
os.environ["WRITTEN"] = "1"
"""


@pytest.fixture
def warned(toolkit, monkeypatch):
    for name in ("HF_HOME", "WANDB_MODE", "SEED", "RANK", "WRITTEN"):
        monkeypatch.setenv(name, "1")
    (toolkit.folder / "train.py").write_text(READS)

    def submit(more="", entry='"train.py"'):
        job = toolkit.folder / "job.toml"
        job.write_text(f"[job]\nentry = {entry}\n{more}")
        said = toolkit("render", job, "--site", "local")
        assert said.code == 0, said
        return [line for line in said.err.splitlines() if "the script reads" in line]

    return submit


@pytest.mark.parametrize("entry", ['"train.py"', '["python", "-u", "train.py"]'])
def test_one_line_names_them_all_with_the_fix(warned, entry):
    (line,) = warned(entry=entry)
    assert "reads HF_HOME, WANDB_MODE, SEED, set in this shell but not for the ranks" in line
    assert 'pass = ["HF_HOME", "WANDB_MODE", "SEED"] into [env]' in line


def test_names_and_patterns_that_are_passed_are_not_named(warned):
    (line,) = warned('[env]\npass = ["HF_*", "SEED"]\n')
    assert "reads WANDB_MODE, set" in line
    assert warned('[env]\npass = ["HF_*", "WANDB_*"]\nvars = { SEED = "1" }\n') == []


def test_a_program_and_a_script_of_another_python_are_not_read(warned, toolkit):
    assert warned(entry='["true"]') == []
    (toolkit.folder / "train.py").write_text("print 'python 2'; import os; os.environ['HF_HOME']")
    assert warned() == []


@pytest.mark.parametrize("entry", ['"train.py"', '["true"]'])
def test_args_of_a_script_have_no_effect(toolkit, entry):
    (toolkit.folder / "train.py").touch()
    job = toolkit.folder / "job.toml"
    job.write_text(f"[job]\nentry = {entry}\n[args]\nlr = 0.1\n")
    rendered = toolkit("render", job, "--site", "local")
    assert "does not receive lr of [args]. Fix: pass arguments after `--`" in rendered.err
    job.write_text(f"[job]\nentry = {entry}\nargv = ['--lr', '0.1']\n")
    assert "[args]" not in toolkit("render", job, "--site", "local").err


def test_a_table_argv_names_the_forms_of_arguments(toolkit):
    job = toolkit.job("true")
    refused = toolkit("render", job, "--site", "local", "--set", "argv.lr=3")
    assert "unknown key 'argv.lr'. Fix: pass arguments of a script after `--`" in refused.err
