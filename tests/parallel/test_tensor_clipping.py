"""The norm of gradients that lie on two meshes, and clipping by it: as one process, where torch's own raises."""

from __future__ import annotations

import logging
from contextlib import contextmanager

import pytest
import torch
from launch import launch
from sampling import sampled, selected
from tensor_cases import difference, job, laid, micro_batches, whole
from torch import nn
from torch.nn.utils import clip_grad_norm_

from toolkit.parallel.clipping import clip_gradients

MAX_NORM = 0.25
LAYOUTS = (
    {"tp": 2}, {"tp": 2, "sequence": True}, {"tp": 2, "shard": 2}, {"tp": 2, "shard": 2, "sequence": True},
    {"tp": 2, "replicate": 2, "sequence": True},
)  # fmt: skip
SAMPLE = (LAYOUTS[0], LAYOUTS[3])
TEST = "test_gradients_on_two_meshes_are_clipped_as_on_one_process"


def gradients_of(world, config) -> nn.Module:
    from toolkit.jobs import train_lm

    model = laid(world, config)
    batches = micro_batches(model, config, 0)

    def part_of(outputs, targets):
        return train_lm.loss_of(outputs, targets) * len(targets) / config.train.batch

    model.run(batches, part_of, lambda part: None, torch.autocast("cpu", enabled=False))
    return model.module


def name_of(parallel: dict) -> str:
    return " ".join(f"{key} {value}" for key, value in parallel.items()) or "one"


@contextmanager
def no_advice():
    """torch may not say that another process group would serve the norm better: what it says, every rank says."""
    said: list[logging.LogRecord] = []
    handler, logger = logging.Handler(), logging.getLogger("torch.distributed.tensor._redistribute")
    handler.emit = said.append
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    assert not said, said[0].getMessage()


def clip_all(world, layouts) -> None:
    for parallel in layouts:
        module = gradients_of(world, job(parallel))
        if parallel and not parallel.get("sequence"):  # some lie on the mesh of tp, others do not
            with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor|must have the same mesh"):
                clip_grad_norm_(module.parameters(), MAX_NORM)
        with no_advice():
            norm = clip_gradients(module.parameters(), MAX_NORM, None)
        found = {name: whole(parameter.grad) for name, parameter in module.named_parameters()} | {"norm": norm}
        if world.rank == 0:
            torch.save(found, world.run_dir / f"{name_of(parallel)}.pt")


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("clipping")
    launch(clip_all, 1, folder, [{}])
    layouts = [case["parallel"] for case in selected(request, TEST)]
    launch(clip_all, 2, folder, [layout for layout in layouts if layout in LAYOUTS[:2]])
    launch(clip_all, 4, folder, [layout for layout in layouts if layout in LAYOUTS[2:]])
    return folder


@pytest.mark.parametrize("parallel", sampled(LAYOUTS, lambda case: case[0] in SAMPLE), ids=name_of)
def test_gradients_on_two_meshes_are_clipped_as_on_one_process(folder, parallel):
    wanted = torch.load(folder / "one.pt", weights_only=True)
    assert float(wanted["norm"]) > 2 * MAX_NORM, "there is something to clip"
    assert difference(torch.load(folder / f"{name_of(parallel)}.pt", weights_only=True), wanted) < 1e-5
