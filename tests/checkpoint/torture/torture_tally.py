"""What the torture of checkpoints saw, as JSON lines in evidence/checkpoint_torture.jsonl: one line for each kind of case.

Only whole counts are written down. `python tests/checkpoint/torture/torture_tally.py` prints them as one JSON object,
`--markdown` as a table for a page.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
FILE = ROOT / "evidence" / "checkpoint_torture.jsonl"


class Tally:
    """Counts of one test: `cases`, and what became of them, by kind."""

    def __init__(self, scenario: str) -> None:
        self._scenario = scenario
        self._kinds: dict[str, Counter[str]] = {}
        self._seconds: Counter[str] = Counter()
        self._last = time.monotonic()

    def case(self, kind: str, *outcomes: str) -> None:
        """Count one case that has ended, and its outcomes: "found", "accepted", "fell back"."""
        now = time.monotonic()
        self._kinds.setdefault(kind, Counter()).update(["cases", *outcomes])
        self._seconds[kind] += now - self._last
        self._last = now

    def write(self) -> None:
        """Append one line for each kind."""
        FILE.parent.mkdir(exist_ok=True)
        said = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        stamp = {"commit": said.stdout.strip(), "time": datetime.now(UTC).isoformat(timespec="seconds")}
        with FILE.open("a", encoding="utf-8") as stream:
            for kind, counts in self._kinds.items():
                line = {"scenario": self._scenario, "kind": kind, **counts, "seconds": round(self._seconds[kind], 1)}
                stream.write(json.dumps({**line, **stamp}) + "\n")


def summary() -> dict[str, dict[str, dict[str, Any]]]:
    """By scenario and kind: how many cases, what became of them, and how long they took. A later line counts."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for line in FILE.read_text(encoding="utf-8").splitlines():
        seen = json.loads(line)
        found.setdefault(seen.pop("scenario"), {})[seen.pop("kind")] = seen
    return found


def markdown() -> str:
    rows = ["| scenario | kind | cases | what became of them | seconds |", "|---|---|---|---|---|"]
    for scenario, kinds in summary().items():
        for kind, seen in kinds.items():
            outcomes = {key: value for key, value in seen.items() if key not in ("cases", "seconds", "commit", "time")}
            said = ", ".join(f"{key} {value}" for key, value in outcomes.items())
            rows.append(f"| {scenario} | {kind} | {seen['cases']} | {said} | {seen['seconds']} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(markdown() if "--markdown" in sys.argv else json.dumps(summary()))
