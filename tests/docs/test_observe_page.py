"""The page on verdicts: its table is current, and it names every kind."""

import sys
from pathlib import Path

from toolkit.metrics.verdicts import VerdictKind

ROOT = Path(__file__).parents[2]


def test_the_table_of_limits_is_current(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from limits_table import BEGIN, PAGE, table

    assert BEGIN + table() in PAGE.read_text(), "run: python scripts/limits_table.py"
    sys.modules.pop("limits_table")


def test_every_kind_is_on_the_page():
    page = (ROOT / "docs" / "observe.md").read_text()
    assert [kind.value for kind in VerdictKind if f"`{kind.value}`" not in page] == []
