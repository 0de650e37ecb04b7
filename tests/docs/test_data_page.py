"""docs/data.md: its files are written as they stand there and its commands run, and it names what there is."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import toolkit.train.data as data
from toolkit.config.data import DataTable
from toolkit.train.data.token_file import _HEADER

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [line for language, block in BLOCKS if not language for line in block.splitlines()]


@pytest.fixture
def folder(toolkit, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(toolkit.folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name, body in (block.removeprefix("# ").split("\n", 1) for language, block in BLOCKS if language):
        Path(name).write_text(body, encoding="utf-8")
    corpus = toolkit.folder / "corpus"
    corpus.mkdir()
    for name in "ab":
        (corpus / f"{name}.txt").write_text(f"the text {name} of some words\n" * 20)
        (corpus / f"{name}.jsonl").write_text("".join(json.dumps({"ids": [1] * length}) + "\n" for length in (3, 9)))
    return toolkit.folder


def test_the_commands_work_as_written(toolkit, folder: Path) -> None:
    assert len(COMMANDS) == 5
    said = []
    for line in COMMANDS:
        words = shlex.split(line)[1:]
        expanded = [str(one) for word in words for one in (sorted(folder.glob(word)) if "*" in word else [word])]
        said.append(toolkit(*expanded))
        assert said[-1].code == 0, said[-1]
    assert said[0].out.startswith("corpus.tokens: 1,000 tokens (uint16) of 2 files")
    assert said[2].out.startswith("242 tokens (uint16) of 2 files, vocabulary unknown\n")
    assert "rank 1, step 1: (2, 8)" in said[3].out + toolkit.ok("logs", "last", "--rank", 1)
    assert said[4].out.endswith("corpus/b.jsonl: 2 records\n")


@pytest.mark.evidence
def test_the_padded_example_prints_what_it_should(folder: Path) -> None:
    done = subprocess.run([sys.executable, "padded.py"], capture_output=True, text=True, env=os.environ, check=False)
    assert (done.returncode, done.stdout) == (0, "(2, 16) [3, 9] 12\n"), done.stderr


def test_every_name_and_key_is_on_the_page() -> None:
    for name in data.__all__:
        if name not in ("Padded", "choose_loader_settings"):  # what PadSamples gives; what `auto` calls
            assert re.search(rf"\b{name}\b", PAGE), name
        assert getattr(data, name)
    assert all(re.search(rf"\b{name}\b", PAGE) for name in DataTable.model_fields)


def test_the_table_of_the_header_is_the_header() -> None:
    table = PAGE[PAGE.index("| offset |") : PAGE.index("Raw tokens need a type")]
    rows = [tuple(map(int, row)) for row in re.findall(r"^\| (\d+) \| (\d+) \|", table, re.MULTILINE)]
    assert [offset for offset, _ in rows] == [sum(size for _, size in rows[:number]) for number in range(len(rows))]
    assert sum(size for _, size in rows) == _HEADER.size
