"""`algorithm = "auto"`: an algorithm for each bucket, by one of four policies.

`bandwidth_aware` takes the fastest of dense, bf16, int8 and PowerSGD by the times of the run's own exchanges. A candidate
takes C n + L m + B / rate seconds for n numbers: C is the time to encode and decode one, L the latency of one of m
transfers, B the bytes that a rank sends. The transfers of the last steps, without their latency, give the rate. C is that of
the last steps that used a candidate, or of a trial. Ranks wait for each other in a transfer, so the fastest rank's time
counts, and of C the slowest rank's.

`loss_aware` sends more while the gradient's norm changes (Accordion, arXiv:2010.16248).
"""

import math
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.comm.compression import low_rank
from toolkit.comm.compression.compressor import Compressor
from toolkit.comm.compression.spent import EXCHANGE, WIRE, Spent
from toolkit.comm.peers import Peers
from toolkit.comm.reductions import backend_all_reduce
from toolkit.config.gradient_compression import GradientCompressionTable

DENSE, POWERSGD = "none", "powersgd"
CANDIDATES = (DENSE, "bf16", "int8", POWERSGD)
_FIRST, _EVERY = 10, 50  # steps before the first decision, and between two
_GAIN = 1.15  # a candidate must be this many times as fast as what it replaces
_CRITICAL = 0.5  # relative change of the norm in which `loss_aware` sends more
_TRANSFERS = {DENSE: 1, "bf16": 3, "int8": 3, POWERSGD: 3}  # with a dense one of small parameters
_SAMPLE, _COLUMNS = 1 << 22, 512  # numbers that are encoded at most to measure C, in rows of this length


@dataclass(frozen=True)
class Bucket:
    """What is exchanged together: the number of gradients that can be compressed, and the shapes of matrices among them.

    `name` is that of the first parameter.
    """

    name: str
    numbers: int
    matrices: tuple[tuple[int, int], ...] = ()
    width: int = 4  # bytes per gradient


@dataclass
class _StepTimes:
    """Of one step: the seconds of transfers, what was sent in them, and the time and size of coding by algorithm."""

    wire_s: float = 0.0
    sent: float = 0.0  # bytes
    transfers: int = 0

    coding_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    numbers: Counter[str] = field(default_factory=Counter)


