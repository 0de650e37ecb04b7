"""Optimizer steps of the shipped model on tensor parallel ranks: losses, gradient norms, and parameters after the last."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from clusters_of_ranks import topology_of_ranks
from launch import launch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from toolkit.config.document import Flag
from toolkit.config.request import resolve_job
from toolkit.config.resolved import ResolvedJob
from toolkit.config.shipped import shipped_jobs
from toolkit.parallel.distribute import Design, DistributedModel, distribute
from toolkit.parallel.mesh import make_mesh
from toolkit.train.data.order import share, split
from toolkit.train.loop.step import OptimizerStep
from toolkit.train.optim.optimizers import optimizer_of
from toolkit.train.optim.precision import autocast
from toolkit.train.optim.rate_scaling import schedule_of
from toolkit.train.randomness import seed_rank
from toolkit.world.facts import World

STEPS = 2  # the second begins with moments, and with parameters that the first has changed
TRAIN = {"steps": STEPS, "batch": 4, "micro_batch": 1, "lr": 3e-3, "warmup_steps": 0, "schedule": "constant", "seed": 7}
MODEL = {"layers": 2, "width": 32, "heads": 4, "context": 16, "dropout": 0.0, "max_bytes": 100_000}
# Ways to train; each is compared with one process that trains so, too.
WAYS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied, one pass": {"args": {"tied": False}, "train": {"micro_batch": 0}},
    "clipped": {"train": {"clip_norm": 0.05}},
    "bf16": {"train": {"precision": "bf16"}},
}


def job(
    parallel: Mapping[str, Any] | None = None,
    args: Mapping[str, Any] | None = None,
    train: Mapping[str, Any] | None = None,
) -> ResolvedJob:
    tables = {
        "train": TRAIN | dict(train or {}),
        "args": MODEL | dict(args or {}),
        "parallel": {"placement": "launched"} | dict(parallel or {}),
        "checkpoint": {"every_steps": 2, "keep_last": 10},
    }
    flags = {f"{table}.{key}": Flag(value, "test") for table, keys in tables.items() for key, value in keys.items()}
    return resolve_job(shipped_jobs()["train_lm"], site=None, environ={}, flags=flags)


def laid(world: World, config: ResolvedJob, build: Callable[[], nn.Module] | None = None) -> DistributedModel:
    """The shipped model on the job's mesh; ranks of one node, as launched."""
    from toolkit.jobs import train_lm

    topology = topology_of_ranks("dgx-1", [1], world.size)
    args = train_lm.read_arguments(train_lm.Arguments, config.args)
    mesh = make_mesh(world, config, topology)
    build = build or (lambda: train_lm.GPT(args))
    return distribute(Design(build, train_lm.initialise, train_lm.OUTLINE), world, mesh, config, topology)


def step_of(model: DistributedModel, config: ResolvedJob) -> OptimizerStep:
    from toolkit.jobs import train_lm

    train = config.train
    optimizer = optimizer_of(model.module, train)
    for group in optimizer.param_groups:
        group["eps"] = 1e-3  # else Adam would make the rounding of a gradient near 0 as large as any gradient
    schedule = schedule_of(train)
    precision = autocast("cpu", train.precision)
    return OptimizerStep(model, optimizer, schedule, train_lm.loss_of, precision, train.batch, train.clip_norm)


def micro_batches(model: DistributedModel, config: ResolvedJob, number: int) -> list[tuple[Tensor, Tensor]]:
    """This rank's share of the samples of a step, which are drawn for that step."""
    generator = torch.Generator().manual_seed(1000 + number)
    text = torch.randint(0, 64, (config.train.batch, config.args["context"] + 1), generator=generator)
    own = share(0, config.train.batch, model.mesh.data_rank, model.mesh.data_size)
    parts = split(own, config.train.micro_batch)
    return [(text[part.start : part.stop, :-1], text[part.start : part.stop, 1:]) for part in parts]


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def take_steps(world: World, config: ResolvedJob) -> dict[str, Any]:
    """Train; the losses, the norms of gradients and the parameters. A rank of `tp` that differs from another fails."""
    model = laid(world, config)
    step = step_of(model, config)
    seed_rank(config.train.seed, 0, model.stream[0])
    stepped = [step.take(micro_batches(model, config, number)) for number in range(config.train.steps)]
    parameters = {name: whole(tensor) for name, tensor in model.module.named_parameters()}
    group = model.mesh.group("tp")
    for name, tensor in parameters.items() if group is not None else ():
        least, most = tensor.clone(), tensor.clone()
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group)
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX, group)
        assert torch.equal(least, most), f"{name} is not the same on all ranks of tp"
    return {
        "losses": torch.stack([one.loss for one in stepped]),
        "norms": torch.stack([one.grad_norm for one in stepped]),
        **parameters,
    }


def take_steps_of_all(world: World, configs: Mapping[str, ResolvedJob]) -> None:
    for name, config in configs.items():
        found = take_steps(world, config)
        if world.rank == 0:
            torch.save(found, world.run_dir / f"{name}.pt")


def trained(ranks: int, folder: Path, configs: Mapping[str, ResolvedJob]) -> dict[str, dict[str, Tensor]]:
    """What each of the jobs gave, one after the other on the same ranks."""
    launch(take_steps_of_all, ranks, folder, dict(configs))
    return {name: torch.load(folder / f"{name}.pt", weights_only=True) for name in configs}


def difference(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], *names: str) -> float:
    """The largest of these entries' relative differences, by norms; of all where none is named."""
    assert found.keys() == wanted.keys()
    return max(float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in names or wanted)
