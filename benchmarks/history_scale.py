"""Measure how fast `toolkit history` lists very many runs, first with an empty cache and then with a filled one.

    python -m benchmarks.history_scale --runs FOLDER [--count 300000] [-o FILE.json]

The benchmark creates run directories in FOLDER, at most 100,000 per job, times the command as a user starts it, and
removes the directories. toolkit creates one run; the others consist of hard links to its files, so that they need only
folders on disk. Of every hundred runs, one failed and one was cancelled.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from toolkit.config.request import resolve_job
from toolkit.rundir.files import utc_now, write_json
from toolkit.rundir.layout import RunDirectory, new_run_id
from toolkit.rundir.states import Cause, Next, RunState
from toolkit.site.load import load_site
from toolkit.submission.create import make_run

RUNS_PER_JOB = 100_000
LINKS_PER_FILE = 20_000  # ext4 allows 65,000
QUESTIONS = {
    "newest 50": (),
    "newest 50 failed": ("--state", "failed"),
    "newest 50 preempted (there are none)": ("--state", "preempted"),
    "of one job, failed, newest 50": ("-J", "job1", "--state", "failed"),
    "since the oldest tenth, cancelled, all": ("--since", "2020-01-04", "--state", "cancelled", "-n", "0"),
    "all, as JSON": ("-n", "0", "--json"),
}


def make_runs(runs: Path, count: int) -> None:
    """Create directories of `count` ended runs, with start times one second apart."""
    samples: dict[RunState, RunDirectory] = {}
    began = datetime(2020, 1, 1, tzinfo=UTC)
    for number in range(count):
        if number % LINKS_PER_FILE == 0:
            samples = {state: _sample(runs / ".samples" / str(number), state) for state in _ENDS}
        state = {0: RunState.FAILED, 1: RunState.CANCELLED}.get(number % 100, RunState.COMPLETED)
        path = runs / f"job{number // RUNS_PER_JOB}" / new_run_id(began + timedelta(seconds=number))
        _link(samples[state].path, path)


_ENDS = {RunState.COMPLETED: Cause.COMPLETED, RunState.FAILED: Cause.CRASHED, RunState.CANCELLED: Cause.CANCELLED}


def _sample(folder: Path, state: RunState) -> RunDirectory:
    folder.mkdir(parents=True, exist_ok=True)
    job = folder / "job.toml"
    job.write_text('[job]\nentry = ["true"]\n')
    run = make_run(resolve_job(job, site=load_site("local"), environ={}), folder / state.value)
    write_json(run.submitted(0), {"job_id": "local-1", "start": 0, "time": utc_now()})
    attempt = run.attempt(0)
    attempt.path.mkdir()
    write_json(attempt.start_file, {"start": 0, "job_id": "local-1", "nodes": 1, "ranks": 1, "time": utc_now()})
    end: dict[str, Any] = {
        "cause": _ENDS[state], "next": Next.END, "final": True, "state": state, "exit_code": 0, "reason": "as planned",
        "decision": "", "rank": None, "host": None, "fix": "", "last_lines": [], "step": 2000, "time": utc_now(),
    }  # fmt: skip
    write_json(attempt.exit_file, end)
    return run


def _link(sample: Path, path: Path) -> None:
    (path / "attempts" / "000").mkdir(parents=True, mode=0o700)
    for name in ("record.json", "submitted-000.json", "attempts/000/start.json", "attempts/000/exit.json"):
        os.link(sample / name, path / name)


def ask(runs: Path, *options: str) -> dict[str, Any]:
    """Run `toolkit history` in a process; return wall and CPU seconds, the number of lines, and its messages."""
    before, began = os.times(), time.monotonic()
    argv = [str(Path(sys.executable).with_name("toolkit")), "history", "--runs", str(runs), *options]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    taken_s, after = time.monotonic() - began, os.times()
    spent_s = after.children_user + after.children_system - before.children_user - before.children_system
    return {
        "seconds": taken_s,
        "cpu_seconds": spent_s,
        "lines": done.stdout.count("\n"),
        "said": done.stderr.splitlines(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--count", type=int, default=300_000)
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    given.runs.mkdir(parents=True)
    try:
        make_runs(given.runs, given.count)
        print(f"created {given.count} runs", file=sys.stderr)
        told: dict[str, Any] = {"runs": given.count, "first newest 50": ask(given.runs)}
        told["first listing of all"] = ask(given.runs, "--state", "preempted")
        told |= {name: ask(given.runs, *options) for name, options in QUESTIONS.items()}
    finally:
        shutil.rmtree(given.runs)
    text = json.dumps(told, indent=1)
    if given.output:
        given.output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
