"""Create `.venv-guests` with the frameworks of tests/guests.txt, which some checks of `make evidence` compare with.

It finds torch and toolkit's packages in `.venv`, which must exist, so that torch is installed once.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GUESTS, VENV, PINS = ROOT / ".venv-guests", ROOT / ".venv", ROOT / "tests" / "guests.txt"


def main() -> None:
    stamp = GUESTS / "pins.txt"
    if stamp.exists() and stamp.read_bytes() == PINS.read_bytes():
        return
    venv.create(GUESTS, symlinks=True)
    (own,) = VENV.glob("lib/python*/site-packages")
    (packages,) = GUESTS.glob("lib/python*/site-packages")
    (packages / "toolkit.pth").write_text(f"import site; site.addsitedir({str(own)!r})\n")  # also toolkit itself
    python = VENV / "bin" / "python"
    command = [python, "-m", "pip", "--python", GUESTS / "bin" / "python", "install", "-q", "-r", PINS]
    if subprocess.run([*command, "-c", ROOT / "constraints.txt"], cwd=ROOT, check=False).returncode:
        sys.exit("[guests] pip failed; torch must stay at the version of constraints.txt")
    stamp.write_bytes(PINS.read_bytes())


if __name__ == "__main__":
    main()