class AutomaticChoice:
    """The algorithm of each bucket in the current step, the same on all ranks."""

    def __init__(
        self, table: GradientCompressionTable, compressors: Mapping[str, Compressor], device: torch.device,
        sent_bytes: Callable[[Bucket, str, int], float],
    ) -> None:  # fmt: skip
        """Choose among the `compressors` and PowerSGD.

        Args:
            sent_bytes: returns the bytes that a rank sends for a bucket, an algorithm, and a number of ranks.
        """
        self.predicted_s = 0.0  # of all exchanges of a step, since the last decision
        self._table, self._device, self._sent_bytes = table, device, sent_bytes
        self._compressors = {name: compressors[name] for name in CANDIDATES if name in compressors}
        self._by_bucket: dict[str, str] = {}
        self._buckets: dict[str, Bucket] = {}  # of this step
        self._coding_s: dict[str, float] = {}  # per number
        self._times: list[_StepTimes] = []  # since the last decision
        self._norms: dict[str, Tensor] = {}
        self._norms_before: dict[str, float] = {}

    def reset(self) -> None:
        """Forget all choices and times, as before the first step."""
        self._by_bucket, self._buckets, self._coding_s, self._times = {}, {}, {}, []
        self._norms_before, self.predicted_s = {}, 0.0

    def begin(self, step: int, peers: Peers) -> None:
        """Note that step `step`, from 0, begins, and decide at each 50th one from step 10 on. Collective."""
        if step % _EVERY == _FIRST and self._buckets:
            before, expected_s = dict(self._by_bucket), self._decide(peers)
            if dist.get_rank() == 0 and (step == _FIRST or before != self._by_bucket):
                sys.stderr.write(f"gradient compression: {self._line(step, expected_s)}\n")
            self._times = []
        self._buckets = {}
        self._times.append(_StepTimes())

    def algorithm_of(self, bucket: Bucket) -> str:
        """Return the algorithm of this bucket in this step."""
        default = "int8" if self._table.policy == "conservative" else DENSE
        return self._by_bucket.get(bucket.name, default)

    def note(
        self, bucket: Bucket, algorithm: str, spent: Spent, mean: Sequence[Tensor], sent: float, scale: float
    ) -> None:
        """Add an exchange of this step, with all bytes that a rank sent, and its result with the scale of the loss."""
        times = self._times[-1]
        times.wire_s += spent.seconds(WIRE)
        times.sent += sent
        times.transfers += _TRANSFERS[algorithm]
        if not bucket.numbers:  # its time says nothing about coding
            return
        self._buckets[bucket.name] = bucket
        times.coding_s[algorithm] += spent.seconds(EXCHANGE) - spent.seconds(WIRE)
        times.numbers[algorithm] += bucket.numbers
        if self._table.policy == "loss_aware":
            self._norms[bucket.name] = torch.stack([one.norm() for one in mean]).norm() / scale

    def _line(self, step: int, expected_s: Mapping[str, float]) -> str:
        numbers: Counter[str] = Counter()
        for name, bucket in self._buckets.items():
            numbers[self._by_bucket[name]] += bucket.numbers
        parts = [f"{name} {count / numbers.total():.0%}" for name, count in numbers.most_common()]
        chosen_now = next(iter(numbers)) if len(numbers) == 1 else ", ".join(parts)
        times = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in expected_s.items())
        return f"{chosen_now} after {step} steps" + (f"; expected exchanges per step: {times}" if times else "")

    def _decide(self, peers: Peers) -> dict[str, float]:
        """Choose for all buckets; return the expected seconds per step of each candidate, if times decide."""
        policy = self._table.policy
        if policy == "bandwidth_aware":
            return self._decide_by_times(peers)
        for name, bucket in self._buckets.items():
            is_changing = policy == "loss_aware" and self._is_critical(name)
            slim = POWERSGD if bucket.matrices else "int8"
            self._by_bucket[name] = "int8" if policy == "conservative" or is_changing else slim
        return {}

    def _is_critical(self, name: str) -> bool:
        """Return whether the norm of the mean gradient, equal on all ranks, changed much since the last decision."""
        norm = float(self._norms[name])
        if not math.isfinite(norm):  # an overflow, whose step is skipped
            return True
        before, self._norms_before[name] = self._norms_before.get(name, 0.0), norm
        return not abs(before - norm) < _CRITICAL * before

    def _decide_by_times(self, peers: Peers) -> dict[str, float]:
        candidates = [DENSE, *self._compressors]
        if any(bucket.matrices for bucket in self._buckets.values()):
            candidates.append(POWERSGD)
        per_byte_s, latency_s, coding_s = self._measured(candidates, peers)
        total = dict.fromkeys(candidates, 0.0)
        self.predicted_s = 0.0
        for name, bucket in self._buckets.items():
            expected = {
                one: coding_s[one] * bucket.numbers + latency_s * _TRANSFERS[one]
                + per_byte_s * self._sent_bytes(bucket, one, peers.size)
                for one in candidates
            }  # fmt: skip
            for one, seconds in expected.items():
                total[one] += seconds
            if not bucket.matrices:
                expected.pop(POWERSGD, None)
            current = self.algorithm_of(bucket)
            self._by_bucket[name] = chosen(current if current in expected else DENSE, expected)
            self.predicted_s += expected[self._by_bucket[name]]
        return total

    def _measured(self, candidates: Sequence[str], peers: Peers) -> tuple[float, float, dict[str, float]]:
        """Return seconds per byte, per transfer, and per number of each candidate; the same on all ranks. Collective."""
        last = self._times[-1]
        alike = [one for one in self._times if (one.sent, one.numbers) == (last.sent, last.numbers)]
        for algorithm, count in last.numbers.items():
            self._coding_s[algorithm] = statistics.median(one.coding_s[algorithm] for one in alike) / count
        for name in candidates:
            if name not in self._coding_s:
                self._coding_s[name] = self._trial_s(name)
        fastest = [*(one.wire_s for one in alike), self._latency_s(peers)]
        *wire_s, latency_s = self._agreed(fastest, "min", peers)
        coding_s = self._agreed([self._coding_s[name] for name in candidates], "max", peers)
        per_byte_s = max(0.0, statistics.median(wire_s) - latency_s * last.transfers) / max(1.0, last.sent)
        return per_byte_s, latency_s, dict(zip(candidates, coding_s, strict=True))

    def _agreed(self, values: Sequence[float], op: str, peers: Peers) -> list[float]:
        found = torch.tensor(values, dtype=torch.float64, device=self._device)
        backend_all_reduce(found, op, peers.group)
        return [float(one) for one in found.tolist()]

    def _latency_s(self, peers: Peers) -> float:
        """Return the median seconds of a transfer of one number. Collective."""
        number, found = torch.zeros(1, device=self._device), []
        for _ in range(5):
            spent = Spent(self._device)
            with spent.on(WIRE):
                dist.all_reduce(number, group=peers.group)
            found.append(spent.seconds(WIRE))
        return statistics.median(found)

    def _trial_s(self, name: str) -> float:
        """Return the seconds per number that an exchange takes on this rank beside its transfers, copies included."""
        if name == DENSE:
            return 0.0
        numbers = min(_SAMPLE, max(bucket.numbers for bucket in self._buckets.values()))
        sample, found = torch.randn(-(-numbers // _COLUMNS), _COLUMNS, device=self._device), []
        for _ in range(3):
            begun = time.perf_counter()
            x = sample.clone()
            mean = self._factorised(x) if name == POWERSGD else self._recoded(x, self._compressors[name])
            x.view(-1)[: mean.numel()] = mean
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            found.append(time.perf_counter() - begun)
        return statistics.median(found) / sample.numel()

    def _factorised(self, x: Tensor) -> Tensor:
        kept = torch.cat([x])
        factor = torch.zeros(self._table.rank, x.shape[1], device=self._device)
        (mean,), _ = low_rank.average([kept.add_(x)], [factor], Peers(None, (0,), 0), 0)
        kept.sub_(mean)
        return torch.cat([mean]).view(-1)

    @staticmethod
    def _recoded(x: Tensor, compressor: Compressor) -> Tensor:
        """Encode all numbers once and decode them twice, as two phases do."""
        whole = x.view(1, -1)[:, : x.numel() // compressor.block * compressor.block]
        message = compressor.encode(whole, 0)
        compressor.decode(message, whole.shape[1], 0)
        return compressor.decode(message, whole.shape[1], 0).view(-1)


def chosen(current: str, expected_s: Mapping[str, float]) -> str:
    """Return the candidate that replaces `current`, or `current`: dense as soon as it is faster, others if they gain enough."""
    best = min(expected_s, key=lambda name: expected_s[name])
    if best == DENSE and expected_s[DENSE] < expected_s[current]:
        return DENSE
    return best if expected_s[current] >= _GAIN * expected_s[best] else current
