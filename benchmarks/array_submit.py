"""Measure the seconds until 1,000 array tasks are in the queue, against submitit's map_array, and count a run's files.

    toolkit devcluster up --option MaxJobCount=50000  # Slurm remembers cancelled tasks for five minutes
    export SLURM_CONF=~/.toolkit/devcluster/etc/slurm.conf
    TOOLKIT_RUNS=~/runs python benchmarks/array_submit.py [--pairs 5]

toolkit ("ours") submits a sweep, and resolves and checks each of its tasks. submitit pickles a function for each task.
Each submission is a separate process, and both arrays are held, so that no task starts. `seconds` is the time of the
whole toolkit command. `ratio` is ours / submitit for the submission only, without the start of Python and the imports,
since submitit is a library without a command. `process_ratio` compares whole processes, `cpu_ratio` their CPU time
including Slurm commands. Pairs are interleaved in alternating order, and medians are compared. A first pair is not
counted: it compiles bytecode, as pip has done for submitit. Finally the benchmark runs a sweep of 40 tasks, and counts
its files. It prints one JSON object; the exit code is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

TARGETS = {"seconds": 5.0, "ratio": 1.2, "files_before": 20, "files_per_task": 4.0}
TOOLKIT = str(Path(sys.executable).with_name("toolkit"))
JOB = '[job]\nname = "array_submit"\nentry = ["true"]\ntime = "5"\nsbatch = [{options}]\n[restart]\ncrashes = 0\n'
OURS = """
import sys, time
from toolkit.submission import chain
from toolkit.submission import create
from toolkit.submission import submitit_executors as executors
from toolkit.submission import script
from toolkit.submission.preflight import checks
from toolkit.submission.sweep import sweep
from toolkit.cli import submit
from toolkit.cli.main import cli
from toolkit.site import load

began = time.monotonic()
cli.main(sys.argv[1:], standalone_mode=False)
print(time.monotonic() - began)
"""
PEER = """
import sys, time
import submitit

def task(number):
    return number

executor = submitit.SlurmExecutor(folder=sys.argv[1])
began = time.monotonic()
executor.update_parameters(time=5, array_parallelism=int(sys.argv[2]), additional_parameters={"hold": True})
jobs = executor.map_array(task, range(int(sys.argv[2])))
print(jobs[0].job_id.partition("_")[0])
print(time.monotonic() - began)
"""


def main() -> int:
    """Measure the pairs of submissions, then run a sweep and count its files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument("--finish", type=int, default=40, help="Number of tasks in the sweep that is run.")
    options = parser.parse_args()
    folder = Path(os.environ.get("TOOLKIT_RUNS", "runs")).absolute() / "array_submit-benchmark"
    folder.mkdir(parents=True)
    try:
        result = measure(folder, options.pairs, options.tasks) | finish(folder, options.finish)
    finally:
        shutil.rmtree(folder)
    missed = [name for name, most in TARGETS.items() if result[name] > most]
    print(json.dumps({"time": datetime.now().isoformat(timespec="seconds"), **result, "missed": missed}, indent=1))
    return 1 if missed else 0


def measure(folder: Path, pairs: int, tasks: int) -> dict[str, object]:
    """Submit with both methods in alternating order."""
    (folder / "held.toml").write_text(JOB.format(options='"--hold"'))
    (folder / "ours.py").write_text(OURS)
    (folder / "peer.py").write_text(PEER)
    files = 0
    told: dict[str, list[Submission]] = {"ours": [], "submitit": []}
    for pair in range(pairs + 1):
        for way in ("ours", "submitit") if pair % 2 == 0 else ("submitit", "ours"):
            run = folder / f"{way}-{pair}"
            told[way].append(submit(command_of(way, folder, run, tasks), tasks))
            if way == "ours":
                files = count_files(next(run.glob("array_submit/*")))
    told = {way: measured[1:] for way, measured in told.items()}
    calls, processes, cpu = (
        {way: statistics.median(one[part] for one in measured) for way, measured in told.items()} for part in range(3)
    )
    return {
        "tasks": tasks, "seconds": round(processes["ours"], 3), "submitit_seconds": round(processes["submitit"], 3),
        "ratio": round(calls["ours"] / calls["submitit"], 3),
        "process_ratio": round(processes["ours"] / processes["submitit"], 3),
        "cpu_seconds": round(cpu["ours"], 3), "cpu_ratio": round(cpu["ours"] / cpu["submitit"], 3),
        "calls": {way: [round(one.call_s, 3) for one in measured] for way, measured in told.items()}, "files_before": files,
    }  # fmt: skip


def command_of(way: str, folder: Path, run: Path, tasks: int) -> list[str]:
    """Return the command that submits an array of `tasks` tasks."""
    if way == "submitit":
        return [sys.executable, str(folder / "peer.py"), str(run), str(tasks)]
    values = ",".join(f"{number}e-6" for number in range(1, tasks + 1))
    return [
        sys.executable, str(folder / "ours.py"), "submit", str(folder / "held.toml"), "--runs", str(run), "--parsable",
        "--sweep", f"train.lr={values}",
    ]  # fmt: skip


class Submission(NamedTuple):
    """The times in seconds of the submission only, of the whole process, and of its CPU use."""

    call_s: float
    process_s: float
    cpu_s: float


def submit(command: list[str], tasks: int) -> Submission:
    """Submit once, measure the times, and cancel the tasks."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before, began = os.times(), time.monotonic()
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    process_s, after = time.monotonic() - began, os.times()
    job, call_s = done.stdout.split()
    drop(job.partition(";")[0], tasks)
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    return Submission(float(call_s), process_s, cpu_s)


def drop(job_id: str, tasks: int) -> None:
    """Check that all tasks are in the queue, and cancel them."""
    rows = subprocess.run(
        ["squeue", "--noheader", "--array", "--format=%i", f"--jobs={job_id}"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    if len(rows) != tasks:
        sys.exit(f"expected {tasks} tasks of job {job_id} in the queue, got {len(rows)}")
    subprocess.run(["scancel", job_id], check=True)


def finish(folder: Path, tasks: int) -> dict[str, object]:
    """Run a sweep, and count the files, including logs, that each task leaves in the run directory."""
    job, runs = folder / "real.toml", folder / "finished"
    job.write_text(JOB.format(options=""))
    values = ",".join(map(str, range(tasks)))
    command = [TOOLKIT, "submit", str(job), "--runs", str(runs), "--sweep", f"args.number={values}", "--wait"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    (run,) = runs.glob("array_submit/*")
    of_run = sum(path.is_file() for path in run.iterdir() if not path.name.startswith("slurm-"))
    return {"finished": tasks, "files_per_task": (count_files(run) - of_run) / tasks}


def count_files(folder: Path) -> int:
    return sum(path.is_file() for path in folder.rglob("*"))


if __name__ == "__main__":
    sys.exit(main())
