"""The table of docs/parse.md that says how each kind of output is read: of whole ones, and of damaged ones.

`pytest -m evidence tests/topology/parsers` measures and writes evidence/parse_corpus.json;
`python scripts/parse_table.py` prints the table, `--write-docs` puts it between the marks of docs/parse.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from marked_page import write_between

ROOT = Path(__file__).resolve().parents[1]
EVIDENCE = ROOT / "evidence" / "parse_corpus.json"
DOCS = ROOT / "docs" / "parse.md"
BEGIN, END = "<!-- begin: scripts/parse_table.py --write-docs -->", "<!-- end -->"
HEAD = """\
| kind | real outputs | read right | damages | broke the reader | stated without a line | structural | named |
|---|---:|---:|---:|---:|---:|---:|---:|"""


def table(result: Mapping[str, Any]) -> str:
    return "\n".join([HEAD, *(row(kind, counts) for kind, counts in result["kinds"].items())])


def row(kind: str, counts: Mapping[str, int]) -> str:
    structural, named = counts["structural"], counts["structural_and_warned"]
    share = f"{named / structural:.1%}" if structural else "-"
    cells = [kind, counts["samples"] or "-", counts["right"] if counts["samples"] else "-", counts["mutations"],
             counts["raised"], counts["unfounded"], structural, share]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write-docs", action="store_true", help=f"into {DOCS.relative_to(ROOT)}")
    options = parser.parse_args()
    text = table(json.loads(EVIDENCE.read_text()))
    if not options.write_docs:
        print(text)
        return
    write_between(DOCS, BEGIN, END, f"\n{text}\n")


if __name__ == "__main__":
    main()
