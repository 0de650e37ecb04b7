"""Create `.venv` with the pinned packages, and report progress every few seconds. Standard library only.

python3 scripts/setup_environment.py train,mpi,plot          for the demo
python3 scripts/setup_environment.py train,mpi,plot,dev      for the tests
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PERIOD_S = 3.0
OLDEST_PYTHON = (3, 11)


def say(text: str) -> None:
    print(f"[set-up] {text}", flush=True)


def wanted(extras: str) -> str:
    """Return a digest of the inputs; a stamp file with this string marks the environment as up to date."""
    parts = [(ROOT / name).read_bytes() for name in ("setup.cfg", "constraints.txt", "pyproject.toml")]
    return hashlib.sha256(b"\0".join(parts)).hexdigest() + " " + ",".join(sorted(extras.split(",")))


def installed() -> int:
    return sum(1 for _ in VENV.glob("lib/python*/site-packages/*.dist-info"))


def run_pip(extras: str) -> None:
    # Only what is imported gets compiled, by its first import: compiling all packages takes longer than that.
    install = [
        str(VENV / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off",
        "--no-compile", "-c", str(ROOT / "constraints.txt"),
    ]  # fmt: skip
    # The pip of Python 3.11 needs twice the time of a newer one to read the indexes.
    subprocess.run([*install, "--quiet", "--upgrade", "pip"], cwd=ROOT, check=False)
    command = [*install, "-e", f"{ROOT}[{extras}]"]
    log_path = VENV / "pip.log"
    before, began = installed(), time.monotonic()
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
        while process.poll() is None:
            time.sleep(PERIOD_S)
            text = log_path.read_text(errors="replace")
            found = len(re.findall(r"^\s*(?:Collecting|Requirement already satisfied|Processing)", text, re.MULTILINE))
            progress = (
                f"{installed() - before} of {found} packages installed"
                if "Installing collected" in text
                else f"{found} packages found"
            )
            say(f"packages: {progress}, {time.monotonic() - began:.0f} s")
    if process.returncode:
        lines = log_path.read_text(errors="replace").splitlines()
        sys.exit("\n".join([*lines[-15:], f"[set-up] pip failed; for its full output see {log_path}"]))


def main() -> None:
    if sys.version_info < OLDEST_PYTHON:
        sys.exit(f"[set-up] Python {sys.version.split()[0]} is too old; use 3.11 or newer: make PYTHON=python3.11 demo")
    extras = sys.argv[1]
    stamp = VENV / "extras.stamp"
    if stamp.exists() and stamp.read_text() == wanted(extras):
        say("nothing to do: .venv is up to date")
        return
    if not (VENV / "bin" / "python").exists():
        say(f"creating .venv with Python {sys.version.split()[0]}")
        venv.create(VENV, with_pip=True, symlinks=True)
    say("installing the pinned packages; torch takes longest")
    os.environ.pop("PYTHONPATH", None)
    run_pip(extras)
    stamp.write_text(wanted(extras))
    say(f"done: {installed()} packages in .venv")


if __name__ == "__main__":
    main()
