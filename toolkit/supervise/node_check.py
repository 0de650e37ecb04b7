"""Program that checks one node before ranks start on it, and prints the failed checks as one line of JSON.

It imports only the standard library and nothing from toolkit, so that it starts in milliseconds. Each check runs in a
thread: on a stale network file system a call may never return, which counts as a failed check.
"""

import ctypes
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
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
_KFD = Path("/sys/class/kfd/kfd/topology/nodes")
_PCI = Path("/sys/bus/pci/devices")
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
    """Check that the driver reports as many GPUs or MIG slices as the job has on this node; passes without a device."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", os.environ.get("ROCR_VISIBLE_DEVICES"))
    shown = [name.strip() for name in (names or "").split(",") if name.strip()]
    has_slices = any(name.startswith("MIG-") for name in shown)
    if _NVIDIA_DRIVER.exists() or _has_device("0x10de", ("0x0300", "0x0302")):
        count, slices, said = _nvidia_gpus()
        if has_slices:  # some drivers do not list slices
            count = slices or (0 if said else len(shown))
    elif _KFD.is_dir():
        count, said = sum(path.read_text(encoding="utf-8").strip() != "0" for path in _KFD.glob("*/gpu_id")), ""
    elif _has_device("0x1002", ("0x0380", "0x1200")):
        count, said = 0, "the kernel module amdgpu is not loaded"
    else:
        return ""
    if names is not None:  # the GPUs of this step; Slurm hides the others
        expected = min(expected, len(shown))
    what = "MIG slices" if has_slices else "GPUs"
    return (
        ""
        if count >= expected
        else f"the driver reports {count} {what}, expected {expected}" + f": {said}" * bool(said)
    )


def _nvidia_gpus() -> tuple[int, int, str]:
    """Return the number of GPUs, in which each slice of a GPU counts, the number of slices, and what the driver complains."""
    if not shutil.which("nvidia-smi"):
        return _gpus_by_library()
    done = subprocess.run(
        ["nvidia-smi", "-L"], capture_output=True, text=True, errors="replace", check=False, timeout=CHECK_S
    )
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    gpus = [number for number, line in enumerate(lines) if line.startswith("GPU ")]
    slices = [number for number, line in enumerate(lines) if line.startswith("MIG ")]
    whole = [number for number in gpus if number + 1 not in slices]  # a GPU precedes its slices
    said = next((line for line in lines if not line.startswith(("GPU ", "MIG "))), "")
    return len(whole) + len(slices), len(slices), said


def _gpus_by_library() -> tuple[int, int, str]:
    """Return the same from NVML, which counts no slices."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:
        return 0, 0, str(error)
    nvml.nvmlErrorString.restype = ctypes.c_char_p
    count = ctypes.c_uint()
    if problem := nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return 0, 0, nvml.nvmlErrorString(problem).decode(errors="replace")
    return count.value, 0, ""


def _has_device(vendor: str, classes: tuple[str, ...]) -> bool:
    """Return whether a PCI device has this vendor and one of these classes, whether or not its driver is loaded."""
    for path in _PCI.glob("*/vendor"):
        kind = path.with_name("class").read_text(encoding="utf-8")
        if path.read_text(encoding="utf-8").strip() == vendor and kind.startswith(classes):
            return True
    return False


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
