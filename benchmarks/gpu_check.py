"""Check on a machine with one NVIDIA GPU what other tests cannot: `make gpu`, or `python benchmarks/gpu_check.py`.

Each row of `gpu_rows.ROWS` runs in a process of its own with a time limit and prints one JSON line; a crash or a hang
costs only that row. All rows together end within nine minutes. The machine needs torch, but no network: without an
installed toolkit, an environment is made in `build/gpu` from the wheels of `scripts/gpu_wheels.sh`. `--device cpu` runs
the rows that need no GPU on small models, to check the rows themselves; each line names its device. Standard library
only.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import shutil
import signal
import site
import subprocess
import sys
import time
import venv
import zipfile
from pathlib import Path

from gpu_rows import ROWS, Row

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "gpu"
WHEELS = ROOT / "build" / "gpu-wheels"
ALL_S = 530.0  # a command on a lent machine has ten minutes, which include the start and the transfers
PR_SET_CHILD_SUBREAPER = 36


def gpus() -> list[str]:
    """Return the GPUs as nvidia-smi lists them."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line for line in listed.stdout.splitlines() if line.startswith("GPU ")]


def usable_python() -> str:
    """Return an interpreter that imports torch and toolkit: this one, `.venv`, or one made from the wheels."""
    has_torch = importlib.util.find_spec("torch") is not None
    if has_torch and importlib.util.find_spec("toolkit"):
        return sys.executable
    if has_torch and WHEELS.is_dir() and sys.version_info[:2] == (3, 12):
        return str(made_environment())
    installed = ROOT / ".venv" / "bin" / "python"
    if installed.exists():
        return str(installed)
    sys.exit(
        f"expected torch for {sys.executable}, and toolkit, or Python 3.12 and the wheels of scripts/gpu_wheels.sh"
    )


def made_environment() -> Path:
    """Return the interpreter of a new environment with the wheels, this tree's toolkit, and the packages of this one."""
    folder = BUILD / "environment"
    shutil.rmtree(folder, ignore_errors=True)
    venv.EnvBuilder(symlinks=True).create(folder)
    packages = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    for wheel in sorted(WHEELS.glob("*.whl")):
        with zipfile.ZipFile(wheel) as files:
            files.extractall(packages)
    # The packages of this interpreter come last, so the wheels have precedence.
    here = [path for path in (*site.getsitepackages(), site.getusersitepackages()) if Path(path).is_dir()]
    (packages / "here.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in here))
    (packages / "toolkit").mkdir()
    for source in [*(ROOT / "toolkit").iterdir(), *(ROOT / name for name in ("jobs", "templates", "site_configs"))]:
        (packages / "toolkit" / source.name).symlink_to(source)
    return folder / "bin" / "python"


def run_row(row: Row, python: str, device: str, limit_s: float) -> dict[str, object]:
    """Return the result of a row, whose process and descendants have then ended."""
    folder = BUILD / "rows" / row.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    about = {"row": row.name, "passed": False, "device": device}
    if limit_s < 1:
        return about | {"why": "not run: the time of all rows is over"}
    command = [python, str(ROOT / "benchmarks" / "gpu_rows.py"), row.name, device, str(folder)]
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("TOOLKIT_", "SLURM_"))}
    variables |= {"TOOLKIT_INDEX": str(BUILD / "folders"), "PYTHONUNBUFFERED": "1"}
    began = time.monotonic()
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=output, env=variables, cwd=folder)
        try:
            printed, _ = process.communicate(timeout=limit_s)
            result = (
                json.loads(printed) if process.returncode == 0 else about | {"why": why(folder, process.returncode)}
            )
        except subprocess.TimeoutExpired:
            result = about | {"why": f"still running after {limit_s:.0f} s: {why(folder)}"}
        except ValueError:
            result = about | {"why": f"expected one JSON object, got {printed[-200:]!r}"}
        end_descendants()
    if result["passed"]:
        shutil.rmtree(folder / "runs", ignore_errors=True)  # checkpoints of several GB
    return result | {"seconds": round(time.monotonic() - began, 1)}


def why(folder: Path, code: int | None = None) -> str:
    """Return the exit code of a row and the last line of its output."""
    lines = (folder / "output.txt").read_text(errors="replace").strip().splitlines()
    last = lines[-1] if lines else "no output"
    return f"exit code {code}: {last}" if code is not None else last


def end_descendants() -> None:
    """Kill all descendants of this process, which adopts the orphans of a killed one, such as a supervisor."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for child in children():
            os.kill(child, signal.SIGKILL)  # not reaped yet, so the number is still that of the child
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.1)
    print("a process of this row cannot be killed; the driver may hang", file=sys.stderr)


def children() -> list[int]:
    """Return the child processes of this one, which ps(1) reads in the same way."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]
        except OSError:  # it has exited meanwhile
            continue
        found += [int(folder.name)] if int(parent) == os.getpid() else []
    return found


def table(results: list[dict[str, object]]) -> str:
    """Return the summary: a line for each row, with its values or the reason of its failure."""
    lines = []
    for result in results:
        values = {key: value for key, value in result.items() if key not in ("row", "passed", "device", "seconds")}
        text = str(values.get("why") or ", ".join(f"{key} {value}" for key, value in values.items()))
        state = "skipped" if result["passed"] is None else "pass" if result["passed"] else "FAIL"
        lines.append(f"{result['row']:<12} {state:<8} {result.get('seconds', 0):>6} s  {text[:240]}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0", choices=("cuda:0", "cpu"))
    parser.add_argument("--only", nargs="+", choices=[row.name for row in ROWS], help="run only these rows")
    options = parser.parse_args()
    found = gpus()
    if options.device != "cpu" and not found:
        print("this machine has no NVIDIA GPU (nvidia-smi -L lists none): 0 rows")
        return
    print("\n".join(found) if options.device != "cpu" else "CPU: this checks the rows, not a GPU", file=sys.stderr)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    patience = 1 if options.device != "cpu" else 5  # on a CPU that others may use, nothing is measured
    ends_at = time.monotonic() + ALL_S * patience
    python = usable_python()
    results = []
    for row in ROWS:
        if options.only and row.name not in options.only:
            continue
        if options.device == "cpu" and row.needs_gpu:
            result: dict[str, object] = {"row": row.name, "passed": None, "device": "cpu", "why": "needs a GPU"}
        else:
            result = run_row(row, python, options.device, min(row.limit_s * patience, ends_at - time.monotonic()))
        print(json.dumps(result), flush=True)
        results.append(result)
    failed = sum(result["passed"] is False for result in results)
    print(f"\n{table(results)}\n{len(results)} rows on {options.device}, {failed} failed", file=sys.stderr)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
