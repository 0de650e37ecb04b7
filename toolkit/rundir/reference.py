"""Generates the Markdown table of how attempts end, from the table that the supervisor follows.

`python -m toolkit.rundir.reference docs/contract.md` replaces the part of the page between its two markers.
"""

import sys
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.rundir.states import ENDINGS, Next

BEGIN, END = "<!-- endings: begin -->", "<!-- endings: end -->"
_FOLLOWS = {
    Next.END: "the run ends",
    Next.RESTART: "new ranks in the same allocation",
    Next.REQUEUE: "the supervisor requeues the job",
    Next.AWAIT: "Slurm requeues the job by itself",
}


def reference() -> str:
    """Return the Markdown table, with one row per cause."""
    lines = ["| cause | when | budget | while it lasts | else the run is | exit code |", "|---|---|---|---|---|---|"]
    for row in ENDINGS.values():
        budget = f"`{row.budget}`" if row.budget else ""
        code = "the rank's" if row.exit_code is None else str(row.exit_code)
        lines.append(
            f"| `{row.cause.value}` | {row.when} | {budget} | {_FOLLOWS[row.with_budget]} | `{row.final_state.value}` | {code} |"
        )
    return "\n".join(lines)


def embed(page: str) -> str:
    """Return `page` with the generated table between its markers.

    Raises:
        ToolkitError: the page has no such markers.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ToolkitError("the page has no markers for the table", fix=f"add the lines {BEGIN} and {END} to it")
    return f"{before}{BEGIN}\n\n{reference()}\n\n{END}{after}"


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(embed(target.read_text(encoding="utf-8")), encoding="utf-8")
