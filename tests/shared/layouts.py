"""One model on every layout that a run may have: whole, copied, sharded, split, both, and unevenly.

All ranks see the same samples, so that a layout changes where numbers lie and not what they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

VOCABULARY, WIDTH, HIDDEN = 37, 16, 26  # 37 and 26 divide by few numbers of ranks, so most shards are uneven


class Block(nn.Module):
    """A normalised two-layer perceptron, added to the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, stream: Tensor) -> Tensor:
        return stream + self.down(nn.functional.gelu(self.up(self.norm(stream))))


class Model(nn.Module):
    """Tokens (batch, context) in, the mean cross entropy of the next tokens out; with buffers of two types."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("tokens_seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, text: Tensor) -> Tensor:
        stream = self.embedding(text[:, :-1])
        with torch.no_grad():
            self.tokens_seen += text.numel()
            self.mean.lerp_(stream.detach().mean((0, 1)), 0.1)
        for block in self.blocks:
            stream = block(stream)
        return nn.functional.cross_entropy(self.head(stream).flatten(0, 1), text[:, 1:].flatten())


@dataclass(frozen=True)
class Layout:
    """How a model lies on ranks: `kind` on `replicate` x `shard` x `tp` ranks."""

    kind: str
    replicate: int = 1
    shard: int = 1
    tp: int = 1

    @property
    def ranks(self) -> int:
        return self.replicate * self.shard * self.tp

    @property
    def name(self) -> str:
        sizes = [size for size in (self.replicate, self.shard, self.tp) if size > 1]
        return f"{self.kind} {'x'.join(map(str, sizes)) or '1'}"

    def place(self, model: nn.Module) -> nn.Module:
        """The model on this layout's mesh, over the default process group."""
        if self.kind == "alone":
            return model
        if self.kind == "ddp":
            return DistributedDataParallel(model)
        dims = {"replicate": self.replicate, "shard": self.shard, "tp": self.tp}
        kept = {name: size for name, size in dims.items() if size > 1 or (name == "shard" and self.tp == 1)}
        mesh = init_device_mesh("cpu", tuple(kept.values()), mesh_dim_names=tuple(kept))
        if self.tp > 1:
            _split(model, mesh["tp"])
        if self.replicate > 1 or self.shard > 1 or self.tp == 1:
            _shard(model, mesh[tuple(name for name in kept if name != "tp")], by_column=self.kind == "fsdp columns")
        return model


def _split(model: nn.Module, mesh: DeviceMesh) -> None:
    """Tensor parallel: rows of `up` and the head, columns of `down`, the vocabulary of the embedding."""
    plan: dict[str, object] = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    for number in range(len(model.blocks)):  # type: ignore[arg-type]
        # DTensors in between: a local tensor does not say how uneven the others are.
        plan[f"blocks.{number}.up"] = ColwiseParallel(use_local_output=False)
        plan[f"blocks.{number}.down"] = RowwiseParallel()
    # All ranks made the same weights: nothing is sent, so that simulated ranks can do it, too.
    parallelize_module(model, mesh, plan, src_data_rank=None)  # type: ignore[arg-type]


def _shard(model: nn.Module, mesh: DeviceMesh, *, by_column: bool) -> None:
    def columns(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter.dim() > 1 and parameter.shape[1] % mesh.size() == 0 else None

    placement = columns if by_column else None
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, shard_placement_fn=placement)
    fully_shard(model, mesh=mesh, shard_placement_fn=placement)


def whole(tensor: Tensor) -> Tensor:
    """A tensor at its global shape, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
