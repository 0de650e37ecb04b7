"""What a rank keeps from step to step, by the names of parameters: residuals, momenta, factors.

Names, because DDP moves parameters between buckets after its first step. A step changes nothing until the next one
begins, so that a skipped step leaves everything as it was; one with a result that is not finite counts as skipped.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from toolkit.comm.peers import Peers
from toolkit.comm.reductions import backend_all_reduce
from toolkit.errors import counted

Tensors = dict[str, dict[str, Tensor]]  # by kind and parameter


@dataclass(frozen=True)
class Kind:
    """One kept tensor for each parameter, of this type and these shapes."""

    dtype: torch.dtype
    shapes: Mapping[str, Sequence[int]]


class KeptState:
    """Tensors by kind and parameter, all zero at first; zeros need no memory.

    `parameters` may be sharded: then tensors are those of this rank's parts, and a checkpoint has them like the parameters.
    `step` is the number of steps that have ended. `peers` are the ranks whose tensors belong together in a checkpoint,
    which has the means of all kinds except "second", and with `saves_own` also those of each rank; without `saves_zeros`,
    it has nothing if all are zero. "second" is what the
    second of two phases lost: only one rank has it, so it counts for all of them in the mean residual.
    """

    def __init__(
        self, kinds: Mapping[str, Kind], device: torch.device, parameters: Mapping[str, Tensor], *, saves_own: bool = False,
        saves_zeros: bool = True,
    ) -> None:  # fmt: skip
        self.kinds, self.step, self._parameters = kinds, 0, parameters
        self.peers = Peers(None, (0,), 0)
        self._device, self._saves_own, self._saves_zeros = device, saves_own, saves_zeros
        self._kept: dict[tuple[str, str], Tensor] = {}
        self._pending: dict[tuple[str, str], Tensor | None] = {}
        self._finite: list[Tensor] = []
        self._seen: set[str] = set()
        self.reset()

    def reset(self) -> None:
        """Forget everything, as before the first step."""
        self.discard()
        self.step = 0
        self._kept = {}

    def begin(self, names: Sequence[str]) -> bool:
        """Note that these parameters are exchanged; return whether a step begins.

        It does if one of them was in this step already.
        """
        if not self._seen.isdisjoint(names):
            self.settle()
        is_first = not self._seen
        self._seen.update(names)
        return is_first

    def holds(self, kind: str, names: Sequence[str]) -> bool:
        """Return whether one of these tensors has been written since it was zero."""
        return any((kind, name) in self._kept for name in names)

    def read(self, kind: str, names: Sequence[str]) -> Tensor:
        """Return a copy of the tensors of these parameters, fp32 in one tensor."""
        return torch.cat([self.tensor_of(kind, name) for name in names]).float()

    def tensor_of(self, kind: str, name: str) -> Tensor:
        """Return the kept tensor of this parameter, flat; not to be written."""
        if (found := self._kept.get((kind, name))) is not None:
            return found
        of_kind = self.kinds[kind]
        return torch.zeros(prod(of_kind.shapes[name]), dtype=of_kind.dtype, device=self._device)

    def check(self, result: Tensor) -> None:
        """Keep nothing of this step if the sum of `result`, which is equal on all ranks, is not finite."""
        if self.kinds:  # a sum is 20 times as fast as a test of each number
            self._finite.append(torch.isfinite(result.sum(dtype=torch.float32)))

    def write(self, kind: str, names: Sequence[str], values: Tensor) -> None:
        """Keep `values` from the next step on."""
        shapes = self.kinds[kind].shapes
        parts = values.to(self.kinds[kind].dtype).split([prod(shapes[name]) for name in names])
        self._pending |= {(kind, name): part for name, part in zip(names, parts, strict=True)}

    def clear(self, kind: str, names: Sequence[str]) -> None:
        """Make these tensors zero from the next step on."""
        self._pending |= {(kind, name): None for name in names if (kind, name) in self._kept}

    def settle(self) -> None:
        """End the step and keep what it wrote; waits for a GPU."""
        if self._finite and bool(torch.stack(self._finite).all()):
            self._kept = {one: tensor for one, tensor in (self._kept | self._pending).items() if tensor is not None}
        self.discard()

    def discard(self) -> None:
        """End the step as if it had written nothing."""
        self.step += bool(self._seen)
        self._pending, self._finite, self._seen = {}, [], set()

    def saved(self) -> dict[str, Tensors]:
        """Return the tensors of a checkpoint. Collective."""
        self.settle()
        if not (self._saves_zeros or self._is_held_somewhere()):
            return {}
        means = self._own(without="second")
        for kind, tensors in means.items():
            for name, tensor in tensors.items():
                tensor /= self.peers.size
                if kind == "residual" and "second" in self.kinds:
                    tensor += self.tensor_of("second", name).view(tensor.shape)
                if self.peers.size > 1:
                    backend_all_reduce(tensor, "sum", self.peers.group)
        return self._with_own(means)

    def _is_held_somewhere(self) -> bool:
        """Return whether a rank has tensors that are not zero. Collective."""
        held = torch.tensor(float(bool(self._kept)), device=self._device)
        if self.peers.size > 1:
            backend_all_reduce(held, "max", self.peers.group)
        return bool(held)

    def room(self) -> dict[str, Tensors]:
        """Return tensors as `saved` does, for a load to fill."""
        return self._with_own(self._own(without="second"))

    def take(self, filled: Mapping[str, Tensors], missing: Iterable[str], ranks: int) -> str:
        """Continue with `room()` after a load; return a message if that is not what this rank saved, else "".

        Args:
            missing: the names of tensors that the checkpoint lacks.
            ranks: the number of ranks that saved.
        """
        self.reset()
        lacking = {(name.split(".")[0], name.split(".")[1]) for name in missing}
        is_own = self._key in filled and ranks == self.peers.size and all(source != self._key for source, _ in lacking)
        source = self._key if is_own else "mean"
        for kind, tensors in filled.get(source, {}).items():
            if (source, kind) not in lacking:
                values = {
                    (kind, name): local(one).flatten().to(self.kinds[kind].dtype)
                    for name, one in tensors.items()
                    if self._saves_zeros or bool(local(one).any())
                }
                self._kept |= values
        begun = [kind for kind in filled.get(source, ()) if (source, kind) in lacking]
        if begun:
            message = f"gradient compression starts without {', '.join(begun)}, which the checkpoint lacks"
            return message if self._saves_zeros else ""
        if is_own or not (self._saves_own and self.kinds):
            return ""
        what = f"the mean residual of {counted(ranks, 'rank')}"
        return (
            f"each rank continues with {what}" if self.peers.size > 1 else f"{what} is kept for a start on more ranks"
        )

    @property
    def _key(self) -> str:
        return f"rank-{self.peers.place:05d}"

    def _own(self, without: str = "") -> Tensors:
        return {
            kind: {name: self.read(kind, [name]).view(*shape) for name, shape in one.shapes.items()}
            for kind, one in self.kinds.items()
            if kind != without
        }

    def _with_own(self, means: Tensors) -> dict[str, Any]:
        found = {"mean": means} | ({self._key: self._own()} if self._saves_own else {}) if means else {}
        return {
            source: {
                kind: {name: _sharded_like(one, self._parameters[name]) for name, one in tensors.items()}
                for kind, tensors in kinds.items()
            }
            for source, kinds in found.items()
        }


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sharded_like(part: Tensor, parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return part
    return DTensor.from_local(
        part, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )  # fmt: skip
