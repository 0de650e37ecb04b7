"""The programs on the format's page read what the checkpointer wrote."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import torch
import xxhash

from toolkit.checkpoint import Checkpointer
from toolkit.checkpoint.format.digests import digests_of_file
from toolkit.checkpoint.format.elements import ELEMENTS
from toolkit.world.facts import World

PAGE = (Path(__file__).parents[3] / "docs" / "checkpoint-format.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def saved(directory: Path) -> torch.Tensor:
    weights = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    world = World(0, 0, 1, 1, 0, 1, "here", "cpu", "none", "alone")
    Checkpointer(directory, world).save(1000, {"model": {"weight": weights}}, {})
    return weights


def test_the_programs_on_the_page_run(tmp_path, monkeypatch, capsys):
    weights = saved(tmp_path)
    monkeypatch.chdir(tmp_path)
    with_hdf5, without = ({} for _ in range(2))
    exec(PROGRAMS[0], with_hdf5)
    assert np.array_equal(with_hdf5["weights"], weights.float().numpy())
    assert capsys.readouterr().out == "model.weight bfloat16 (5, 3)\n"
    exec(PROGRAMS[1], without)
    assert np.array_equal(without["bits"], weights.view(torch.uint16).numpy())


def test_the_page_names_every_element_type_and_key(tmp_path):
    saved(tmp_path)
    folder = tmp_path / "step-00001000"
    named = set(re.findall(r"`(\w+)`", PAGE))
    assert set(ELEMENTS) - {"int16", "int32", "uint16", "uint32"} <= named
    assert set(json.loads((folder / "manifest.json").read_text())) <= named


def test_files_are_digested_as_the_page_says(tmp_path):
    path = tmp_path / "file"
    content = bytes(range(256)) * 40_000
    path.write_bytes(content)
    blocks = [content[at : at + 4_194_304] for at in range(0, len(content), 4_194_304)]
    joined = b"".join(xxhash.xxh3_128_digest(block) for block in blocks)
    assert len(blocks) == 3
    assert digests_of_file(path).whole == xxhash.xxh3_128_hexdigest(joined)
