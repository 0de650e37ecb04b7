"""The page on fine-tuning: its job file is valid, its model has these sizes, and its table follows from its formula."""

import json
import re
import tomllib
from pathlib import Path

import torch
from launch import launch
from model_folders import model_folder, transformers_model
from torch import nn

from toolkit.config.adapters import AdaptersTable
from toolkit.config.request import resolve_job
from toolkit.jobs.train_lm import GPT, Arguments

PAGE = (Path(__file__).parents[2] / "docs" / "fine-tuning.md").read_text()


def test_the_table_of_the_job_file_is_valid():
    (toml,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert AdaptersTable(**tomllib.loads(toml)["adapters"]).quantize == "nf4"


def test_the_sizes_are_those_of_the_shipped_model():
    layers = [
        module
        for name, module in GPT(Arguments()).named_modules()
        if name.count(".") == 2 and isinstance(module, nn.Linear)
    ]
    trained = sum(8 * (layer.in_features + layer.out_features) for layer in layers)
    assert f"rank 8 on {len(layers)} layers, {trained:,} parameters trained" in PAGE


def test_the_largest_bases_follow_from_the_formula():
    per_parameter = 0.5 + 1 / 64 + 4 / 16384 + 16 * 0.006
    rows = re.findall(r"\| (\d+) GB \| (\d+) B \|", PAGE)
    assert [int(size) for _, size in rows] == [int((0.9 * int(memory) - 4) / per_parameter) for memory, _ in rows]


def train(world, config) -> None:
    from toolkit.jobs import finetune_lora

    finetune_lora.main(world, config)


def test_the_commands_fine_tune_a_folder_and_merge_it(toolkit, tmp_path):
    copy, run, export = re.findall(
        r"^toolkit (?:jobs copy|run finetune_lora|ckpt export last merged).*$", PAGE, re.MULTILINE
    )
    (line,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    assert json.loads(line)["messages"][1]["role"] == "assistant"
    (tmp_path / "chat.jsonl").write_text(line * 8)
    model = model_folder(tmp_path / "model", "llama")
    settings = re.findall(r"--set (\S+)", run.replace("/models/Llama-3.2-1B-Instruct", str(model)))
    few = ["data.workers=0", "train.steps=2", "args.context=64"]
    toolkit.ok(*copy.split()[1:-1], tmp_path)
    config = resolve_job(tmp_path / run.split()[2], site=None, environ={}, settings=settings + few)
    launch(train, 1, tmp_path / "run", config)
    merged = tmp_path / "merged"
    toolkit.ok(*export.split()[1:3], tmp_path / "run" / "checkpoints", merged, *export.split()[5:])
    logits = transformers_model(merged)(torch.arange(9)[None]).logits
    assert (logits - transformers_model(model)(torch.arange(9)[None]).logits).abs().max() > 0
