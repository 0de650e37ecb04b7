"""Which line of a log states why a program ended."""

from __future__ import annotations

import pytest

from toolkit.supervise.error_lines import error_line

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
        ("Mean Squared Error: 0.3\n[rank0]: ValueError: bad batch\nvalidation error (epoch 3): 2.5e-3, loss: 1", "[rank0]: ValueError: bad batch"),
        ("note: cannot find tensorboard, continuing\nbash: foo: command not found", "bash: foo: command not found"),
        (f"fatal: not a git repository (or any parent): .git\n{TRACE}ValueError: no data", "ValueError: no data"),
        (f"{TRACE}ImportError: no tensorboard\nstep 1\n{TRACE}ValueError: no data", "ValueError: no data"),
        ("Killed 3 idle workers\nepoch 3: done", ""),
        ("step 1\nstep 2\ndone", ""),
        ("", ""),
    ],
)  # fmt: skip
def test_the_line_that_states_the_cause(log: str, line: str) -> None:
    error = error_line(log.split("\n"))
    assert (error.line if error is not None else "") == line


def of_ranks(label: str, *errors: tuple[int, str]) -> list[str]:
    """The lines of ranks that fail one after the other, each with the label of its rank."""
    frames = ["Traceback (most recent call last):", '  File "/job/ddp2.py", line 15, in main', "    y = batch['labels']",
              '  File "/venv/lib/python3.12/site-packages/torch/nn.py", line 9, in call']  # fmt: skip
    return [label.format(rank) + line for rank, error in errors for line in [*frames, error]]


CLOSED = "RuntimeError: [/pytorch/gloo/pair.cc:534] Connection closed by peer [127.0.1.1]:5. GLHF!"
KILLED = "srun: error: node1: task 1: Killed"


@pytest.mark.parametrize("label", ["[rank{0}]: ", "{0}: ", " {0}: [rank{0}]: ", "[1,{0}]<stderr>: "])
def test_the_first_of_several_ranks_is_read_through_its_label(label: str) -> None:
    lines = of_ranks(label, (2, CLOSED), (1, "KeyError: 'labels'"), (0, "ValueError: empty"), (2, CLOSED))
    assert str(error_line(lines)) == "rank 1: KeyError: 'labels' at ddp2.py:15"
    torchrun = of_ranks("", (0, "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: "))
    assert str(error_line([*lines, *torchrun, "=" * 60])) == "rank 1: KeyError: 'labels' at ddp2.py:15"
    alternating = [line for pair in zip(of_ranks(label, (1, "KeyError: 'labels'")), of_ranks(label, (0, CLOSED)), strict=True) for line in pair]  # fmt: skip
    assert str(error_line(alternating)) == "rank 1: KeyError: 'labels' at ddp2.py:15"


def test_a_killed_task_precedes_what_its_peers_report_of_it() -> None:
    error = error_line([*of_ranks("[rank{0}]: ", (0, CLOSED)), KILLED])
    assert error is not None and (str(error), error.is_cause) == (f"rank 1: {KILLED}", True)
    error = error_line(of_ranks("[rank{0}]: ", (0, CLOSED)))
    assert error is not None and (error.rank, error.is_cause) == (0, False)
