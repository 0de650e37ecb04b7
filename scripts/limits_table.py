"""Write the table of the detectors' limits into docs/observe.md: python scripts/limits_table.py"""

from __future__ import annotations

from pathlib import Path

from marked_page import write_between

from toolkit.metrics.limits import LIMITS

PAGE = Path(__file__).parents[1] / "docs" / "observe.md"
BEGIN, END = "<!-- limits: python scripts/limits_table.py -->\n", "<!-- end -->"


def table() -> str:
    """Return the Markdown table with a row per limit."""
    rows = ["| limit | value | unit | meaning | false alarms of the rule |", "|---|---|---|---|---|"]
    last = ""
    for one in LIMITS.values():
        rule = one.name.partition(".")[0]
        rate, last = ("" if rule == last else one.false_alarms), rule
        rows.append(f"| `{one.name}` | {one.value:g} | {one.unit} | {one.meaning} | {rate} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    write_between(PAGE, BEGIN, END, table())
