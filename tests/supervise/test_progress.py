"""When a script that ends again and again without progress ends for good, and what counts as progress."""

import os
from dataclasses import replace

import pytest

from toolkit.rundir.attempt_records import AttemptRecord, MatchedFiles
from toolkit.rundir.claims import claim_attempt
from toolkit.rundir.states import Cause, Next, RunState
from toolkit.runs.explain.explain import _matched_files
from toolkit.supervise.failures import AttemptEnd
from toolkit.supervise.progress import (
    exception_of,
    is_import_failure,
    progress_fix,
    state_of_files,
    why_repeated,
    with_files,
)

TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "/job/train.py", line 7, in <module>',
    "    import torchvision",
]


def record(cause, step=None, changed=None, reason="", lines=(), **more):
    return AttemptRecord(
        cause,
        Next.RESTART,
        False,
        RunState.FAILED,
        1,
        reason,
        "",
        step=step,
        changed_files=changed,
        last_lines=lines,
        **more,
    )


def of_script(earlier, end, limit=2):
    return why_repeated(earlier, end, end.cause, tells_steps=False, blind_requeues=limit)


WALLTIME = AttemptEnd(Cause.WALLTIME, "")
REWRITTEN = replace(WALLTIME, changed_files=True, new_files=False, files="a was only rewritten")


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
        ([record(Cause.WALLTIME)] * 3, replace(REWRITTEN, new_files=True), 1, ""),
        ([record(Cause.WALLTIME)] * 3, replace(WALLTIME, changed_files=True), 1, ""),  # of an older release
        # Files that were only rewritten allow one more start.
        ([], WALLTIME, 1, "1 walltime without progress"),
        ([], REWRITTEN, 1, ""),
        ([record(Cause.WALLTIME, changed=True, new_files=True)], REWRITTEN, 1, ""),
        ([record(Cause.WALLTIME, changed=True, new_files=False)], REWRITTEN, 1,
         "2 consecutive walltimes without progress: a was only rewritten"),
        ([record(Cause.WALLTIME, changed=True, new_files=False)], WALLTIME, 1, "2 consecutive walltimes without progress"),
        ([record(Cause.WALLTIME, changed=True, new_files=False)] * 9, REWRITTEN, -1, ""),
        ([record(Cause.WALLTIME, changed=True, new_files=False)], replace(REWRITTEN, step=1), 1, ""),
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
    ("earlier", "end", "ends"),
    [
        ([record(Cause.WALLTIME, changed=True, new_files=False)] * 9, REWRITTEN, False),
        ([record(Cause.WALLTIME, changed=True, new_files=False)] * 9, WALLTIME, True),
    ],
)  # fmt: skip
def test_rewritten_files_are_progress_of_a_program_that_gets_arguments_to_continue(earlier, end, ends):
    def why(continues):
        return why_repeated(earlier, end, end.cause, tells_steps=False, blind_requeues=1, continues=continues)

    assert bool(why(True)) is ends
    assert why(False)


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


def crashed(reason, lines=(), rank=0, code=1, **more):
    return AttemptEnd(Cause.CRASHED, reason, code, rank, last_lines=list(lines), **more)


def is_repeated(before, end, *, of_function):
    earlier = record(
        before.cause, reason=before.reason, lines=before.last_lines, rank=before.rank, symptom=before.symptom,
        step=before.step, changed=before.changed_files,
    )  # fmt: skip
    earlier = replace(earlier, exit_code=before.exit_code)
    return bool(why_repeated([earlier], end, end.cause, tells_steps=of_function, blind_requeues=1))


SAVE = "checkpoint of step {0} was not saved: rank 0: No space left on device: '/runs/a/step-{0:08}.part-{1}-x9{1}q'; step 20 is good"


