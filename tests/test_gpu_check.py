"""`make gpu`: a row that crashes or hangs costs only itself, and a machine without a GPU has no rows."""

from __future__ import annotations

import configparser
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHECK = ROOT / "benchmarks" / "gpu_check.py"
ROWS = """
import json, os, subprocess, sys, time
name, device, folder = sys.argv[1:]
if name == "crash":
    print("about to crash", file=sys.stderr)
    os.abort()
if name == "hang":
    orphan = subprocess.Popen(["setsid", "sleep", "471149"])
    with open(folder + "/orphan", "w") as file:
        print(orphan.pid, file=file)
    time.sleep(300)
print("text" if name == "garbage" else json.dumps({"row": name, "device": device, "passed": True}))
"""
PROGRAM = """
import ctypes, json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import gpu_check
from gpu_rows import Row
gpu_check.ROOT = gpu_check.BUILD = Path(sys.argv[2])
ctypes.CDLL(None).prctl(gpu_check.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
for name, limit_s in (("crash", 60), ("hang", 2), ("garbage", 60), ("good", 60), ("late", 0)):
    row = Row(name, lambda place: {}, limit_s)
    print(json.dumps(gpu_check.run_row(row, sys.executable, "cpu", limit_s)))
"""


def test_a_row_that_crashes_or_hangs_costs_only_itself(tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "gpu_rows.py").write_text(ROWS)
    command = [sys.executable, "-c", PROGRAM, str(CHECK.parent), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    crash, hang, garbage, good, late = map(json.loads, done.stdout.splitlines())
    assert [one["passed"] for one in (crash, hang, garbage, good, late)] == [False, False, False, True, False]
    assert crash["why"] == "exit code -6: about to crash" and hang["why"].startswith("still running after 2 s")
    assert "'text" in garbage["why"] and "not run" in late["why"]
    orphan = (tmp_path / "rows" / "hang" / "orphan").read_text().strip()
    assert not Path(f"/proc/{orphan}").exists()


def test_the_wheels_include_every_requirement_that_the_machine_lacks() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    required = {re.split(r"[>=<]", line)[0] for line in setup["options"]["install_requires"].split()}
    downloaded = (ROOT / "scripts" / "gpu_wheels.sh").read_text().partition("--dest")[2].split()
    assert required.difference(downloaded) == {"h5py", "mpi4py", "numpy"}


def test_a_machine_without_a_gpu_has_no_rows(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, CHECK], capture_output=True, text=True, env={"PATH": str(tmp_path)}, timeout=60
    )
    assert done.returncode == 0 and done.stdout.endswith("0 rows\n") and len(done.stdout.splitlines()) == 1
