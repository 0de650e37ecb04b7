"""The loop of docs/frameworks.md, run unchanged."""

from __future__ import annotations

import re
from pathlib import Path

import torch

PAGE = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text(encoding="utf-8")


def test_the_loop_of_the_page_runs_to_its_end(toolkit) -> None:
    (body,) = re.findall(r"^```python\n# own_loop.py\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (toolkit.folder / "own_loop.py").write_text(body)
    (toolkit.folder / "job.toml").write_text('[job]\nentry = "own_loop.py"\n')
    said = toolkit("run", toolkit.folder / "job.toml")
    assert said.code == 0, said
    (path,) = toolkit.runs.glob("*/*/newest.pt")
    assert torch.load(path)["number"] == 1000