@pytest.mark.parametrize(
    ("before", "end", "is_same"),
    [
        (crashed(SAVE.format(40, 0), rank=1, symptom="disk_full"), crashed(SAVE.format(40, 1), rank=0, symptom="disk_full"), True),
        (crashed("ValueError: batch 7 at a.py:3"), crashed("ValueError: batch 9 at a.py:3", rank=5, symptom="exception"), True),
        (crashed("ValueError: batch 7 at a.py:3"), crashed("ValueError: batch 7 at a.py:4", symptom="exception"), False),
        (crashed("ValueError: x at a.py:3"), crashed("KeyError: x at a.py:3", symptom="exception"), False),
        (crashed("exit code 3", code=3), crashed("exit code 5", code=5, symptom="exit_code"), False),
        (crashed("killed by SIGSEGV", code=139), crashed("killed by SIGSEGV", code=139, symptom="native_crash"), True),
        (crashed("killed by SIGSEGV", code=139), crashed("killed by SIGSEGV", code=139, rank=1, symptom="native_crash"), False),
        *((crashed(reason, symptom=symptom), crashed(reason, symptom=symptom), False) for reason, symptom in (
            ("killed by SIGKILL (out of memory?)", "killed"), ("can't allocate memory", "out_of_memory"),
            ("the connection to another rank was lost", "peer_lost"), ("killed by SIGBUS", "native_crash"),
            ("RuntimeError: CUDA error: uncorrectable ECC error at a.py:3", "exception"),
            ("DistBackendError: ncclRemoteError: remote process exited at a.py:3", "exception"),
            ("OSError: [Errno 5] Input/output error at a.py:3", "exception"),
        )),
    ],
)  # fmt: skip
def test_a_crash_of_a_function_is_the_same_unless_a_node_or_device_explains_it(before, end, is_same):
    assert is_repeated(before, end, of_function=True) is is_same


R_LINES = ["task 2 mean 0.{0}", "Error: no such column: w{0}", "Execution halted"]


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        ({}, True),
        ({"lines": ["Error: no such row", "Execution halted"]}, False),
        ({"code": 2}, False),
        ({"step": 3}, False),  # after progress only the budget counts
        ({"changed_files": True}, False),
        ({"lines": [*(f"iteration {n}" for n in range(5)), *R_LINES]}, False),
        ({"lines": ["NCCL WARN NET/IB : Got completion with error 12", *R_LINES]}, False),
    ],
)
def test_a_program_that_exits_after_the_same_lines_ends_at_the_second_time(change, is_same):
    before = crashed("exit code 1", [line.format(17) for line in R_LINES])
    end = crashed("exit code 1", **{"lines": [line.format(4) for line in R_LINES], **change})
    assert is_repeated(before, end, of_function=False) is is_same


@pytest.mark.parametrize(
    ("line", "is_same"),
    [("epoch {0}/9 loss 0.{0}", False), ("validation error: 0.{0}", False), ("error: no file of epoch {0}", True), ("out of ideas", True)],
)  # fmt: skip
def test_steps_of_a_program_that_exits_are_not_the_same_failure(line, is_same):
    before, end = (crashed("exit code 1", [f"epoch {n}/9", line.format(n)]) for n in (1, 7))
    assert is_repeated(before, end, of_function=False) is is_same


def test_a_silent_exit_is_not_the_same_and_the_number_of_alike_lines_does_not_matter():
    assert not is_repeated(crashed("exit code 1"), crashed("exit code 1"), of_function=False)
    progress = [[f"iteration {n}" for n in range(count)] for count in (2, 5)]
    one, other = ([*lines, "Error: x"] for lines in progress)
    assert is_repeated(crashed("exit code 1", one), crashed("exit code 1", other), of_function=False)


