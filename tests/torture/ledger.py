"""What the torture tests saw, as JSON lines in evidence/torture.jsonl: one line a repeat.

`python tests/torture/ledger.py` prints them as one JSON object by scenario, `--markdown` as a table for a page.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
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


def summary() -> dict[str, dict[str, Any]]:
    """By scenario: how many repeats, their end states, whether losses were equal, seconds by phase as (median, max)."""
    by_scenario: dict[str, list[dict[str, Any]]] = {}
    for line in FILE.read_text(encoding="utf-8").splitlines():
        seen = json.loads(line)
        by_scenario.setdefault(seen["scenario"], []).append(seen)
    return {scenario: _of_one(lines) for scenario, lines in by_scenario.items()}


def _of_one(lines: list[dict[str, Any]]) -> dict[str, Any]:
    phases = {phase: [line["seconds"][phase] for line in lines] for phase in lines[0]["seconds"]}
    silences = [line["silent_s"] for line in lines if "silent_s" in line]
    return {
        "count": len(lines),
        "states": dict(Counter(line["state"] for line in lines)),
        "losses_equal": None if lines[0]["losses_equal"] is None else all(line["losses_equal"] for line in lines),
        "seconds": {phase: [median(values), max(values)] for phase, values in phases.items()},
        "longest_silence_s": max(silences, default=None),
        "last": lines[-1],
    }


def markdown() -> str:
    rows = [
        "| scenario | count | ended | losses equal | seconds: median, longest | silent at most (s) |",
        "|---|---|---|---|---|---|",
    ]
    for scenario, seen in summary().items():
        states = ", ".join(f"{state} {count}" for state, count in seen["states"].items())
        seconds = "; ".join(
            f"{phase} {middle:.1f}, {longest:.1f}" for phase, (middle, longest) in seen["seconds"].items()
        )
        equal = {None: "", True: "yes", False: "NO"}[seen["losses_equal"]]
        rows.append(
            f"| {scenario} | {seen['count']} | {states} | {equal} | {seconds} | {seen['longest_silence_s'] or ''} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    print(markdown() if "--markdown" in sys.argv else json.dumps(summary()))
