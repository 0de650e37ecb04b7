"""Which modules are the blocks of a model, as models of several libraries are built."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from toolkit.errors import ToolkitError
from toolkit.jobs.train_lm import GPT, Arguments
from toolkit.train.blocks import blocks_of, needed_blocks


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


class Wrapper(nn.Module):
    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def test_blocks_of_lists_dicts_and_stages_of_several_lists():
    assert list(blocks_of(GPT(Arguments(layers=2, width=8, heads=1)))) == ["blocks.0", "blocks.1"]
    assert list(blocks_of(nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 1), 2, enable_nested_tensor=False))) == [
        "layers.0",
        "layers.1",
    ]
    two = Wrapper(
        encoder=Wrapper(layers=nn.ModuleDict({"a": layer()})), decoder=Wrapper(layers=nn.ModuleList([layer()]))
    )
    assert list(blocks_of(two)) == ["encoder.layers.a", "decoder.layers.0"]
    stages = Wrapper(stem=nn.Conv2d(3, 4, 3), layer1=nn.Sequential(layer(), layer()), layer2=nn.Sequential(layer()))
    assert list(blocks_of(stages)) == ["layer1.0", "layer1.1", "layer2.0"]


def test_layers_of_one_block_are_none():
    assert blocks_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == {}
    assert blocks_of(Wrapper(head=nn.Sequential(nn.Linear(2, 2), layer()))) == {}
    assert blocks_of(Wrapper(empty=nn.ModuleList())) == {}


def test_what_holds_the_blocks_may_be_named():
    model = Wrapper(towers=nn.ModuleList([Wrapper(layers=nn.ModuleList([layer(), layer()]))]))
    assert list(blocks_of(model)) == ["towers.0"]
    assert list(blocks_of(model, ["towers.0.layers"])) == ["towers.0.layers.0", "towers.0.layers.1"]
    with pytest.raises(ToolkitError, match=r"has no module towers\.layers.*such as towers"):
        blocks_of(model, ["towers.layers"])
    with pytest.raises(
        ToolkitError, match=r"flying requires a model with repeated blocks, and Linear has no blocks.*below=\["
    ):
        needed_blocks(torch.nn.Linear(1, 1), "flying")
