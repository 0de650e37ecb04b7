"""What the torture tests saw, as JSON lines in evidence/torture.jsonl: one line a repeat."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FILE = ROOT / "evidence" / "torture.jsonl"


@dataclass(frozen=True)
class Ledger:
    """The lines of one scenario. `losses_equal` compares hexadecimal floats with the undisturbed run's."""

    scenario: str

    def note(
        self, repeat: int, *, state: str, losses_equal: bool | None, seconds: dict[str, float], **seen: Any
    ) -> None:
        """Append one repeat: seconds by phase, the end state, and whatever else was seen."""
        line = {
            "scenario": self.scenario, "repeat": repeat, "state": state, "losses_equal": losses_equal,
            "seconds": {phase: round(value, 2) for phase, value in seconds.items()}, **seen,
            "commit": _commit(), "time": datetime.now(UTC).isoformat(timespec="seconds"),
        }  # fmt: skip
        FILE.parent.mkdir(exist_ok=True)
        with FILE.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")


def _commit() -> str:
    said = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return said.stdout.strip()
