"""Average gradients over ranks in compressed form; one object serves DDP's hook and `Communicator.all_reduce`."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from toolkit.comm.compression import low_rank
from toolkit.comm.compression.algorithms import BUILD
from toolkit.comm.compression.automatic import CANDIDATES, DENSE, POWERSGD, AutomaticChoice, Bucket
from toolkit.comm.compression.compressor import uniform
from toolkit.comm.compression.exchange import Exchanged, NodeTiers, exchange, exchange_between_nodes, sent_bytes
from toolkit.comm.compression.feedback import KeptState, Kind, local
from toolkit.comm.compression.spent import DECODE, ENCODE, EXCHANGE, WIRE, Spent, StepMeasures
from toolkit.comm.peers import Peers
from toolkit.comm.reductions import backend_all_reduce
from toolkit.config.gradient_compression import ALGORITHMS, GradientCompressionTable
from toolkit.errors import ToolkitError

__all__ = ["GradientCompression"]


_MEASURED_EVERY = 10  # steps; on a GPU, a measured step waits for the device many times


class GradientCompression:
    """The compression of the gradients of some parameters, with what it keeps from step to step.

    A step is one `reduce` of each parameter. Call `kept.discard` after one whose gradients the optimizer does not use.
    `scale` is the current scale of the loss, which residuals do not contain. With `tiers`, ranks of a node exchange dense
    gradients, where the algorithm allows it.
    """

    def __init__(
        self, settings: GradientCompressionTable, parameters: Mapping[str, Tensor], seed: int = 0, *, is_alone: bool = False
    ) -> None:  # fmt: skip
        """Compress the gradients of `parameters`, or of this rank's parts of them.

        All ranks pass the same names, shapes of parts, settings and seed. A rank that `is_alone` sends nothing: it only
        keeps what a checkpoint of more ranks has, for the next start on more ranks.
        """
        self.settings = settings
        self.scale: Callable[[], float] = lambda: 1.0
        self.tiers: NodeTiers | None = None
        self._seed = seed
        candidates = CANDIDATES if settings.algorithm == "auto" else (settings.algorithm,)
        self._compressors = {name: BUILD[name](settings) for name in candidates if name in BUILD}
        self._fixed = self._compressors.get(settings.algorithm)
        self._parameters = {name: local(one.detach()) for name, one in parameters.items()}
        self._names = {id(one): name for name, one in parameters.items()}
        # By the size of whole parameters, so that another layout compresses the same ones.
        self.compressed = {
            name: self._parameters[name].shape for name, one in parameters.items() if self._is_compressed(one)
        }
        self._matrices = {
            name: low_rank.as_matrix(shape)
            for name, shape in self.compressed.items()
            if settings.factorises
            and low_rank.is_worth(shape, settings.rank)
            and not isinstance(parameters[name], DTensor)
        }
        self._device = next(iter(parameters.values())).device if parameters else torch.device("cpu")
        self._choice = None
        if settings.algorithm == "auto":
            self._choice = AutomaticChoice(settings, CANDIDATES[1:], self._device, self._sent_bytes)
        self._measures = StepMeasures()
        self.kept = KeptState(
            self._kinds(),
            self._device,
            parameters,
            saves_own=settings.residual_saved == "exact",
            saves_zeros=settings.algorithm != "auto" and not is_alone,
        )

    def _is_compressed(self, parameter: Tensor) -> bool:
        if not parameter.is_floating_point() or parameter.numel() < self.settings.min_elements:
            return False
        return self.settings.algorithm != POWERSGD or low_rank.is_worth(parameter.shape, self.settings.rank)

    def _kinds(self) -> dict[str, Kind]:
        settings, shapes = self.settings, self.compressed
        kept_by = self._matrices if settings.algorithm == "auto" else shapes
        kept_shapes = {name: shapes[name] for name in kept_by}
        residual = Kind(torch.bfloat16 if settings.residual_type == "bf16" else torch.float32, kept_shapes)
        kinds = (
            {"residual": residual} if kept_shapes and (settings.has_feedback or settings.algorithm == "auto") else {}
        )
        if kinds and self._fixed is not None and self._fixed.exchange == "two_phase":
            kinds["second"] = residual
        if self._matrices:
            factors = {name: (settings.rank, columns) for name, (_, columns) in self._matrices.items()}
            kinds[f"factor_{settings.rank}"] = Kind(torch.float32, factors)
        others = {
            "shift": settings.algorithm == "ef21",
            "mean_shift": settings.algorithm == "ef21",
            "momentum": settings.used_momentum,
        }
        return kinds | {kind: Kind(torch.float32, shapes) for kind, is_kept in others.items() if is_kept}

    def reset(self) -> None:
        """Forget everything, as before the first step."""
        self.kept.reset()
        if self._choice is not None:
            self._choice.reset()

    def use_tiers(self, tiers: NodeTiers) -> None:
        """Exchange compressed gradients only between nodes from now on."""
        self.tiers = tiers

    @property
    def can_use_tiers(self) -> bool:
        """Whether `scope` and algorithm allow tiers: sums are cheap in a node, and other algorithms keep state of all numbers."""
        name, fixed = self.settings.algorithm, self._fixed
        is_sum = name == POWERSGD or (fixed is not None and fixed.is_linear)
        return self.settings.scope == "nodes" and not (is_sum or name == "ef21" or self.settings.used_momentum)

    def names_of(self, parameters: Iterable[Tensor]) -> list[str]:
        return [self._names[id(one)] for one in parameters]

    def describe(self, ranks: int) -> str:
        """Return a log line with the algorithm and its traffic relative to that of dense gradients."""
        if self._choice is not None:
            names = [name for name in CANDIDATES if name != POWERSGD or self._matrices]
            return (
                f"auto ({self.settings.policy}): {', '.join(names)}; {len(self.compressed)} of {len(self._parameters)} "
                "parameters can be compressed"
            )
        total = sum(one.numel() for one in self._parameters.values())
        everything = self._bucket(list(self._parameters), list(self._parameters.values())) if total else Bucket("", 0)
        rest = Bucket("", total - everything.numbers, width=everything.width)
        dense = self._sent_bytes(Bucket("", total, width=everything.width), DENSE, ranks)
        sent = self._sent_bytes(everything, self.settings.algorithm, ranks) + self._sent_bytes(rest, DENSE, ranks)
        share = sent / dense if dense else 1.0
        unbiased = ", unbiased" if self._fixed is not None and self._fixed.is_unbiased else ""
        feedback = ", with error feedback" if self.settings.has_feedback else ""
        between = " between nodes" if self.tiers is not None else ""
        return (
            f"{self.settings.algorithm}{unbiased}{feedback}: {share:.1%} of the bytes of dense gradients{between}; "
            f"{len(self.compressed)} of {len(self._parameters)} parameters compressed"
        )

    def warnings(self, optimizer: str, steps: int) -> list[str]:
        """Return messages about settings that compress nothing, or are known to give a worse loss."""
        found, name, compressor = [], self.settings.algorithm, self._fixed
        least, dense = self.settings.min_elements, self.settings.dense_steps
        if self._parameters and not self.compressed:
            rank = f", rank = {self.settings.rank}" if name == POWERSGD else ""
            return [f"no parameter is large enough to be compressed (min_elements = {least}{rank})"]
        if 0 < dense >= steps:
            return [f"nothing is compressed, because dense_steps = {dense} covers the whole run"]
        if not (self.settings.has_feedback or name == "ef21"):
            return []
        suits_adam = ALGORITHMS[name].suits_adam and not (name == "powersgd" and self.settings.rank < 4)
        if optimizer != "sgd" and not suits_adam:
            found.append(f"bursts of error feedback disturb {optimizer}; expect a worse loss than with sgd")
        if compressor is not None and compressor.contraction is not None:
            sample = uniform((1, compressor.block * -(-10_000 // compressor.block)), torch.device("cpu"), 0) - 0.5
            delay = round(1 / compressor.contraction(sample))
            if delay > 1 and 10 * delay > steps:
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
        if self.kept.begin(names):
            # The last of 10 steps, so that a log of every 10th step has it.
            is_last = (self.kept.step + 1) % _MEASURED_EVERY == 0
            is_timed = is_last or self._device.type == "cpu"
            if self._choice is not None:
                is_timed |= self._choice.begin(self.kept.step, peers)
            self._measures = StepMeasures(is_timed, has_error=is_last)
        bucket = self._bucket(names, gradients)
        algorithm = self._algorithm_of(bucket)
        eligible = {DENSE: {}, POWERSGD: self._matrices}.get(algorithm, self.compressed)
        compressed = [(name, one) for name, one in zip(names, gradients, strict=True) if name in eligible]
        dense = [(name, one) for name, one in zip(names, gradients, strict=True) if name not in eligible]
        spent = Spent(self._device, is_measured=self._measures.is_measured)
        with spent.on(EXCHANGE):
            if dense:
                self._reduce_dense(dense, peers, spent)
            if algorithm == POWERSGD and compressed:
                self._factorise(compressed, peers, spent)
            elif any(one.numel() for _, one in compressed):  # not of shards without a row
                scale, parts = self.scale(), [one for _, one in compressed]
                together = _one_after_another(parts) if parts[0].dtype == torch.float32 else None
                flat = together if together is not None else _flat(one.float() for one in parts)
                flat = flat.div_(scale) if scale != 1 else flat
                mean = self._averaged(algorithm, [name for name, _ in compressed], flat, peers, spent)
                self._finish(mean.mul_(scale) if scale != 1 else mean, parts)
        sent = self._sent_bytes(bucket, algorithm, peers.size)
        rest = Bucket("", sum(one.numel() for one in gradients) - bucket.numbers, width=bucket.width)
        sent += self._sent_bytes(rest, DENSE, peers.size)
        self._measures.add(spent, sent)
        if self._choice is not None:
            self._choice.note(bucket, algorithm, spent, gradients, sent, self.scale())

    def measures(self) -> dict[str, float]:
        """Return the metrics of the last step by name, {} if it was not measured; waits for a GPU.

        Seconds of encoding, transfers and decoding, which may overlap, and of whole exchanges, measured and, with "auto",
        predicted; bytes that this rank sent, and per second of transfers; and the norm of what its messages lost, relative
        to what they were made from. On a GPU, every 10th step is measured, the error everywhere.
        """
        if not self._measures.is_measured:
            return {}
        found = {f"compression_{part}_s": seconds for part, seconds in self._measures.seconds.items()}
        if wire_s := self._measures.seconds[WIRE]:
            found["compression_bytes_per_s"] = self._measures.sent / wire_s
        if self._measures.encoded:
            whole = float(torch.stack(self._measures.encoded).sum())
            lost = float(torch.stack(self._measures.lost).sum())
            found["compression_error"] = (lost / whole) ** 0.5 if whole != 0 else 0.0
        if self._choice is not None and self._choice.predicted_s:
            found["compression_predicted_s"] = self._choice.predicted_s
        return found

    def _bucket(self, names: Sequence[str], gradients: Sequence[Tensor]) -> Bucket:
        here = [name for name in names if name in self.compressed]
        numbers = sum(self.compressed[name].numel() for name in here)
        matrices = tuple(self._matrices[name] for name in here if name in self._matrices)
        return Bucket(names[0], numbers, matrices, gradients[0].element_size())

    def _sent_bytes(self, bucket: Bucket, algorithm: str, ranks: int) -> float:
        """Return the bytes that a rank sends; in tiers, those to other nodes, on average over the ranks of a node."""
        per_node = self.tiers.node.size() if self.tiers is not None else 1
        nodes = ranks // per_node
        dense = 2 * bucket.width * (nodes - 1) / nodes / per_node  # bytes per number, of a ring
        if algorithm in self._compressors:
            return sent_bytes(-(-bucket.numbers // per_node), self._compressors[algorithm], nodes)
        if algorithm == POWERSGD:
            thin = 4 / bucket.width * self.settings.rank * sum(a + b for a, b in bucket.matrices)
            return dense * (thin + bucket.numbers - sum(a * b for a, b in bucket.matrices))
        return dense * bucket.numbers

    def _algorithm_of(self, bucket: Bucket) -> str:
        if self.kept.step < self.settings.dense_steps:
            return DENSE
        return self._choice.algorithm_of(bucket) if self._choice is not None else self.settings.algorithm

    def _reduce_dense(self, named: Sequence[tuple[str, Tensor]], peers: Peers, spent: Spent) -> None:
        gradients = [one for _, one in named]
        for name, gradient in named:
            if self.kept.holds("residual", [name]):  # of another algorithm, before
                residual = self.kept.read("residual", [name]).mul_(self.settings.residual_decay * self.scale())
                gradient += residual.view(gradient.shape)
                self.kept.clear("residual", [name])
        together = _one_after_another(gradients)
        flat = (together if together is not None else _flat(gradients)).div_(peers.size)
        with spent.on(WIRE):
            backend_all_reduce(flat, "sum", peers.group)
        if together is None:
            self._finish(flat, gradients)
        else:
            self.kept.check(flat)

    def _finish(self, mean: Tensor, gradients: Sequence[Tensor]) -> None:
        self.kept.check(mean)
        if mean.data_ptr() == gradients[0].data_ptr():
            return
        for gradient, part in zip(gradients, mean.split([one.numel() for one in gradients]), strict=True):
            gradient.copy_(part.view(gradient.shape))

    def _averaged(self, algorithm: str, names: list[str], gradient: Tensor, peers: Peers, spent: Spent) -> Tensor:
        """Return the mean over the ranks of gradients, fp32 in one tensor."""
        kept, settings = self.kept, self.settings
        # One number that is not finite makes all NaN, so that each of these algorithms sends it.
        x = gradient.add_(gradient.sum() * 0)
        if algorithm == "ef21":
            return self._shifted(names, x, peers, spent)
        before = velocity = None
        if settings.used_momentum:
            x = velocity = kept.read("momentum", names).mul_(settings.used_momentum).add_(x)
        if held := [name for name in names if kept.holds("residual", [name])]:
            # With "auto", only matrices have residuals.
            zeros = {name: x.new_zeros(self.compressed[name]) for name in names if name not in held}
            parts = (zeros[name] if name in zeros else kept.read("residual", [name]) for name in names)
            residual = _flat(parts) if zeros else kept.read("residual", names)
            x = residual.mul_(settings.residual_decay).add_(x)
        if "second" in kept.kinds:
            before = kept.read("second", names).mul_(settings.residual_decay)
        found = self._exchange(x, algorithm, peers, self._seed_of(names), before, spent)
        if found.own is not None and self._measures.has_error:
            self._measures.note_error(x, found.own, self.tiers.node.size() if self.tiers is not None else 1)
        if before is not None and found.lost is not None:
            # Ranges of ranks change with the buckets: what this rank lost elsewhere is now part of its residual.
            owned, lost = found.lost
            before[owned] = 0
            x.add_(before, alpha=peers.size)
            before.zero_()[owned] = lost
            kept.write("second", names, before)
        if found.own is not None:
            if settings.has_feedback:
                kept.write("residual", names, x.sub_(found.own) if held else x - found.own)
            if velocity is not None:
                kept.write("momentum", names, velocity.mul_(found.own == 0))
        if held and not settings.has_feedback:
            kept.clear("residual", held)
        return found.mean

    def _exchange(
        self, x: Tensor, algorithm: str, peers: Peers, seed: int, before: Tensor | None, spent: Spent
    ) -> Exchanged:
        compressor = self._compressors[algorithm]
        wants_own = self.settings.has_feedback or self._measures.has_error
        if self.tiers is not None:
            return exchange_between_nodes(x, compressor, self.tiers, seed, before, spent, wants_own=wants_own)
        return exchange(x, compressor, peers, seed, before, spent, wants_own=wants_own)

    def _shifted(self, names: list[str], x: Tensor, peers: Peers, spent: Spent) -> Tensor:
        """EF21 (arXiv:2106.05203): ranks send compressed differences to shifts, whose mean is the result.

        With momentum, shifts follow the moving average of the gradients (arXiv:2305.15155).
        """
        kept, momentum = self.kept, self.settings.momentum
        if momentum:
            x = kept.read("momentum", names).mul_(momentum).add_(x, alpha=1 - momentum)
        shift, mean = kept.read("shift", names), kept.read("mean_shift", names)
        found = exchange(x - shift, self._compressors["ef21"], peers, self._seed_of(names), spent=spent)
        assert found.own is not None
        if self._measures.has_error:
            self._measures.note_error(x, shift + found.own)
        mean += found.mean
        written = {"shift": shift.add_(found.own), "mean_shift": mean} | ({"momentum": x} if momentum else {})
        for kind, values in written.items():
            kept.write(kind, names, values)
        return mean

    def _factorise(self, named: Sequence[tuple[str, Tensor]], peers: Peers, spent: Spent) -> None:
        """Replace gradients of matrices by their approximate means, one matrix at a time, with few passes over memory."""
        kept, scale, names = self.kept, self.scale(), [name for name, _ in named]
        kind, has_feedback = f"factor_{self.settings.rank}", "residual" in kept.kinds
        with spent.on(ENCODE):
            matrices = [self._as_sent(name, gradient, scale, is_kept=has_feedback) for name, gradient in named]
        factors = [kept.read(kind, [name]).view(self.settings.rank, -1) for name in names]
        found = low_rank.average(matrices, factors, peers, self._seed_of(names), spent)
        kept.write(kind, names, _flat(right for _, right in found))
        with spent.on(DECODE):
            for (name, gradient), matrix, (left, right) in zip(named, matrices, found, strict=True):
                mean = left @ right
                kept.check(mean)
                if self._measures.has_error:
                    self._measures.note_error(matrix, mean)
                if has_feedback:
                    kept.write("residual", [name], matrix.sub_(mean).reshape(-1))
                gradient.copy_((mean.mul_(scale) if scale != 1 else mean).view(gradient.shape))

    def _as_sent(self, name: str, gradient: Tensor, scale: float, *, is_kept: bool) -> Tensor:
        """Return an fp32 matrix of this gradient, with its residual; another tensor, if the result is to be written."""
        matrix = gradient.reshape(self._matrices[name])
        if self.kept.holds("residual", [name]):
            residual = self.kept.tensor_of("residual", name).float().view(matrix.shape)
            if self.settings.residual_decay != 1:
                residual = residual * self.settings.residual_decay
            return torch.add(residual, matrix, alpha=1 / scale)
        if scale != 1:
            return matrix.float() / scale
        return matrix.to(torch.float32, copy=is_kept, memory_format=torch.contiguous_format)

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
        if self._choice is not None:
            self._choice.reset()


def _one_after_another(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return tensors that follow each other in memory, as a bucket of DDP, as one; None if they do not."""
    end, memory = tensors[0].data_ptr(), tensors[0].untyped_storage().data_ptr()
    for one in tensors:
        # Separate blocks can be neighbours, too.
        if one.data_ptr() != end or one.untyped_storage().data_ptr() != memory:
            return None
        if not one.is_contiguous() or one.dtype != tensors[0].dtype:
            return None
        end += one.nbytes
    return tensors[0].as_strided((sum(one.numel() for one in tensors),), (1,))


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([one.reshape(-1) for one in tensors])
