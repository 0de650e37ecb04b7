"""What `toolkit ckpt ... --json` prints has the keys of the table in docs/contract.md, and the table no others."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from ckpt_runs import SHARD, flip, save

from toolkit.cli.ckpt import ckpt

PAGE = Path(__file__).parents[2] / "docs" / "contract.md"
Keys = tuple[set[str], set[str]]  # those that are always there, and those that may be


def table() -> dict[str, dict[str, Keys]]:
    """The keys by command and object."""
    text = PAGE.read_text(encoding="utf-8")
    part = text[text.index("<!-- ckpt: begin -->") : text.index("<!-- ckpt: end -->")]
    found: dict[str, dict[str, Keys]] = defaultdict(dict)
    for command, place, keys in re.findall(r"^\| `(\w+)` \| (?:`([^`]+)`)? ?\| ([^|]+) \|", part, re.MULTILINE):
        sometimes = {key for group in re.findall(r"\(([^)]*)\)", keys) for key in re.findall(r"`(\w+)`", group)}
        found[command][place] = set(re.findall(r"`(\w+)`", keys)) - sometimes, sometimes
    return found


def objects(value: Any, place: str) -> Iterator[dict[str, Any]]:
    """The objects at `[].problems[]` and the like."""
    name, many, rest = re.fullmatch(r"(\w*)(\[\]|\{\})?\.?(.*)", place).groups()
    value = value[name] if name else value
    for one in value if many == "[]" else value.values() if many else [value]:
        if rest:
            yield from objects(one, rest)
        elif one is not None:
            yield one


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Of three steps the second differs from the first in all ways there are, and the last one is damaged."""
    same = {"same": torch.ones(3), "w": torch.ones(2), "odd": torch.ones(2), "gone": torch.ones(1), "lr": 0.5}
    save(tmp_path / "run", 10, same, {"loss": 1.5})
    save(tmp_path / "run", 20, {"same": torch.ones(3), "w": torch.zeros(2), "odd": torch.ones(4)}, {"loss": 1.0})
    flip(save(tmp_path / "run", 30, same, {}) / SHARD, -1)
    return tmp_path / "run"


COMMANDS = {
    "ls": [["{run}"]],
    "verify": [["{run}", "--full"]],
    "show": [["{run}:10"], ["{run}:10", "--norms"], ["{run}:30", "--norms"]],
    "diff": [["{run}:10", "{run}:20"], ["{run}:10", "{run}:30"]],
    "prune": [["{run}", "--keep-last", "1", "--full"]],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_keys_are_those_of_the_table(toolkit, run: Path, command: str) -> None:
    seen: dict[str, set[str]] = defaultdict(set)
    for words in COMMANDS[command]:
        said = toolkit("ckpt", command, *(word.format(run=run) for word in words), "--json")
        answer = json.loads(said.out)
        for place, (always, sometimes) in table()[command].items():
            if place.startswith("norms") and "norms" not in answer:
                continue
            for found in objects(answer, place):
                assert always <= found.keys() <= always | sometimes, (place, found.keys())
                seen[place] |= found.keys()
    assert seen == {place: always | sometimes for place, (always, sometimes) in table()[command].items()}


def test_the_table_has_every_command_with_json() -> None:
    with_json = {
        name
        for name, command in ckpt.commands.items()
        if any(isinstance(option, click.Option) and "--json" in option.opts for option in command.params)
    }
    assert table().keys() == with_json == COMMANDS.keys()


def test_the_other_page_points_there_and_says_which_page_is_for_what() -> None:
    page = (PAGE.parent / "checkpoints.md").read_text(encoding="utf-8")
    head, body = page.split("\n```\n", 1)
    assert "(contract.md#of-ckpt)" in body and "`read_bytes`" not in body and "`relative_norm`" not in body
    for other in ("surviving", "python", "resharding", "exports", "checkpoint-format", "checkpoint-torture"):
        assert f"[{other}.md]({other}.md" in head, other
    index = (PAGE.parent / "index.md").read_text(encoding="utf-8")
    pages = re.findall(r"^([\w-]+)$", index, re.MULTILINE)
    listed = [page for page in pages if page in ("checkpoints", "checkpoint-format", "resharding", "exports")]
    assert len(listed) == 4, listed
    assert listed[0] == "checkpoints"
