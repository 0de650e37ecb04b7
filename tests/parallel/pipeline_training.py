"""Trains the shipped job's small model on a mesh and says how far each rank is from what one process gave."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from toolkit.config.document import Flag
from toolkit.config.request import resolve_job
from toolkit.config.resolved import ResolvedJob
from toolkit.config.shipped import shipped_jobs
from toolkit.jobs import train_lm
from toolkit.parallel.distribute import Design, DistributedModel, distribute
from toolkit.parallel.layer_costs import Trial
from toolkit.parallel.mesh import make_mesh
from toolkit.topology.gather import gather_topology
from toolkit.train.data.order import SampleOrder, share, split
from toolkit.train.data.text import Windows
from toolkit.train.loop.step import OptimizerStep
from toolkit.train.optim.optimizers import optimizer_of
from toolkit.train.optim.precision import autocast
from toolkit.train.schedule import Schedule
from toolkit.world.facts import World

STEPS = 2  # the second begins with moments, and with parameters that the first has changed
TEXT = bytes(range(256)) * 4
ARGUMENTS = {"layers": 4, "width": 16, "heads": 2, "context": 8, "dropout": 0.0}
TRAIN = {"steps": STEPS, "batch": 8, "micro_batch": 1, "lr": 1e-2, "warmup_steps": 0, "seed": 3, "clip_norm": 0.0}


def job(parallel: dict[str, Any], train: dict[str, Any], args: dict[str, Any]) -> ResolvedJob:
    """The shipped job with these keys; `ranks` in `parallel` is how many it runs on."""
    parallel = {"balance": "even"} | parallel
    ranks = parallel.pop("ranks", 1)
    tables = {"job": {"ranks_per_node": ranks}, "parallel": parallel, "train": TRAIN | train, "args": ARGUMENTS | args}
    flags = {f"{table}.{key}": Flag(value, "test") for table, keys in tables.items() for key, value in keys.items()}
    return resolve_job(shipped_jobs()["train_lm"], site=None, environ={}, flags=flags)


def laid_out(world: World, config: ResolvedJob) -> tuple[DistributedModel, SimpleNamespace]:
    """The model on its mesh, and what a training needs besides."""
    arguments = train_lm.read_arguments(train_lm.Arguments, config.args)
    windows = Windows(TEXT, arguments.context)
    order = SampleOrder(windows.count, config.train.seed)
    topology = gather_topology(world)
    mesh = make_mesh(world, config, topology)
    precision = autocast("cpu", config.train.precision)
    take = lambda samples: windows.finished(windows.take(order.positions(samples)))  # noqa: E731
    trial = Trial(take(range(2))[0], precision)
    design = Design(lambda: train_lm.GPT(arguments), train_lm.initialise, train_lm.OUTLINE, trial=trial)
    model = distribute(design, world, mesh, config, topology)
    optimizer = optimizer_of(model.module, config.train, (train_lm.OUTLINE.blocks,))
    schedule = Schedule(config.train.lr, config.train.steps, 0, 1.0, "constant")
    step = OptimizerStep(
        model, optimizer, schedule, train_lm.loss_of, precision, config.train.batch, config.train.clip_norm
    )
    return model, SimpleNamespace(optimizer=optimizer, schedule=schedule, step=step, take=take)


def trained(world: World, config: ResolvedJob) -> tuple[DistributedModel, list[float], list[float]]:
    """The model after all steps, each step's loss and gradient norm."""
    model, parts = laid_out(world, config)
    losses, norms = [], []
    for number in range(config.train.steps):
        batch = config.train.batch
        samples = share(number * batch, batch, model.mesh.data_rank, model.mesh.data_size)
        stepped = parts.step.take([parts.take(some) for some in split(samples, config.train.micro_batch)])
        losses.append(float(stepped.loss))
        norms.append(float(stepped.grad_norm))
    return model, losses, norms


def whole_parameters(model: DistributedModel) -> dict[str, torch.Tensor]:
    """By all names, tied ones twice. Collective."""
    named = model.module.named_parameters(remove_duplicate=False)
    return {
        name: (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()
        for name, parameter in named
    }


def compared(world: World, config: ResolvedJob, reference: Path) -> dict[str, Any]:
    """Train, and compare with `reference`, or write it where it is missing. Differences are the largest of all."""
    model, losses, norms = trained(world, config)
    parameters = whole_parameters(model)
    if not reference.exists():
        torch.save({"losses": losses, "norms": norms, "parameters": parameters}, reference)
    wanted = torch.load(reference, weights_only=True)
    return {
        "loss": max(abs(one - other) for one, other in zip(losses, wanted["losses"], strict=True)),
        "norm": max(abs(one - other) / other for one, other in zip(norms, wanted["norms"], strict=True)),
        "parameter": max(float((value - wanted["parameters"][name]).abs().max()) for name, value in parameters.items()),
        "losses": losses,
        "norms": norms,
        "schedules": len(getattr(model.passes, "_schedules", ())),
        "digests": {
            name: hashlib.sha256(value.numpy().tobytes()).hexdigest()[:12] for name, value in parameters.items()
        },
    }
