"""Every layout saves, every layout loads: real ranks, a real model, its optimizer's moments, and two steps after.

Ranks of one number are started twice, once to save all their layouts and once to load whatever was saved.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from layouts import VOCABULARY, Layout, Model, whole
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from toolkit.checkpoint import Checkpointer
from toolkit.train.state import TrainingState
from toolkit.train.state.optimizer_state import optimizer_tensors
from toolkit.world.facts import World

OPTIMIZERS = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.9, dampening=0.1),
}
STEPS = 2  # before a save, and after it
Case = tuple[Layout, str]  # with the name of the optimizer

LAYOUTS = (
    Layout("alone"),
    *(Layout("ddp", replicate=ranks) for ranks in (2, 3, 8)),
    *(Layout("fsdp", shard=ranks) for ranks in range(1, 9)),
    *(Layout("fsdp columns", shard=ranks) for ranks in (2, 4)),
    *(Layout("tp", tp=ranks) for ranks in (2, 3, 4)),
    *(Layout("fsdp tp", shard=shard, tp=tp) for shard, tp in ((2, 2), (2, 3), (3, 2), (2, 4))),
    *(Layout("hsdp", replicate=copies, shard=shard) for copies, shard in ((2, 2), (2, 3), (2, 4))),
    Layout("hsdp tp", replicate=2, shard=2, tp=2),
)


@dataclass(frozen=True)
class Crossing:
    """What one layout found of what another saved. `loss_error` is relative, 0 for the same bits."""

    saved_by: str
    loaded_by: str
    optimizer: str
    tensors: int
    differing: tuple[str, ...]
    loss_error: float


def state_of(case: Case, seed: int) -> TrainingState:
    layout, optimizer = case
    torch.manual_seed(seed)
    model = layout.place(Model())
    return TrainingState(model, OPTIMIZERS[optimizer](model), None, seed=1)


def take_steps(state: TrainingState, count: int) -> list[str]:
    """Steps on samples that follow from the step's number; the losses before them, exact."""
    losses = []
    for _ in range(count):
        generator = torch.Generator().manual_seed(state.step)
        loss = state.model(torch.randint(0, VOCABULARY, (6, 9), generator=generator))
        state.optimizer.zero_grad()
        loss.backward()
        state.optimizer.step()
        state.step += 1
        losses.append(float(whole(loss.detach())).hex())
    return losses


def fingerprints(state: TrainingState) -> dict[str, str]:
    """The digest of every tensor of model and optimizer at its global shape, on all ranks."""
    model: dict[str, Any] = dict(get_model_state_dict(state.model))
    optimizer = optimizer_tensors(state.model, state.optimizer)
    moments = {f"{name} {entry}": value for name, kept in optimizer.items() for entry, value in kept.items()}
    return {name: _digest(value) for name, value in sorted((model | moments).items())}


def _digest(tensor: Tensor) -> str:
    full = whole(tensor).detach().contiguous()
    data = full.reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{full.dtype} {tuple(full.shape)} {hashlib.sha256(data).hexdigest()}"


def folder_of(folder: Path, case: Case) -> Path:
    return folder / f"{case[0].name} {case[1]}".replace(" ", "-")


def save(folder: Path, world: World, case: Case) -> None:
    """Save after some steps, write down what it was and how it goes on."""
    own = folder_of(folder, case)
    state = state_of(case, seed=0)
    take_steps(state, STEPS)
    state.save(Checkpointer(own, world), world)
    was = {"tensors": fingerprints(state), "losses": take_steps(state, STEPS)}
    if world.rank == 0:
        (own / "was.json").write_text(json.dumps(was))


def load(folder: Path, world: World, crossing: tuple[Case, Case]) -> None:
    """Load, from weights of another seed; compare every bit, and the steps that follow."""
    source, target = crossing
    saved = folder_of(folder, source)
    was = json.loads((saved / "was.json").read_text())
    state = state_of(target, seed=1)
    state.resume(Checkpointer(folder / "unused", world), world, source=saved / f"step-{STEPS:08d}")
    now, before = fingerprints(state), was["tensors"]
    differing = tuple(sorted(name for name in now | before if now.get(name) != before.get(name)))
    error = max(map(_relative_error, take_steps(state, STEPS), was["losses"]))
    if world.rank == 0:
        found = Crossing(source[0].name, target[0].name, source[1], len(now), differing, error)
        with (folder / f"found-by-{world.size}.jsonl").open("a") as file:
            file.write(json.dumps(asdict(found)) + "\n")


def _relative_error(mine: str, theirs: str) -> float:
    one, other = float.fromhex(mine), float.fromhex(theirs)
    return abs(one - other) / abs(other)


def cross(folder: Path, crossings: Sequence[tuple[Case, Case]]) -> Iterator[Crossing]:
    """Save what the crossings need, and load each; the ranks of one number are started once for each."""
    sources = sorted({source for source, _ in crossings}, key=str)
    for ranks in sorted({source[0].ranks for source in sources}):
        start(ranks, save, folder, [source for source in sources if source[0].ranks == ranks])
    for ranks in sorted({target[0].ranks for _, target in crossings}):
        start(ranks, load, folder, [pair for pair in crossings if pair[1][0].ranks == ranks])
        for line in (folder / f"found-by-{ranks}.jsonl").read_text().splitlines():
            yield Crossing(**json.loads(line))


def start(ranks: int, work: Any, folder: Path, given: Sequence[Any]) -> None:
    """Run `work(folder, world, one)` for one after the other on real ranks."""
    store = folder / f"store-{work.__name__}-{ranks}"
    store.mkdir()
    mp.start_processes(_one_rank, (ranks, store, work, folder, given), nprocs=ranks, start_method="forkserver")


def _one_rank(rank: int, ranks: int, store: Path, work: Any, folder: Path, given: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    # DTensor tells each rank that two all-gathers could be one.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    world = World(rank, rank, ranks, ranks, 0, 1, "here", "cpu", "local", "test")
    for number, one in enumerate(given):
        # A process group for each: gloo's threads look for messages a hundred times a second, as long as it lives.
        dist.init_process_group("gloo", init_method=f"file://{store}/{number}", rank=rank, world_size=ranks)
        work(folder, world, one)
        dist.barrier()
        dist.destroy_process_group()
