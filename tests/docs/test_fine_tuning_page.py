"""The page on fine-tuning: its job file is valid, its model has these sizes, and its table follows from its formula."""

import re
import tomllib
from pathlib import Path

from toolkit.config.adapters import AdaptersTable
from toolkit.jobs.train_lm import GPT, Arguments

PAGE = (Path(__file__).parents[2] / "docs" / "fine-tuning.md").read_text()


def test_the_table_of_the_job_file_is_valid():
    (toml,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert AdaptersTable(**tomllib.loads(toml)["adapters"]).quantize == "nf4"


def test_the_sizes_are_those_of_the_shipped_model():
    layers = [
        module for name, module in GPT(Arguments()).named_modules() if name.count(".") == 2 and "norm" not in name
    ]
    trained = sum(8 * (layer.in_features + layer.out_features) for layer in layers)
    assert f"rank 8 on {len(layers)} layers, {trained:,} parameters trained" in PAGE


def test_the_largest_bases_follow_from_the_formula():
    per_parameter = 0.5 + 1 / 64 + 4 / 16384 + 16 * 0.006
    rows = re.findall(r"\| (\d+) GB \| (\d+) B \|", PAGE)
    assert [int(size) for _, size in rows] == [int((0.9 * int(memory) - 4) / per_parameter) for memory, _ in rows]
