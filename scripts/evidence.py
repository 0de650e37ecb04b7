"""Run the full-size tests and the benchmarks, and write their results with the commit below `evidence/`.

`python scripts/evidence.py` runs all checks; `python scripts/evidence.py fuzz torture_tests` runs only these two.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from toolkit.devcluster.releases import RELEASES

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
PYTEST = [str(BIN / "pytest"), "-q"]
ON_CLUSTERS = [*PYTEST, "-n", "2", "--dist", "loadfile"]  # each process has its own clusters
TORTURE = [*ON_CLUSTERS, "tests/torture", "-m", "cluster or evidence"]
CHECKPOINT_TORTURE = [*PYTEST, "tests/checkpoint/torture"]
REAL_FAULTS = [sys.executable, "benchmarks/real_faults.py"]
GUESTS = ["--guests", str(ROOT / ".venv-guests/bin/python")] if (ROOT / ".venv-guests/pins.txt").exists() else []
ACCOUNTING = {"TOOLKIT_TEST_ACCOUNTING": "1"}
EVIDENCE = ROOT / "evidence"
DEVCLUSTER = [str(BIN / "toolkit"), "devcluster", "--name", "evidence"]


@dataclass(frozen=True)
class Check:
    """A command to run. `needs_slurm`: it needs Slurm on this host; `on_devcluster`: it runs on a dev cluster."""

    name: str
    argv: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    needs_slurm: bool = False
    on_devcluster: bool = False


# Files to which the tests of a check append lines; they are removed first.
LEDGERS = {"torture_tests": "torture.jsonl", "checkpoint_torture_tests": "checkpoint_torture.jsonl"}

CHECKS = (
    Check("tests", [*PYTEST, "-m", "evidence", "--ignore=tests/torture"]),
    Check("fuzz", [*PYTEST, "--timeout=1800", "tests/fuzz"], {"TOOLKIT_FUZZ_CASES": "20000"}),
    Check("step_time", [sys.executable, "benchmarks/step_time.py"]),
    Check("data_loading", [sys.executable, "benchmarks/data_loading.py"]),
    # Kills, damage, power cuts, full disks and second writers; then a table of the results.
    Check("checkpoint_torture_tests", CHECKPOINT_TORTURE, {"TOOLKIT_CHECKPOINT_TORTURE": "full"}),
    Check("checkpoint_torture", [sys.executable, "tests/checkpoint/torture/torture_tally.py"]),
    Check("checkpoint_speed", [sys.executable, "benchmarks/checkpoint_speed.py", "--plan", "1024"]),
    Check("checkpoint_reshard", [sys.executable, "benchmarks/checkpoint_reshard.py"]),
    Check("checkpoint_stall", [sys.executable, "benchmarks/checkpoint_stall.py"]),
    Check(
        "group_start",
        ["salloc", "-N", "4", "--ntasks-per-node", "2", sys.executable, "benchmarks/group_start.py"],
        needs_slurm=True,
        on_devcluster=True,
    ),
    # Each fault in a run on two nodes: the verdict, its rank and cause, and the time to it; then ten runs without a fault.
    Check("real_faults", REAL_FAULTS, needs_slurm=True, on_devcluster=True),
    Check("clean_runs", [*REAL_FAULTS, "--only", *["nothing"] * 10], needs_slurm=True, on_devcluster=True),
    # Kinds of scripts: what they save at a stop, a walltime and a requeue, compared to `scancel --signal`.
    Check("stopped_scripts", [sys.executable, "benchmarks/stopped_scripts.py", *GUESTS], needs_slurm=True),
    # Kills, preemptions and lost nodes, ten times each, then once with accounting; then a table of the results.
    Check("torture_tests", TORTURE, {"TOOLKIT_TORTURE_REPEATS": "10"}, needs_slurm=True),
    Check("torture_tests_accounting", [*TORTURE, "-k", "not local and not torchrun"], ACCOUNTING, needs_slurm=True),
    Check("torture", [sys.executable, "tests/torture/ledger.py"]),
    Check("cluster_tests_accounting", [*ON_CLUSTERS, "tests/cluster"], ACCOUNTING, needs_slurm=True),
    *(
        Check(
            f"cluster_tests_{version}",
            [*ON_CLUSTERS, "tests/cluster"],
            {"TOOLKIT_TEST_SLURM": version},
            needs_slurm=True,
        )
        for version in RELEASES
    ),
)


def commit() -> str:
    argv = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def json_of(text: str) -> Any:
    """Return the last JSON object in the output that starts at the beginning of a line; None if there is none."""
    lines = text.splitlines()
    value = None
    for number, line in enumerate(lines):
        if line.startswith("{"):
            with suppress(json.JSONDecodeError):  # a log line may start in the same way
                value = json.JSONDecoder().raw_decode("\n".join(lines[number:]))[0]
    return value


def run(check: Check, environment: Mapping[str, str], version: str) -> bool:
    """Run one check; write the last JSON object that it prints to `evidence/NAME.json`, and print all its output."""
    print(f"== {check.name}: {' '.join(check.argv)}", flush=True)
    began = time.monotonic()
    done = subprocess.run(
        check.argv, cwd=ROOT, env={**environment, **check.environment}, capture_output=True, text=True, check=False
    )
    print(done.stdout + done.stderr, flush=True)
    result = json_of(done.stdout)
    stamp = {
        "check": check.name, "commit": version, "time": datetime.now(UTC).isoformat(timespec="seconds"), "exit_code": done.returncode,
        "seconds": round(time.monotonic() - began, 1), "result": result if result is not None else done.stdout.splitlines()[-1:],
    }  # fmt: skip
    (EVIDENCE / f"{check.name}.json").write_text(json.dumps(stamp, indent=1) + "\n")
    return done.returncode == 0


@contextmanager
def devcluster(environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Start a dev cluster, and yield the environment for its users."""
    subprocess.run([*DEVCLUSTER, "up", "--nodes", "4", "--gpus", "4"], env=environment, check=True)
    try:
        yield {**environment, "SLURM_CONF": str(Path.home() / ".toolkit" / DEVCLUSTER[-1] / "etc" / "slurm.conf")}
    finally:
        subprocess.run([*DEVCLUSTER, "down"], env=environment, check=True)


def main(names: list[str]) -> int:
    if unknown := set(names) - {check.name for check in CHECKS}:
        print(
            f"unknown check {', '.join(sorted(unknown))}; expected one of: {', '.join(check.name for check in CHECKS)}"
        )
        return 2
    EVIDENCE.mkdir(exist_ok=True)
    version = commit()  # read once, since the checkout may change meanwhile
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    has_slurm = os.geteuid() == 0 and shutil.which("slurmctld") is not None
    good = True
    for check in CHECKS:
        if names and check.name not in names:
            continue
        if check.needs_slurm and not has_slurm:
            print(f"== {check.name}: skipped, because it needs root and Slurm (`make packages`)", flush=True)
            good = False
            continue
        if check.name in LEDGERS:
            (EVIDENCE / LEDGERS[check.name]).unlink(missing_ok=True)
        if check.on_devcluster:
            with devcluster(environment) as on_it:
                good &= run(check, on_it, version)
        else:
            good &= run(check, environment, version)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
