"""The format's page is enough: a reader written from it alone gives what real ranks saved, bit by bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ckpt_runs import flip
from page_reader import Checkpoint, plain
from sampling import sampled
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

from toolkit.checkpoint import Checkpointer
from toolkit.checkpoint.format.elements import ELEMENTS
from toolkit.world.facts import World

RANKS = 3
STATE = {"step": 5, "loss": float("nan"), "best": float("-inf"), "seen": {1: (2, None)}, "$odd": [True]}


def tensors() -> dict[str, torch.Tensor]:
    """Every type in uneven parts, and in all shapes that are special; small ones, and some of several chunks."""
    generator = torch.Generator().manual_seed(1)

    def bits(name: str, *shape: int) -> torch.Tensor:
        if name == "bool":
            return torch.randint(0, 2, shape, generator=generator).bool()
        count = torch.Size(shape).numel() * ELEMENTS[name].size_bytes
        return (
            torch.randint(0, 4, (count,), dtype=torch.uint8, generator=generator)
            .view(getattr(torch, name))
            .reshape(shape)
        )

    return {
        **{f"every.{name}": bits(name, 7, 1100) for name in ELEMENTS},
        "large": bits("float32", 1001, 777),
        "large.bits": bits("bfloat16", 5, 3, 400_001),
        "random/a b%": torch.randint(0, 256, (9000,), dtype=torch.uint8, generator=generator),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 4),
    }  # fmt: skip


def save(rank: int, folder: Path, compression: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    world = World(rank, rank, RANKS, RANKS, 0, 1, "here", "cpu", "local", "test", attempt=0)
    state = {
        key: distribute_tensor(value, mesh, [Shard(int(key == "large"))], src_data_rank=None)
        if value.dim() and value.numel()
        else value
        for key, value in tensors().items()
    }
    checkpoints = Checkpointer(folder / "checkpoints", world, compression=compression)
    checkpoints.save(5, {**state, "betas": (0.9, float("inf")), "name": "a"}, STATE)
    dist.destroy_process_group()


def saved(folder: Path, compression: str) -> Path:
    mp.start_processes(save, (folder, compression), nprocs=RANKS, start_method="forkserver")
    return folder / "checkpoints" / "step-00000005"


def load(rank: int, folder: Path, ranks: int) -> None:
    """Fill the parts of another mesh, which begin in the middle of pieces and chunks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder.parent}/store-{ranks}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    world = World(rank, rank, ranks, ranks, 0, 1, "here", "cpu", "local", "test", attempt=1)
    names = ("large", "large.bits", "every.bool", "every.complex64", "random/a b%")

    def laid_out(value: torch.Tensor) -> DTensor:
        return distribute_tensor(value, mesh, [Shard(value.dim() - 1)], src_data_rank=None)

    wanted = {key: laid_out(torch.zeros_like(tensors()[key])) for key in names}
    Checkpointer(folder.parent, world).load(wanted)
    for key in names:
        mine = wanted[key].to_local()
        assert mine.numel() and torch.equal(mine, laid_out(tensors()[key]).to_local()), key
    dist.destroy_process_group()


def resharded(folder: Path) -> None:
    """One rank more, and as columns."""
    mp.start_processes(load, (folder, RANKS + 1), nprocs=RANKS + 1, start_method="forkserver")


@pytest.mark.parametrize(("compression", "schema"), sampled([("none", 1), ("gzip", 2)], lambda case: case[1] == 2))
def test_the_page_is_enough_to_read_what_ranks_saved(tmp_path: Path, compression: str, schema: int) -> None:
    folder = saved(tmp_path, compression)
    found = Checkpoint(folder)
    assert found.manifest["schema"] == schema
    values = {key: plain(record["value"]) for key, record in found.manifest["objects"].items()}
    assert values == {"betas": (0.9, float("inf")), "name": "a"}
    assert repr(plain(found.manifest["state"])) == repr(STATE)
    assert set(found.manifest["tensors"]) == set(tensors())
    for key, value in tensors().items():
        read = found.tensor(key)
        assert read.shape == tuple(value.shape)
        assert read.tobytes() == value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), key
    pieces = [piece for record in found.manifest["tensors"].values() for piece in record["pieces"]]
    compressed = [piece for piece in pieces if len(piece) == 5]
    assert any(len(piece[4][1]) > 1 for piece in compressed) == (compression != "none")
    resharded(folder)
    number, first = (compressed[-1][0], compressed[-1][4][1][0][0]) if compressed else (pieces[-3][0], pieces[-3][3])
    flip(folder / found.manifest["files"][number]["name"], first + 3)
    with pytest.raises(ValueError, match="is damaged"):
        [Checkpoint(folder).tensor(key) for key in found.manifest["tensors"]]


@pytest.mark.parametrize("text", [b'"step": 5', b'"large.bits"', b"betas"])
def test_a_changed_manifest_is_refused(tmp_path: Path, text: bytes) -> None:
    world = World(0, 0, 1, 1, 0, 1, "here", "cpu", "none", "alone")
    folder = Checkpointer(tmp_path, world).save(5, {"large.bits": torch.ones(2), "betas": (0.9,)}, {})
    assert np.array_equal(Checkpoint(folder).tensor("large.bits"), [1, 1])
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes().replace(text, text.swapcase().replace(b"5", b"6")))
    with pytest.raises(ValueError, match=r"manifest.json is damaged"):
        Checkpoint(folder)
