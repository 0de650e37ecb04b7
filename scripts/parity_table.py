"""Write `evidence/parity.json` as a table to docs/parity.md: the differences of every layout from a single process.

Rows of layouts that the file lacks, because pytest ran with `-k`, remain as they are.

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


def table(result: dict[str, Any], page: str) -> str:
    """Return the table of these rows and, of layouts that they lack, the rows and measurements of the page."""
    lines = {line.split(" | ")[0].strip("| "): line for line in page.splitlines() if line.startswith("| ")}
    header = lines.pop("", None)
    measured = [line for line in page.splitlines() if line.startswith("From ")]
    rows = result["rows"]
    layouts = list(dict.fromkeys(row["layout"] for row in rows))
    variants = [one.strip() for one in header.split("|")[2:-1]] if header else []
    variants += [name for name in dict.fromkeys(row["variant"] for row in rows) if name not in variants]
    cells = {(row["layout"], row["variant"]): row for row in rows}
    if lines.keys() <= set(layouts):
        lines, measured = {}, []
    for layout in layouts:
        row_cells = (cell(cells.get((layout, variant))) for variant in variants)
        lines[layout] = f"| {layout} | {' | '.join(row_cells)} |"
    measured.append(f'From "{layouts[0]}": torch {result["torch"]}, commit {result["commit"]}, {result["time"][:10]}.')
    found = [one for line in lines.values() for one in line.split("|")[2:-1] if one.strip()]
    within = sum("**" not in one for one in found)
    summary = f"{within} of {len(found)} runs of {len(lines)} layouts were within their bound."
    heading = [f"| | {' | '.join(variants)} |", f"|---{'|---:' * len(variants)}|"]
    return "\n\n".join([summary, "\n".join(measured), "\n".join([*heading, *lines.values()])]) + "\n"


def main() -> None:
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "evidence" / "parity.json"
    page = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    write_between(PAGE, BEGIN, END, f"\n\n{table(json.loads(source.read_text(encoding='utf-8')), page)}\n")


if __name__ == "__main__":
    main()
