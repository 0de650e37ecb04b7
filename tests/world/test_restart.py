"""Outside of a run nothing continues. `tests/supervise/test_restart_arguments.py` has the answers inside of one."""

import toolkit


def test_outside_of_a_run_nothing_continues(monkeypatch):
    for name in ("TOOLKIT_RESTART", "TOOLKIT_LAST_PROGRESS"):
        monkeypatch.delenv(name, raising=False)
    assert (toolkit.is_restart(), toolkit.last_progress()) == (False, None)
