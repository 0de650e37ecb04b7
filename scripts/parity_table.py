"""Write `evidence/parity.json` as a table to docs/parity.md: the differences of every layout from a single process.

python scripts/parity_table.py [evidence/parity.json]
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from marked_page import write_between

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "parity.md"
BEGIN, END = "<!-- parity: make parity -->", "<!-- end -->"


def worst_of(row: dict[str, Any]) -> float:
    """Return the largest difference (loss, gradient, parameter); infinite if the run failed."""
    return math.inf if "error" in row else max(row["loss"], row["gradient"], row["parameter"])


def cell(row: dict[str, Any] | None) -> str:
    """Format the largest difference; "=" if there is none, bold if it is above the bound."""
    if row is None:
        return ""
    worst = worst_of(row)
    difference = f"{worst:.0e}".replace("e-0", "e-") if worst else "="
    return difference if worst <= row["bound"] else f"**{difference}**"


def table(result: dict[str, Any]) -> str:
    rows = result["rows"]
    layouts = list(dict.fromkeys(row["layout"] for row in rows))
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    cells = {(row["layout"], row["variant"]): row for row in rows}
    within = sum(worst_of(row) <= row["bound"] for row in rows)
    lines = [f"| | {' | '.join(variants)} |", f"|---{'|---:' * len(variants)}|"]
    for layout in layouts:
        row_cells = (cell(cells.get((layout, variant))) for variant in variants)
        lines.append(f"| {layout} | {' | '.join(row_cells)} |")
    summary = (
        f"{within} of {len(rows)} runs of {len(layouts)} layouts were within their bound. "
        f"torch {result['torch']}, commit {result['commit']}, {result['time'][:10]}."
    )
    return f"{summary}\n\n" + "\n".join(lines) + "\n"


def main() -> None:
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "evidence" / "parity.json"
    write_between(PAGE, BEGIN, END, f"\n\n{table(json.loads(source.read_text(encoding='utf-8')))}\n")


if __name__ == "__main__":
    main()
