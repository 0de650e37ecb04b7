"""Program that checks one node before ranks start on it, and prints the failed checks as one line of JSON.

It imports only the standard library and nothing from toolkit, so that it starts in milliseconds. Each check runs in a
thread: on a stale network file system a call may never return, which counts as a failed check.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHECK_S = 5.0  # timeout for all checks, which run concurrently
SHM_FREE_BYTES = 32 * 2**20  # what a small NCCL or gloo group needs
SCRATCH_FREE_BYTES = 64 * 2**20  # checked only on the site file's local_scratch; /tmp may be small on purpose


def check_run_directory(folder: Path, claim: Path, name: str) -> str:
    """Check that this node can read the supervisor's claim file and write to the run directory."""
    claim.read_bytes()
    return _writable(folder, name)


def check_space(folder: Path, free_bytes: int, name: str) -> str:
    """Check that the folder is writable and has enough free space."""
    free = shutil.disk_usage(folder).free
    if free < free_bytes:
        return f"{folder} has {free >> 20} MiB free, expected at least {free_bytes >> 20} MiB"
    return _writable(folder, name)


def check_gpus(expected: int) -> str:
    """Check that the driver reports as many GPUs as the job has on this node. Without a driver, the check passes."""
    if Path("/proc/driver/nvidia/version").exists() and shutil.which("nvidia-smi"):
        argv = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", check=False, timeout=CHECK_S)
        count = sum(1 for line in done.stdout.splitlines() if line.startswith(("GPU-", "MIG-")))
    elif Path("/sys/class/kfd/kfd/topology/nodes").is_dir():
        nodes = Path("/sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id")
        count = sum(1 for path in nodes if path.read_text(encoding="utf-8").strip() != "0")
    else:
        return ""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", os.environ.get("ROCR_VISIBLE_DEVICES"))
    if shown is not None:  # the GPUs of this step; Slurm hides the others
        expected = min(expected, len([name for name in shown.split(",") if name.strip()]))
    return "" if count >= expected else f"the driver reports {count} GPUs, expected {expected}"


def _writable(folder: Path, name: str) -> str:
    # The folder may be shared: a random name and O_EXCL ensure that no file of another user is opened.
    path = folder / f".toolkit-health-{name}-{os.urandom(8).hex()}"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        if os.write(descriptor, b"x" * 4096) < 4096:
            return f"{folder} has less than 4 KiB of free space"
    finally:
        os.close(descriptor)
        path.unlink()
    return ""


def run_checks(arguments: dict[str, Any], name: str) -> dict[str, str]:
    """Run the checks; return the failed ones by name, with what each observed."""
    named = os.path.expandvars(arguments["local_scratch"])
    scratch = Path(named or os.environ.get("TMPDIR") or "/tmp")
    checks: dict[str, Callable[[], str]] = {
        "run directory": lambda: check_run_directory(Path(arguments["run"]), Path(arguments["claim"]), name),
        "local scratch": lambda: check_space(scratch, SCRATCH_FREE_BYTES if named else 0, name),
        "/dev/shm": lambda: check_space(Path("/dev/shm"), SHM_FREE_BYTES, name),
    }
    if arguments["gpus"]:
        checks["GPUs"] = lambda: check_gpus(int(arguments["gpus"]))
    results: dict[str, str] = {}

    def run(check: str) -> None:
        try:
            results[check] = checks[check]()
        except subprocess.TimeoutExpired:
            results[check] = f"nvidia-smi did not respond within {CHECK_S:.0f} s"
        except OSError as error:
            results[check] = f"{error.filename or check}: {error.strerror or error}"

    threads = [threading.Thread(target=run, args=(check,), daemon=True) for check in checks]
    deadline = time.monotonic() + CHECK_S
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return {
        check: results.get(check, f"no result within {CHECK_S:.0f} s") for check in checks if results.get(check) != ""
    }


def main() -> None:
    """Read the arguments, run the checks, print, and exit without waiting for a thread that hangs."""
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    failed = run_checks(json.loads(sys.argv[1]), node)
    sys.stdout.write(json.dumps({"node": node, "clock": time.time(), "failed": failed}) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
