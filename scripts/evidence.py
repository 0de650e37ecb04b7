"""Run the full counts and the benchmarks, and write what they say, stamped with the commit, under `evidence/`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
PYTEST = [str(BIN / "pytest"), "-q"]
EVIDENCE = ROOT / "evidence"
DEVCLUSTER = "evidence"
BENCHMARKS = {
    "step_time": [sys.executable, "benchmarks/step_time.py"],
    "checkpoint_save_load": [sys.executable, "benchmarks/checkpoint_save_load.py"],
}
ON_CLUSTER = {
    "group_start": ["salloc", "-N", "4", "--ntasks-per-node", "2", sys.executable, "benchmarks/group_start.py"]
}


def commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def json_of(text: str) -> Any:
    """The last JSON object in the text that begins a line, on one line or many; None without one."""
    lines = text.splitlines()
    found = None
    for number, line in enumerate(lines):
        if line.startswith("{"):
            with suppress(json.JSONDecodeError):  # a log line may begin so, too
                found = json.JSONDecoder().raw_decode("\n".join(lines[number:]))[0]
    return found


def run(name: str, argv: list[str], environment: dict[str, str], version: str) -> bool:
    """Run one check; its last JSON object goes into `evidence/NAME.json`, everything else into the log."""
    print(f"== {name}: {' '.join(argv)}", flush=True)
    began = time.monotonic()
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    print(done.stdout + done.stderr, flush=True)
    result = json_of(done.stdout)
    stamp = {
        "check": name, "commit": version, "time": datetime.now(UTC).isoformat(timespec="seconds"), "exit_code": done.returncode,
        "seconds": round(time.monotonic() - began, 1), "result": result if result is not None else done.stdout.splitlines()[-1:],
    }  # fmt: skip
    (EVIDENCE / f"{name}.json").write_text(json.dumps(stamp, indent=1) + "\n")
    return done.returncode == 0


def on_test_clusters(check: Callable[..., bool], environment: dict[str, str]) -> list[bool]:
    """Kills, preemptions and lost nodes, ten times each, and the table of what was seen; then all with accounting."""
    (EVIDENCE / "torture.jsonl").unlink(missing_ok=True)
    scenarios = [*PYTEST, "tests/torture", "-m", "cluster or evidence"]
    ten_times = environment | {"TOOLKIT_TORTURE_REPEATS": "10"}
    accounted = environment | {"TOOLKIT_TEST_ACCOUNTING": "1"}
    return [
        check("torture_tests", scenarios, ten_times),
        check("torture_tests_accounting", [*scenarios, "-k", "not local and not torchrun"], accounted),
        check("torture", [sys.executable, "tests/torture/ledger.py"], environment),
        check("cluster_tests_accounting", [*PYTEST, "tests/cluster"], accounted),
    ]


def main() -> None:
    EVIDENCE.mkdir(exist_ok=True)
    check = partial(run, version=commit())  # once: the checkout may change while this runs
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    good = [check("tests", [*PYTEST, "-m", "evidence", "--ignore=tests/torture"], environment)]
    good.append(check("fuzz", [*PYTEST, "--timeout=1800", "tests/fuzz"], environment | {"TOOLKIT_FUZZ_CASES": "20000"}))
    good += [check(name, argv, environment) for name, argv in BENCHMARKS.items()]
    if os.geteuid() == 0 and shutil.which("slurmctld"):
        cluster = [str(BIN / "toolkit"), "devcluster", "--name", DEVCLUSTER]
        conf = Path.home() / ".toolkit" / DEVCLUSTER / "etc" / "slurm.conf"
        try:
            good.append(check("devcluster_up", [*cluster, "up", "--nodes", "4", "--gpus", "4"], environment))
            good += [check(name, argv, {**environment, "SLURM_CONF": str(conf)}) for name, argv in ON_CLUSTER.items()]
        finally:
            good.append(check("devcluster_down", [*cluster, "down"], environment))
        good += on_test_clusters(check, environment)
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
