"""Which line of a log states why a program ended."""

from __future__ import annotations

import pytest

from toolkit.runs.explain.fatal_lines import fatal_line

TRACE = 'Traceback (most recent call last):\n  File "a.py", line 3, in <module>\n    error: x\n'
DURING = "\nDuring handling of the above exception, another exception occurred:\n\n"


@pytest.mark.parametrize(
    ("log", "line"),
    [
        (
            "begin\nsrun: fatal: Could not establish a configuration source\na\nb\nError in rule x:\nAt least one job did not complete",
            "srun: fatal: Could not establish a configuration source",
        ),
        (f"{TRACE}KeyError: 'lr'\nexiting", "KeyError: 'lr'"),
        (f"{TRACE}KeyError: 'lr'\n{DURING}{TRACE}ValueError: no lr\n", "ValueError: no lr"),
        (f"{TRACE}ValueError: worker\nother\n{TRACE}torch.distributed.ChildFailedError: \n", "ValueError: worker"),
        ("0 errors\nwarning: error: deprecated\nmain.c:3: error: expected ;\nmake: *** Error 1", "main.c:3: error: expected ;"),
        ("Error: no such column: weight\nExecution halted", "Error: no such column: weight"),
        ("slurmstepd: error: *** STEP 8.0 ON n1 CANCELLED ***\nsrun: error: n1: task 0: Exited with exit code 1\nbash: foo: command not found", "bash: foo: command not found"),
        ("ERROR: ld.so: object cannot be preloaded: ignored.\nLoadError: libx", "LoadError: libx"),
        ("step 1\nstep 2\ndone", ""),
        ("", ""),
    ],
)  # fmt: skip
def test_the_line_that_states_the_cause(log: str, line: str) -> None:
    assert fatal_line(log.split("\n")) == line
