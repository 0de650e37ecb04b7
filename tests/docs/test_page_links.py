"""Links from page to page: each leads to a file, and to a heading in it; pages name what they send the reader to."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from toolkit.config.train import ParallelTable

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def links_of(page: Path) -> list[str]:
    return re.findall(r"\]\((?!\w+:)([^)\s]+)\)", page.read_text(encoding="utf-8"))


def headings_of(page: Path) -> set[str]:
    """As GitHub writes them behind a #: small letters, blanks as hyphens, no other signs."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links_of(page):
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not heading or heading in headings_of(target), link


def test_the_shipped_jobs_page_leads_to_what_its_keys_do() -> None:
    wanted = {
        "parallel.reduction": "topology.md#which-reduction-is-used",
        "parallel.placement": "topology.md#in-a-job",
        "checkpoint.every_steps": "surviving.md#when-a-run-saves",
        "checkpoint.keep_last": "checkpoints.md#make-room",
    }
    rows = (ROOT / "docs" / "train_lm.md").read_text(encoding="utf-8").splitlines()
    for key, link in wanted.items():
        (row,) = (row for row in rows if row.startswith(f"| `{key}`"))
        assert f"({link})" in row
    assert {"checkpoints.md", "resharding.md"} <= {
        link.partition("#")[0] for link in links_of(ROOT / "docs" / "train_lm.md")
    }


def test_the_page_of_reductions_has_every_one() -> None:
    section = (ROOT / "docs" / "topology.md").read_text(encoding="utf-8").split("## Which reduction is used")[1]
    named = re.findall(r"^\| `(\w+)`", section, re.MULTILINE)
    assert named == list(get_args(ParallelTable.model_fields["reduction"].annotation))
