"""What each key of [parallel] for FSDP2 changes: the units of a gather, and the types of outputs and buffers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule

from toolkit.config.train import ParallelTable, TrainTable
from toolkit.errors import ToolkitError
from toolkit.parallel.outline import Outline
from toolkit.parallel.sharded import convert_buffers, shard
from toolkit.train import trainer

OUTLINE = Outline(blocks="blocks")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        return self.norm(self.inner(stream))


class Model(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(4, 4)
        if tied:
            self.last.weight = self.first.weight

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        stream = self.first(stream)
        for block in self.blocks:
            stream = block(stream)
        return self.last(stream)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    dist.destroy_process_group()


def units(mesh: DeviceMesh, *, tied: bool = False, **parallel: Any) -> list[str]:
    """The names of the modules that are gathered separately."""
    model = Model(tied=tied)
    shard(model, OUTLINE, mesh, ParallelTable(shard=2, zero=3, **parallel))
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule) and name]


def test_classes_and_functions_choose_the_units(mesh: DeviceMesh, tmp_path: Path, monkeypatch) -> None:
    assert units(mesh) == ["blocks.0", "blocks.1"]
    assert units(mesh, wrap="classes", wrap_classes=["Block", "BatchNorm1d"]) == [
        "blocks.0", "blocks.0.norm", "blocks.1", "blocks.1.norm",
    ]  # fmt: skip
    (tmp_path / "own_units.py").write_text(
        "def chosen(name, module):\n    return name.endswith('inner') or name == 'last'\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    expected = ["blocks.0.inner", "blocks.1.inner", "last"]
    assert units(mesh, wrap="function", wrap_function="own_units:chosen") == expected


@pytest.mark.parametrize(
    ("parallel", "tied", "part"),
    [
        ({"wrap": "classes", "wrap_classes": ["Blok"]}, False, "expected modules of the classes Blok in Model"),
        (
            {"wrap": "classes", "wrap_classes": ["ModuleList"]},
            False,
            "blocks cannot be gathered separately: it is only",
        ),
        ({"wrap": "classes", "wrap_classes": ["Linear"]}, True, "last cannot be gathered separately: it shares"),
        ({"wrap": "function", "wrap_function": "no_such:f"}, False, "cannot import 'no_such:f': ModuleNotFoundError"),
        ({"wrap": "function", "wrap_function": "builtins"}, False, "cannot import 'builtins'"),
    ],
)
def test_wrong_choices_are_refused(mesh: DeviceMesh, parallel: dict[str, Any], tied: bool, part: str) -> None:
    with pytest.raises(ToolkitError) as refused:
        units(mesh, tied=tied, **parallel)
    assert part in str(refused.value) and refused.value.fix and "parallel.wrap_" in refused.value.where


def test_a_way_to_wrap_requires_its_names() -> None:
    for wrap, name in [("classes", "wrap_classes"), ("function", "wrap_function")]:
        with pytest.raises(ValueError, match=name):
            ParallelTable(wrap=wrap)


def test_outputs_have_the_output_type_and_blocks_compute_in_the_gather_type(mesh: DeviceMesh) -> None:
    found = {}
    for output in ("as_is", "fp32"):
        model, inside = Model(), []
        for block in model.blocks:
            block.norm = nn.Identity()
        model.blocks[0].inner.register_forward_hook(lambda *given, inside=inside: inside.append(given[2].dtype))
        shard(model, OUTLINE, mesh, ParallelTable(shard=2, zero=3, gather_type="bf16", output_type=output))
        found[output] = model(torch.ones(2, 4)).dtype
        assert inside == [torch.bfloat16]
    assert found == {"as_is": torch.bfloat16, "fp32": torch.float32}


def test_only_floating_point_buffers_are_converted() -> None:
    model = Model()
    convert_buffers(model, ParallelTable())
    assert model.blocks[0].norm.running_mean.dtype == torch.float32
    convert_buffers(model, ParallelTable(buffer_type="bf16"))
    norm = model.blocks[0].norm
    assert (norm.running_mean.dtype, norm.num_batches_tracked.dtype) == (torch.bfloat16, torch.int64)
    assert set(model.state_dict()) == set(Model().state_dict())


def test_the_mode_of_compile_is_passed_to_torch(monkeypatch) -> None:
    modes = []
    monkeypatch.setattr(nn.Module, "compile", lambda module, **settings: modes.append(settings["mode"]))
    monkeypatch.setattr(trainer, "check_compiler", lambda device: None)
    for mode in ("default", "max-autotune"):
        config = SimpleNamespace(train=TrainTable(compile=True, compile_mode=mode), parallel=ParallelTable())
        task, world = SimpleNamespace(outline=OUTLINE), SimpleNamespace(device="cpu")
        own = SimpleNamespace(_config=config, _task=task, _world=world, _adapters=None, _probe=None)
        trainer.Trainer._prepare_blocks(own, SimpleNamespace(module=Model()))
    assert modes == ["default"] * 2 + ["max-autotune"] * 2