def test_names_that_no_earlier_attempt_had_are_new(run_directory, tmp_path, monkeypatch):
    """Also if the program removes its files at each start, and as `explain` states it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.pt").write_text("before the run")
    seen = []
    for names in (["a.pt"], ["a.pt", "old.pt"], ["a.pt", "b.pt"], []):
        attempt = claim_attempt(run_directory)
        for path in tmp_path.glob("[ab].pt"):
            path.unlink()
        before = state_of_files("*.pt", run_directory.path)
        for name in names:
            (tmp_path / name).write_text(f"{attempt.number}")
        end = with_files(WALLTIME, attempt, "*.pt", before)
        seen.append((end.new_files, end.changed_files, end.files.removeprefix("restart.progress = '*.pt' matched ")))
    assert seen == [
        (True, True, "1 new (a.pt), 1 unchanged (old.pt)"),
        (False, True, "2 only rewritten (a.pt, old.pt)"),
        (True, True, "1 new (b.pt), 1 only rewritten (a.pt), 1 unchanged (old.pt)"),
        (False, False, "1 unchanged (old.pt)"),
    ]
    assert MatchedFiles.read(run_directory.attempt(2)).new == ["b.pt"]
    end = with_files(WALLTIME, attempt, "no/*.pt", {})
    assert end.files == f"restart.progress = 'no/*.pt' matched no file in {tmp_path}"
    assert "correct restart.progress" in progress_fix([], end)


def test_a_record_does_not_repeat_the_names_of_earlier_ones(run_directory, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in range(40):
        (tmp_path / f"{name}.pt").write_text("before the run")
    for _ in range(3):
        attempt, before = claim_attempt(run_directory), state_of_files("*.pt", run_directory.path)
        for name in (*range(8), f"new-{attempt.number}"):
            (tmp_path / f"{name}.pt").write_text(f"{attempt.number}")
        end = with_files(WALLTIME, attempt, "*.pt", before)
    assert end.files.endswith(
        "1 new (new-2.pt), 8 only rewritten (0.pt, 1.pt, 2.pt, ...), 34 unchanged (10.pt, 11.pt, 12.pt, ...)"
    )
    records = [MatchedFiles.read(run_directory.attempt(number)) for number in range(3)]
    assert [(one.new, len(one.before)) for one in records] == [(["new-0.pt"], 40), (["new-1.pt"], 0), (["new-2.pt"], 0)]
    assert max(len(names) for one in records for names in (one.rewritten, one.unchanged)) == 3


@pytest.mark.parametrize("text", ['{"pattern": 3}', "[]", '{"pattern": "*', ""])
def test_a_damaged_record_of_matched_files_stops_neither_the_run_nor_explain(
    run_directory, tmp_path, monkeypatch, capsys, text
):
    monkeypatch.chdir(tmp_path)
    claim_attempt(run_directory).matched_files.write_text(text)
    damaged, attempt = run_directory.attempt(0).matched_files, claim_attempt(run_directory)
    (tmp_path / "a.pt").touch()
    assert with_files(WALLTIME, attempt, "*.pt", {}).new_files
    assert capsys.readouterr().out.count(f"cannot read {damaged}: ") == 1
    attempt.matched_files.unlink()
    (quoted,) = _matched_files(run_directory)
    assert "attempts/000/matched_files.json" in quoted.source and quoted.line


def test_the_fix_names_what_shows_progress():
    for end in (WALLTIME, REWRITTEN):
        fix = progress_fix([], end)
        assert all(
            part in fix
            for part in ("`toolkit: step N`", "toolkit.step(N)", "step in their names", "blind_requeues = -1")
        )
    assert "instead of starting over" in progress_fix([], REWRITTEN)


def test_a_script_that_reports_its_steps_but_starts_over_is_not_advised_to_report_them():
    fix = progress_fix([record(Cause.WALLTIME, step=60), record(Cause.WALLTIME, step=9)], replace(WALLTIME, step=57))
    assert fix.startswith(
        "this attempt came to step 57, an earlier one had already reached step 60: the program starts"
    )
    assert "print a line" not in fix and "blind_requeues = -1" in fix


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
