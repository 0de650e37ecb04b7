"""A job's log with a record that the supervisor could not write, as earlier and present releases log it."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.runs.explain.ended import _match_log

CAUSE = "toolkit: cannot write /runs/a/attempts/000/exit.json: No space left on device"


@pytest.mark.parametrize("form", ["it would say", "its contents"])
def test_the_record_is_cut_off_the_line_with_the_cause(tmp_path: Path, form: str) -> None:
    log = tmp_path / "slurm-7.out"
    log.write_text(f'{CAUSE}; {form}: {{"cause": "crashed"}}\n', encoding="utf-8")
    seen, line = _match_log(log)
    assert seen is not None and seen.symptom.word == "disk_full"
    assert line == CAUSE
