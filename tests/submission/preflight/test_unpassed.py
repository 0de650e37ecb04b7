"""Variables of the shell that a script reads, and that its ranks would not have."""

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
