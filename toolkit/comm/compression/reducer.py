"""Average gradients over ranks in compressed form; one object serves DDP's hook and `Communicator.all_reduce`."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor

from toolkit.comm.compression import low_rank
from toolkit.comm.compression.algorithms import BUILD
from toolkit.comm.compression.automatic import CANDIDATES, AutomaticChoice
from toolkit.comm.compression.compressor import Compressor, uniform
from toolkit.comm.compression.exchange import Exchanged, exchange, sent_bytes
from toolkit.comm.compression.feedback import KeptState, Kind, local
from toolkit.comm.peers import Peers
from toolkit.comm.reductions import backend_all_reduce
from toolkit.config.gradient_compression import ALGORITHMS, GradientCompressionTable
from toolkit.errors import ToolkitError

__all__ = ["GradientCompression"]


class GradientCompression:
    """The compression of the gradients of some parameters, with what it keeps from step to step.

    A step is one `reduce` of each parameter. Call `kept.discard` after one whose gradients the optimizer does not use.
    `scale` is the current scale of the loss, which residuals do not contain.
    """

    def __init__(self, settings: GradientCompressionTable, parameters: Mapping[str, Tensor], seed: int = 0) -> None:
        """Compress the gradients of `parameters`, or of this rank's parts of them.

        All ranks pass the same names, shapes of parts, settings and seed.
        """
        self.settings = settings
        self.scale: Callable[[], float] = lambda: 1.0
        self._seed = seed
        self._fixed = BUILD[settings.algorithm](settings) if settings.algorithm in BUILD else None
        self._parameters = {name: local(one.detach()) for name, one in parameters.items()}
        self._names = {id(one): name for name, one in parameters.items()}
        # By the size of whole parameters, so that another layout compresses the same ones.
        self.compressed = {
            name: self._parameters[name].shape for name, one in parameters.items() if self._is_compressed(one)
        }
        device = next(iter(parameters.values())).device if parameters else torch.device("cpu")
        self._choice = AutomaticChoice(settings, device) if settings.algorithm == "auto" else None
        self.kept = KeptState(self._kinds(), device, parameters, saves_own=settings.residual_saved == "exact")

    @property
    def _compressor(self) -> Compressor | None:
        """What encodes the gradients of this step; None for dense ones, and for PowerSGD."""
        return self._choice.compressor if self._choice is not None else self._fixed

    def _is_compressed(self, parameter: Tensor) -> bool:
        if not parameter.is_floating_point() or parameter.numel() < self.settings.min_elements:
            return False
        return self.settings.algorithm != "powersgd" or low_rank.is_worth(parameter.shape, self.settings.rank)

    def _kinds(self) -> dict[str, Kind]:
        settings, shapes = self.settings, self.compressed
        residual = Kind(torch.bfloat16 if settings.residual_type == "bf16" else torch.float32, shapes)
        kinds = {"residual": residual} if settings.has_feedback else {}
        if kinds and self._fixed is not None and self._fixed.exchange == "two_phase":
            kinds["second"] = residual
        if settings.algorithm == "powersgd":
            factors = {name: (settings.rank, low_rank.as_matrix(shape)[1]) for name, shape in shapes.items()}
            kinds[f"factor_{settings.rank}"] = Kind(torch.float32, factors)
        others = {
            "shift": settings.algorithm == "ef21",
            "mean_shift": settings.algorithm == "ef21",
            "momentum": settings.momentum,
        }
        return kinds | {kind: Kind(torch.float32, shapes) for kind, is_kept in others.items() if is_kept}

    def names_of(self, parameters: Iterable[Tensor]) -> list[str]:
        return [self._names[id(one)] for one in parameters]

    def describe(self, ranks: int) -> str:
        """Return a log line with the algorithm and its traffic relative to that of dense gradients."""
        total = max(1, sum(one.numel() for one in self._parameters.values()))
        few = sum(shape.numel() for shape in self.compressed.values())
        if self._choice is not None:
            return f"auto: the fastest of {', '.join(CANDIDATES)}; {len(self.compressed)} of {len(self._parameters)} parameters compressed"
        per_number = 8 * (ranks - 1) / ranks  # bytes that a rank sends in a dense ring
        if self._fixed is None:
            sides = (sum(low_rank.as_matrix(shape)) for shape in self.compressed.values())
            sent = per_number * self.settings.rank * sum(sides)
        else:
            sent = sent_bytes(few, self._fixed, ranks)
        share = (sent / per_number + total - few) / total
        unbiased = ", unbiased" if self._fixed is not None and self._fixed.is_unbiased else ""
        feedback = ", with error feedback" if self.settings.has_feedback else ""
        return (
            f"{self.settings.algorithm}{unbiased}{feedback}: {share:.1%} of the bytes of dense gradients; "
            f"{len(self.compressed)} of {len(self._parameters)} parameters compressed"
        )

    def warnings(self, optimizer: str, steps: int) -> list[str]:
        """Return messages about combinations that are known to give a worse loss."""
        found, name, compressor = [], self.settings.algorithm, self._fixed
        if not (self.settings.has_feedback or name == "ef21"):
            return []
        suits_adam = ALGORITHMS[name].suits_adam and not (name == "powersgd" and self.settings.rank < 4)
        if optimizer != "sgd" and not suits_adam:
            found.append(f"bursts of error feedback disturb {optimizer}; expect a worse loss than with sgd")
        if compressor is not None and compressor.contraction is not None:
            sample = uniform((1, compressor.block * -(-10_000 // compressor.block)), torch.device("cpu"), 0) - 0.5
            delay = round(1 / compressor.contraction(sample))
            if 10 * delay > steps:
                found.append(f"about {delay} steps pass until a gradient is sent, but the run has only {steps}")
        return found

    def reduce(self, names: Sequence[str], gradients: Sequence[Tensor], peers: Peers) -> None:
        """Average these gradients over the ranks, in place. Collective, in the same order on all ranks."""
        if peers.size == 1:
            return
        if sparse := [name for name, one in zip(names, gradients, strict=True) if one.is_sparse]:
            raise ToolkitError(
                f"gradient compression requires dense gradients, but that of {sparse[0]} is sparse",
                where="gradient_compression.algorithm",
                fix='create the embedding with sparse=False, or set algorithm = "none"',
            )
        self.kept.begin(names)
        chosen = self.compressed if self.kept.step >= self.settings.dense_steps else {}
        compressed = [(name, one) for name, one in zip(names, gradients, strict=True) if name in chosen]
        dense = [one for name, one in zip(names, gradients, strict=True) if name not in chosen]
        with ExitStack() as timing:
            if self._choice is not None:
                self._choice.begin(self.kept.step, peers)
                timing.enter_context(self._choice.exchanging(sum(one.numel() for _, one in compressed)))
                if self._choice.compressor is None:
                    dense, compressed = list(gradients), []
            if dense:
                self._reduce_dense(dense, peers)
            if any(one.numel() for _, one in compressed):  # not of shards without a row
                scale = self.scale()
                flat = _flat(one.float() for _, one in compressed).div_(scale)
                mean = self._averaged([name for name, _ in compressed], flat, peers)
                self._finish(mean * scale, [one for _, one in compressed])

    def _wire(self) -> AbstractContextManager[None]:
        return self._choice.wire() if self._choice is not None else nullcontext()

    def _reduce_dense(self, gradients: list[Tensor], peers: Peers) -> None:
        together = _one_after_another(gradients)
        flat = (together if together is not None else _flat(gradients)).div_(peers.size)
        with self._wire():
            backend_all_reduce(flat, "sum", peers.group)
        self.kept.check(flat)
        if together is None:
            self._finish(flat, gradients)

    def _finish(self, mean: Tensor, gradients: Sequence[Tensor]) -> None:
        self.kept.check(mean)
        for gradient, part in zip(gradients, mean.split([one.numel() for one in gradients]), strict=True):
            gradient.copy_(part.view(gradient.shape))

    def _averaged(self, names: list[str], gradient: Tensor, peers: Peers) -> Tensor:
        """Return the mean over the ranks of gradients, fp32 in one tensor."""
        kept, settings = self.kept, self.settings
        # One number that is not finite makes all NaN, so that every algorithm sends it.
        x = gradient.add_(gradient.sum() * 0)
        if settings.algorithm == "ef21":
            return self._shifted(names, x, peers)
        before = velocity = None
        if settings.momentum:
            x = velocity = kept.read("momentum", names).mul_(settings.momentum).add_(x)
        if settings.has_feedback:
            x = kept.read("residual", names).mul_(settings.residual_decay).add_(x)
        if "second" in kept.kinds:
            before = kept.read("second", names).mul_(settings.residual_decay)
        if settings.algorithm == "powersgd":
            found = self._factorised(names, x, peers)
        else:
            assert self._compressor is not None
            found = exchange(x, self._compressor, peers, self._seed_of(names), before, self._wire)
        if before is not None and found.lost is not None:
            # Ranges of ranks change with the buckets: what this rank lost elsewhere is now part of its residual.
            owned, lost = found.lost
            before[owned] = 0
            x.add_(before, alpha=peers.size)
            before.zero_()[owned] = lost
            kept.write("second", names, before)
        if settings.has_feedback:
            kept.write("residual", names, x.sub_(found.own))
        if velocity is not None:
            kept.write("momentum", names, velocity.mul_(found.own == 0))
        return found.mean

    def _shifted(self, names: list[str], x: Tensor, peers: Peers) -> Tensor:
        """EF21 (arXiv:2106.05203): ranks send compressed differences to shifts, whose mean is the result.

        With momentum, shifts follow the moving average of the gradients (arXiv:2305.15155).
        """
        kept, momentum = self.kept, self.settings.momentum
        if momentum:
            x = kept.read("momentum", names).mul_(momentum).add_(x, alpha=1 - momentum)
        shift, mean = kept.read("shift", names), kept.read("mean_shift", names)
        assert self._compressor is not None
        found = exchange(x - shift, self._compressor, peers, self._seed_of(names))
        mean += found.mean
        written = {"shift": shift.add_(found.own), "mean_shift": mean} | ({"momentum": x} if momentum else {})
        for kind, values in written.items():
            kept.write(kind, names, values)
        return mean

    def _factorised(self, names: list[str], x: Tensor, peers: Peers) -> Exchanged:
        kind = f"factor_{self.settings.rank}"
        shapes = [low_rank.as_matrix(self.compressed[name]) for name in names]
        matrices = [one.view(shape) for one, shape in zip(x.split([a * b for a, b in shapes]), shapes, strict=True)]
        factors = [self.kept.read(kind, [name]).view(self.settings.rank, -1) for name in names]
        means, factors = low_rank.average(matrices, factors, peers, self._seed_of(names))
        mean = _flat(means)
        self.kept.write(kind, names, _flat(factors))
        return Exchanged(mean, mean)

    def _seed_of(self, names: list[str]) -> int:
        words = f"{self._seed}/{self.kept.step}/{len(names)}/{names[0]}"
        return int.from_bytes(hashlib.sha256(words.encode()).digest()[:6], "little")

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps, which selects random numbers and ends `dense_steps`, and of ranks."""
        self.kept.settle()
        return {"step": self.kept.step, "ranks": self.kept.peers.size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept.discard()
        self.kept.step = int(state["step"])


def _one_after_another(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return tensors that follow each other in memory, as a bucket of DDP, as one; None if they do not."""
    end = tensors[0].data_ptr()
    for one in tensors:
        if one.data_ptr() != end or not one.is_contiguous() or one.dtype != tensors[0].dtype:
            return None
        end += one.nbytes
    return tensors[0].as_strided((sum(one.numel() for one in tensors),), (1,))


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([one.reshape(-1) for one in tensors])
