"""Write `evidence/reshard_matrix.json` as a table to docs/resharding.md: the results for each pair of layouts.

python scripts/reshard_matrix.py [evidence/reshard_matrix.json]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from marked_page import write_between

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "resharding.md"
BEGIN, END = "<!-- reshard matrix: python scripts/reshard_matrix.py -->", "<!-- end -->"


def cell(crossings: list[dict[str, Any]]) -> str:
    """Format the result of loading the state of one layout in another."""
    if not crossings:
        return ""
    if any(one["differing"] for one in crossings):
        return "**no**"
    worst = max(one["loss_error"] for one in crossings)
    return f"{worst:.0e}".replace("e-0", "e-") if worst else "="


def table(result: dict[str, Any]) -> str:
    names = [layout["name"] for layout in result["layouts"]]
    between: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in result["crossings"]:
        between.setdefault((one["saved_by"], one["loaded_by"]), []).append(one)
    same = sum(not one["differing"] for one in result["crossings"])
    exact = sum(not one["differing"] and not one["loss_error"] for one in result["crossings"])
    rows = [f"| | {' | '.join(str(number) for number in range(1, len(names) + 1))} |", f"|---{'|---' * len(names)}|"]
    for number, saved_by in enumerate(names, 1):
        cells = [cell(between.get((saved_by, loaded_by), [])) for loaded_by in names]
        rows.append(f"| {number}&nbsp;{saved_by.replace(' ', '&nbsp;')} | {' | '.join(cells)} |")
    summary = (
        f"Rows saved, columns loaded. In {same} of {len(result['crossings'])} crossings of {len(names)} layouts every bit of "
        f"the state was the same. In {exact} of them the losses of the following steps were the same, too (`=`); in the others sums were "
        "computed in another order, and the table contains the largest relative difference of a loss (float32).\n"
        f"torch {result['torch']}, commit {result['commit']}, {result['time'][:10]}."
    )
    return f"{summary}\n\n" + "\n".join(rows) + "\n"


def main() -> None:
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "evidence" / "reshard_matrix.json"
    write_between(PAGE, BEGIN, END, f"\n\n{table(json.loads(source.read_text(encoding='utf-8')))}\n")


if __name__ == "__main__":
    main()
