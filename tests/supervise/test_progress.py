"""When a script that ends again and again without progress ends for good, and what counts as progress."""

import os
from dataclasses import replace

import pytest

from toolkit.rundir.attempt_records import AttemptRecord
from toolkit.rundir.states import Cause, Next, RunState
from toolkit.supervise.failures import AttemptEnd
from toolkit.supervise.progress import exception_of, is_import_failure, state_of_files, why_repeated

TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "/job/train.py", line 7, in <module>',
    "    import torchvision",
]


def record(cause, step=None, changed=None, reason="", lines=()):
    return AttemptRecord(
        cause, Next.RESTART, False, RunState.FAILED, 1, reason, "", step=step, changed_files=changed, last_lines=lines
    )


def of_script(earlier, end, limit=2):
    return why_repeated(earlier, end, end.cause, tells_steps=False, blind_requeues=limit)


WALLTIME = AttemptEnd(Cause.WALLTIME, "")


@pytest.mark.parametrize(
    ("earlier", "end", "limit", "why"),
    [
        ([], WALLTIME, 2, ""),
        ([record(Cause.WALLTIME)], WALLTIME, 2, "2 consecutive walltimes without progress"),
        ([record(Cause.WALLTIME)], WALLTIME, 3, ""),
        ([record(Cause.WALLTIME)] * 9, WALLTIME, -1, ""),
        ([record(Cause.WALLTIME)], replace(WALLTIME, step=5), 2, ""),
        ([record(Cause.WALLTIME, step=5)], replace(WALLTIME, step=5), 2, ""),  # the first of two
        ([record(Cause.WALLTIME, step=5)] * 2, replace(WALLTIME, step=5), 2, "2 consecutive walltimes without progress"),
        ([record(Cause.WALLTIME)], replace(WALLTIME, changed_files=True), 2, ""),
        ([record(Cause.WALLTIME, changed=True)], replace(WALLTIME, changed_files=False), 2, ""),
        # Preemptions and lost nodes between walltimes count for nothing.
        ([record(Cause.WALLTIME), record(Cause.PREEMPTED), record(Cause.NODE_LOST)], WALLTIME, 2,
         "2 consecutive walltimes without progress"),
        ([record(Cause.PREEMPTED)] * 5, WALLTIME, 2, ""),
        ([record(Cause.WALLTIME), record(Cause.CRASHED)], WALLTIME, 2, ""),
    ],
)  # fmt: skip
def test_walltimes_without_progress_end_a_script(earlier, end, limit, why):
    assert of_script(earlier, end, limit) == why


@pytest.mark.parametrize(
    ("reason", "lines", "expected"),
    [
        ("ModuleNotFoundError: No module named 'x' at train.py:3", [], ("ModuleNotFoundError", "train.py:3")),
        ("torch.OutOfMemoryError: CUDA out of memory at a.py:1", [], ("OutOfMemoryError", "a.py:1")),
        ("StopIteration at a.py:1", [], ("StopIteration", "a.py:1")),
        ("exit code 1", [*TRACEBACK, "RuntimeError: no operator nms"], ("RuntimeError", "/job/train.py:7")),
        ("exit code 1", ["Loss: 3", "Done: yes"], None),
        ("killed by SIGKILL (out of memory?)", [], None),
        # A script that went on without an optional module, and then printed something.
        ("exit code 1", [*TRACEBACK, "ModuleNotFoundError: No module named 'x'", "step 1"], None),
        ("exit code 1", ["UserError: not of Python"], None),
    ],
)
def test_the_exception_of_an_end_and_its_line(reason, lines, expected):
    assert exception_of(AttemptEnd(Cause.CRASHED, reason, 1, last_lines=lines)) == expected


@pytest.mark.parametrize(("reason", "code"), [("killed by SIGKILL (out of memory?)", 137), ("exit code 3", 3)])
def test_an_exception_that_a_script_has_handled_is_not_its_end(reason, code):
    lines = [*TRACEBACK, "ImportError: no module of an optional package"]
    end = AttemptEnd(Cause.CRASHED, reason, code, last_lines=lines)
    assert exception_of(end) is None
    assert not is_import_failure([], end)


def test_a_script_that_raises_the_same_exception_at_the_same_line_ends_at_the_second_time():
    end = AttemptEnd(Cause.CRASHED, "exit code 1", 1, last_lines=[*TRACEBACK, "RuntimeError: no operator nms"])
    same = record(Cause.CRASHED, reason="exit code 1", lines=[*TRACEBACK, "RuntimeError: other words"])
    assert of_script([same], end) == "the same failure occurred twice without a new step"
    other = record(Cause.CRASHED, reason="exit code 1", lines=[TRACEBACK[1].replace("7", "8"), "RuntimeError: x"])
    assert of_script([other], end) == ""
    assert of_script([replace(same, step=4)], replace(end, step=4)) == ""  # after progress only the budget counts


@pytest.mark.parametrize("name", ["ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError"])
def test_an_import_that_fails_before_any_progress_is_the_environment(name):
    end = AttemptEnd(Cause.CRASHED, f"{name}: x at train.py:3")
    assert is_import_failure([], end)
    assert not is_import_failure([record(Cause.PREEMPTED, step=3)], end)
    assert not is_import_failure([], replace(end, changed_files=True))
    assert not is_import_failure([], AttemptEnd(Cause.CRASHED, "ValueError: x at train.py:3"))


def test_new_changed_and_removed_files_are_seen(tmp_path):
    pattern, run = f"{tmp_path}/out/**/*.pt", tmp_path / "out" / "run"
    assert state_of_files(pattern, run) == state_of_files("", run) == {}
    file = tmp_path / "out" / "deep" / "a.pt"
    file.parent.mkdir(parents=True)
    file.write_text("1")
    first = state_of_files(pattern, run)
    assert list(first) == [str(file)]
    os.utime(file, ns=(1, 1))
    assert state_of_files(pattern, run) != first
    (tmp_path / "out" / "b.txt").write_text("no match")
    (run / "attempts").mkdir(parents=True)
    (run / "attempts" / "own.pt").write_text("a file of toolkit")
    assert list(state_of_files(pattern, run)) == [str(file)]
