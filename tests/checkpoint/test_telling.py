"""A line in the log fails nothing, wherever the log lies."""

import os
import sys
from contextlib import suppress

from toolkit.checkpoint.folder import deletion
from toolkit.checkpoint.telling import tell
from toolkit.train import save_notes


def test_a_line_for_a_full_disk_is_lost_and_nothing_fails(monkeypatch):
    full = os.fdopen(os.open("/dev/full", os.O_WRONLY), "w")
    monkeypatch.setattr(sys, "stderr", full)
    tell("what does not fit")
    with suppress(OSError):  # the line is still in its buffer
        full.close()


def test_a_line_is_there_at_once(tmp_path, monkeypatch):
    with (tmp_path / "log").open("w", buffering=4096) as log:
        monkeypatch.setattr(sys, "stderr", log)
        tell("said")
        assert (tmp_path / "log").read_text() == "toolkit: said\n"


def test_deletions_and_saves_tell_alike():
    assert deletion.tell is save_notes.tell is tell
