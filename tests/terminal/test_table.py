"""Tables: squeue's form, the same from every command."""

from __future__ import annotations

import os
import sys

import pytest

from toolkit.terminal.talk import print_table

ROWS = [("7_1", "a b", "all is well"), (123, "\x1b[2Jx\ny", "")]


def test_columns_are_aligned_and_nothing_moves_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("JOBID", "NAME", "REASON"), ROWS)
    assert capsys.readouterr().out == "JOBID  NAME  REASON\n7_1    a b   all is well\n123    x y\n"


def test_a_terminal_cuts_lines_and_a_pipe_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "18")
    print_table(("JOBID", "NAME", "REASON"), ROWS)
    assert "7_1    a b   all is well\n" in capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_table(("JOBID", "NAME", "REASON"), ROWS)
    assert capsys.readouterr().out == "JOBID  NAME  REAS…\n7_1    a b   all …\n123    x y\n"


@pytest.mark.parametrize(
    ("columns", "header"),
    [(34, "JOBID  NAME     SITE  REASON"), (33, "JOBID  NAME     REASON"), (20, "JOBID  NAME"), (9, "JOBID  N…")],
)
def test_a_narrow_terminal_sheds_the_least_needed_columns_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int, header: str
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    rows = [("7", "a name", "s", "a reason longer than a line")]
    print_table(("JOBID", "NAME   ", "SITE", "REASON"), rows, shed=("SITE", "REASON"))
    said = capsys.readouterr().out.splitlines()
    assert said[0] == header
    assert all(len(line) <= columns for line in said)


def test_forty_columns_show_the_run_and_its_state(toolkit, monkeypatch: pytest.MonkeyPatch) -> None:
    run = toolkit.submit(toolkit.job("true"), "--wait")
    (run.checkpoints / "step-00000200").mkdir()
    monkeypatch.setattr("toolkit.terminal.talk.shutil.get_terminal_size", lambda: os.terminal_size((40, 24)))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for words in (["status"], ["history"]):
        header, line = toolkit.ok(*words).splitlines()
        assert header.split()[-1] == "STATE" and line.split()[-2:] == [run.run_id, "completed"]
    header, line = toolkit.ok("ckpt", "ls", run.run_id).splitlines()
    assert header.split()[0] == "STEP" and line.split()[0] == "200" and "STATUS" in header


def test_the_job_id_stands_first(toolkit) -> None:
    run = toolkit.submit(toolkit.job("true"), "--wait")
    for command in ("status", "history"):
        header, line = toolkit.ok(command).splitlines()
        assert header.split()[:4] == ["JOBID", "RUN", "NAME", "STATE"]
        assert line.split()[1:4] == [run.run_id, "work", "completed"]
    assert toolkit.ok("session", "ls").split()[:3] == ["JOBID", "NAME", "STATE"]
    assert toolkit.ok("site", "list").split()[:3] == ["NAME", "SCHEDULER", "CHECKED"]
