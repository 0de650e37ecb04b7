"""What is said on stderr: one line that no value rules, and that fails nothing, wherever stderr leads."""

import os
import sys

import pytest

from toolkit.supervise import log
from toolkit.terminal.talk import say, say_beside

HOSTILE = "a\x1b[2Jb\nc\x9b31m"


def test_say_raises_on_a_full_disk_and_say_beside_does_not(monkeypatch):
    full = os.fdopen(os.open("/dev/full", os.O_WRONLY), "w")
    monkeypatch.setattr(sys, "stderr", full)
    with pytest.raises(OSError, match="No space left"):
        say("what does not fit")
    assert say_beside("what does not fit") is None
    os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # the buffer still has the lines


def test_a_line_is_there_at_once(tmp_path, monkeypatch):
    with (tmp_path / "log").open("w", buffering=4096) as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        say("said")
        assert (tmp_path / "log").read_text() == "toolkit: said\n"


def test_neither_stderr_nor_the_jobs_log_is_ruled_by_what_a_line_quotes(capsys):
    for write in (say, say_beside, log.say):
        write(f"{HOSTILE} is left out")
    said = capsys.readouterr()
    line = "toolkit: a\\x1b[2Jb\\nc\\x9b31m is left out\n"
    assert (said.err, said.out) == (2 * line, line)


def test_a_hostile_path_reaches_the_terminal_as_letters(toolkit):
    folder = toolkit.folder / HOSTILE
    folder.mkdir()
    job = folder / "job.toml"
    job.write_text('[job]\nentry = ["true"]\n[env]\nvars = { HF_TOKEN = "hf_abcdefghijklmnopqrstuvwxyz0123456789" }\n')
    said = toolkit("config", "show", job, "--set", "job.nodes=none").err + toolkit("submit", job, "--wait").err
    assert "looks like a secret" in said and said.count("a\\x1b[2Jb\\nc\\x9b31m/job.toml") == 1
    assert said.isascii() and "\x1b" not in said
