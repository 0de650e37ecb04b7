"""What a rank keeps from step to step, by the names of parameters: residuals, momenta, factors.

Names, because DDP moves parameters between buckets after its first step. A step changes nothing until the next one
begins, so that a skipped step leaves everything as it was; one with a result that is not finite counts as skipped.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from toolkit.comm.peers import Peers
from toolkit.comm.reductions import backend_all_reduce

Tensors = dict[str, dict[str, Tensor]]  # by kind and parameter


@dataclass(frozen=True)
class Kind:
    """One kept tensor for each parameter, of this type and these shapes."""

    dtype: torch.dtype
    shapes: Mapping[str, Sequence[int]]


class KeptState:
    """Tensors by kind and parameter, all zero at first.

    `parameters` may be sharded: then tensors are those of this rank's parts, and a checkpoint has them like the parameters.
    `step` is the number of steps that have ended. `peers` are the ranks whose tensors belong together in a checkpoint,
    which has the means of all kinds except "second", and with `saves_own` also those of each rank. "second" is what the
    second of two phases lost: only one rank has it, so it counts for all of them in the mean residual.
    """

    def __init__(
        self, kinds: Mapping[str, Kind], device: torch.device, parameters: Mapping[str, Tensor], *, saves_own: bool = False
    ) -> None:  # fmt: skip
        self.kinds, self.step, self._parameters = kinds, 0, parameters
        self.peers = Peers(None, (0,), 0)
        self._device, self._saves_own = device, saves_own
        self._pending: dict[tuple[str, str], Tensor] = {}
        self._finite: list[Tensor] = []
        self._seen: set[str] = set()
        self.reset()

    def reset(self) -> None:
        """Forget everything, as before the first step."""
        self.discard()
        self.step = 0
        self._kept = {
            (kind, name): torch.zeros(tuple(shape), dtype=one.dtype, device=self._device).flatten()
            for kind, one in self.kinds.items()
            for name, shape in one.shapes.items()
        }

    def begin(self, names: Sequence[str]) -> None:
        """Note that these parameters are exchanged; if one of them was in this step already, another step begins."""
        if not self._seen.isdisjoint(names):
            self.settle()
        self._seen.update(names)

    def read(self, kind: str, names: Sequence[str]) -> Tensor:
        """Return a copy of the tensors of these parameters, fp32 in one tensor."""
        return torch.cat([self._kept[kind, name] for name in names]).float()

    def check(self, result: Tensor) -> None:
        """Keep nothing of this step if a number of `result`, which is equal on all ranks, is not finite."""
        self._finite.append(torch.isfinite(result).all())

    def write(self, kind: str, names: Sequence[str], values: Tensor) -> None:
        """Keep `values` from the next step on."""
        parts = values.to(self.kinds[kind].dtype).split([self._kept[kind, name].numel() for name in names])
        self._pending |= {(kind, name): part for name, part in zip(names, parts, strict=True)}

    def settle(self) -> None:
        """End the step and keep what it wrote; waits for a GPU."""
        if self._finite and bool(torch.stack(self._finite).all()):
            self._kept |= self._pending
        self.discard()

    def discard(self) -> None:
        """End the step as if it had written nothing."""
        self.step += bool(self._seen)
        self._pending, self._finite, self._seen = {}, [], set()

    def saved(self) -> dict[str, Tensors]:
        """Return the tensors of a checkpoint. Collective."""
        self.settle()
        means = self._own(without="second")
        for kind, tensors in means.items():
            for name, tensor in tensors.items():
                tensor /= self.peers.size
                if kind == "residual" and "second" in self.kinds:
                    tensor += self._kept["second", name].view(tensor.shape)
                if self.peers.size > 1:
                    backend_all_reduce(tensor, "sum", self.peers.group)
        return self._with_own(means)

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
                    (kind, name): local(one).flatten().to(self.kinds[kind].dtype) for name, one in tensors.items()
                }
                self._kept |= values
        if begun := [kind for kind in filled.get(source, ()) if (source, kind) in lacking]:
            return f"gradient compression starts without {', '.join(begun)}, which the checkpoint lacks"
        is_mean = self._saves_own and bool(self.kinds) and not is_own
        return f"each rank continues with the mean residual of {ranks} ranks" if is_mean else ""

    @property
    def _key(self) -> str:
        return f"rank-{self.peers.place:05d}"

    def _own(self, without: str = "") -> Tensors:
        return {
            kind: {name: self._kept[kind, name].float().clone().view(*shape) for name, shape in one.shapes.items()}
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
