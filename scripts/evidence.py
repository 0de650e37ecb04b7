"""Run the full counts and the benchmarks, and write what they say, stamped with the commit, under `evidence/`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
EVIDENCE = ROOT / "evidence"
DEVCLUSTER = "evidence"
BENCHMARKS = {
    "step_time": [sys.executable, "benchmarks/step_time.py"],
    "checkpoint_save_load": [sys.executable, "benchmarks/checkpoint_save_load.py"],
}
ON_CLUSTER = {
    "group_start": [
        "salloc",
        "-N",
        "4",
        "--ntasks-per-node",
        "2",
        sys.executable,
        "benchmarks/group_start.py",
    ],
}


def commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def run(name: str, argv: list[str], environment: dict[str, str]) -> bool:
    """Run one check; its last line that is JSON goes into `evidence/NAME.json`, everything else into the log."""
    print(f"== {name}: {' '.join(argv)}", flush=True)
    began = time.monotonic()
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    print(done.stdout + done.stderr, flush=True)
    result = None
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            result = json.loads(line)
    stamp = {
        "check": name, "commit": commit(), "time": datetime.now(UTC).isoformat(timespec="seconds"), "exit_code": done.returncode,
        "seconds": round(time.monotonic() - began, 1), "result": result if result is not None else done.stdout.splitlines()[-1:],
    }  # fmt: skip
    (EVIDENCE / f"{name}.json").write_text(json.dumps(stamp, indent=1) + "\n")
    return done.returncode == 0


def main() -> None:
    EVIDENCE.mkdir(exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    good = [run("tests", [str(BIN / "pytest"), "-q", "-m", "evidence"], environment)]
    good += [run(name, argv, environment) for name, argv in BENCHMARKS.items()]
    if os.geteuid() == 0 and shutil.which("slurmctld"):
        cluster = [str(BIN / "toolkit"), "devcluster", "--name", DEVCLUSTER]
        good.append(run("devcluster_up", [*cluster, "up", "--nodes", "4", "--gpus", "4"], environment))
        conf = Path.home() / ".toolkit" / DEVCLUSTER / "etc" / "slurm.conf"
        good += [
            run(name, argv, {**environment, "SLURM_CONF": str(conf)}) for name, argv in ON_CLUSTER.items()
        ]
        good.append(run("devcluster_down", [*cluster, "down"], environment))
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
