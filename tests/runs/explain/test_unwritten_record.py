"""A job's log as evidence: toolkit's own lines, earlier attempts, and a record that the supervisor could not write."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.rundir.layout import RunDirectory
from toolkit.runs.explain.ended import match_log
from toolkit.supervise.symptoms import KILLED

CAUSE = "toolkit: cannot write /runs/a/attempts/000/exit.json: No space left on device"


@pytest.mark.parametrize("form", ["it would say", "its contents"])
def test_the_record_is_cut_off_the_line_with_the_cause(tmp_path: Path, form: str) -> None:
    log = tmp_path / "slurm-7.out"
    log.write_text(f'{CAUSE}; {form}: {{"cause": "crashed"}}\n', encoding="utf-8")
    seen, line, source = match_log(log)
    assert seen is not None and seen.symptom.word == "disk_full"
    assert (line, source) == (CAUSE, log)


def test_advice_and_quotations_of_earlier_attempts_are_no_cause(tmp_path: Path) -> None:
    log = tmp_path / "slurm-7.out"
    lines = [
        "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.",
        "toolkit: attempt 0 ended: crashed (rank 1 on node1): killed by SIGKILL (out of memory?)",
        "toolkit:     | RuntimeError: CUDA out of memory",
        f"toolkit: fix: {KILLED.fix}",
        "toolkit: next: retry (1 of 3 of restart.crashes)",
        "toolkit: attempt 1: started launcher=srun ranks=2 nodes=1",
    ]
    log.write_text("\n".join(lines) + "\n", encoding="utf-8")
    run = RunDirectory(tmp_path)
    seen, line, _ = match_log(log, attempt=run.attempt(1))
    assert seen is None and line == lines[-1]
    seen, _, _ = match_log(log, attempt=run.attempt(0))  # of the attempt itself, Slurm's line counts
    assert seen is not None and seen.line == lines[0]
