"""`algorithm = "auto"`: an algorithm for each bucket, by one of four policies.

`bandwidth_aware` takes the fastest of dense, bf16, int8 and PowerSGD. A candidate takes C n + L m + B / rate seconds for n
numbers: L is the latency of one of m transfers, B the bytes that a rank sends, and C what else an exchange takes per
number: encoding, decoding, and waits between two transfers. Dense transfers before each decision give L and the rate. C is
the rest of real exchanges, in three trial steps of each candidate and in the last steps that used it; every tenth decision
starts with new trials. The shortest time of all ranks counts: that of the rank that came last, for which others waited.

`loss_aware` sends more while the gradient's norm changes (Accordion, arXiv:2010.16248).
"""

import math
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.comm.compression.spent import EXCHANGE, WIRE, Spent
from toolkit.comm.peers import Peers
from toolkit.comm.reductions import backend_all_reduce
from toolkit.config.gradient_compression import GradientCompressionTable

DENSE, POWERSGD = "none", "powersgd"
CANDIDATES = (DENSE, "bf16", "int8", POWERSGD)
_FIRST, _EVERY = 10, 50  # steps before the first decision, and between two
_RETRIED = 10  # decisions after which C may be out of date
_GAIN = 1.15  # a candidate must be this many times as fast as what it replaces
_CRITICAL = 0.5  # relative change of the norm in which `loss_aware` sends more
_TRANSFERS = {DENSE: 1, "bf16": 3, "int8": 3, POWERSGD: 3}  # with a dense one of small parameters
_MEASURED = 3  # steps of a trial, and last ones before a decision
_FEWEST, _MOST = 1 << 14, 1 << 22  # numbers of the transfers that give the rate, four times as many until one is long
_LONG_S = 0.05


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
class Use:
    """The exchanges of one step with one algorithm: their seconds, and what the link carried."""

    seconds: float = 0.0
    numbers: int = 0
    transfers: int = 0
    sent: float = 0.0  # bytes


class AutomaticChoice:
    """The algorithm of each bucket in the current step, the same on all ranks."""

    def __init__(
        self, table: GradientCompressionTable, candidates: Sequence[str], device: torch.device,
        sent_bytes: Callable[[Bucket, str, int], float],
    ) -> None:  # fmt: skip
        """Choose among dense gradients and `candidates`.

        Args:
            sent_bytes: returns the bytes that a rank sends for a bucket, an algorithm, and a number of ranks.
        """
        self.predicted_s = 0.0  # of all exchanges of a step, since the last decision
        self._table, self._device, self._sent_bytes = table, device, sent_bytes
        self._names = candidates
        self._by_bucket: dict[str, str] = {}
        self._buckets: dict[str, Bucket] = {}  # of this step
        self._other_s = {DENSE: 0.0}  # C of each candidate
        self._due: int | None = None  # the step before which trials or the next decision begin
        self._decisions = 0
        self._trials: list[str] = []  # the candidates of this and the next steps
        self._is_measured = False  # whether uses of this step count
        self._uses: list[defaultdict[str, Use]] = []  # by algorithm, of each measured step since the last decision
        self._norms: dict[str, Tensor] = {}
        self._norms_before: dict[str, float] = {}

    def reset(self) -> None:
        """Forget all choices and times, as before the first step."""
        self._by_bucket, self._buckets, self._other_s, self._trials, self._uses = {}, {}, {DENSE: 0.0}, [], []
        self._due, self._decisions, self._norms_before, self.predicted_s = None, 0, {}, 0.0

    def begin(self, step: int, peers: Peers) -> bool:
        """Note that step `step`, from 0, begins; return whether its exchanges must be measured.

        Decides, which is collective, after 10 steps and those of `dense_steps`, then at each 50th one, and before that
        starts trials of candidates whose C is unknown.
        """
        is_timed = self._table.policy == "bandwidth_aware"
        if self._due is None:
            self._due = max(step + _FIRST, self._table.dense_steps)
        was_trial, self._trials = bool(self._trials), self._trials[1:]
        is_due = step == self._due
        if is_due:
            self._due += _EVERY
            self._decisions += 1
            if self._decisions % _RETRIED == 0:
                self._other_s = {DENSE: 0.0}
            if is_timed:
                self._trials = [
                    name for name in self._candidates() if name not in self._other_s for _ in range(_MEASURED)
                ]
        if (is_due or was_trial) and not self._trials and self._buckets:
            before, expected_s = dict(self._by_bucket), self._decide(peers)
            if dist.get_rank() == 0 and before != self._by_bucket:
                sys.stderr.write(f"gradient compression: {self._line(step, expected_s)}\n")
            self._uses = []
        self._buckets = {}
        self._is_measured = is_timed and (bool(self._trials) or self._due - step <= _MEASURED)
        if self._is_measured:
            self._uses.append(defaultdict(Use))
        return self._is_measured

    def algorithm_of(self, bucket: Bucket) -> str:
        """Return the algorithm of this bucket in this step."""
        if self._trials and (bucket.matrices or self._trials[0] != POWERSGD):
            return self._trials[0]
        return self._chosen(bucket)

    def note(
        self, bucket: Bucket, algorithm: str, spent: Spent, mean: Sequence[Tensor], sent: float, scale: float
    ) -> None:
        """Add an exchange of this step, with all bytes that a rank sent, and its result with the scale of the loss."""
        if not bucket.numbers:  # nothing is chosen for it
            return
        self._buckets[bucket.name] = bucket
        if self._is_measured:
            use = self._uses[-1][algorithm]
            use.seconds += spent.seconds(EXCHANGE)
            use.numbers += bucket.numbers
            use.transfers += _TRANSFERS[algorithm]
            use.sent += sent
        if self._table.policy == "loss_aware":
            self._norms[bucket.name] = torch.stack([one.norm() for one in mean]).norm() / scale

    def _chosen(self, bucket: Bucket) -> str:
        default = "int8" if self._table.policy == "conservative" else DENSE
        return self._by_bucket.get(bucket.name, default)

    def _candidates(self) -> list[str]:
        has_matrices = any(bucket.matrices for bucket in self._buckets.values())
        return [DENSE, *(name for name in self._names if has_matrices or name != POWERSGD)]

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
        latency_s, per_byte_s = self._link(peers)
        self._other_s |= self._measured(latency_s, per_byte_s, peers)
        total = {name: 0.0 for name in self._candidates() if name in self._other_s}
        self.predicted_s = 0.0
        for name, bucket in self._buckets.items():
            expected = {
                one: self._other_s[one] * bucket.numbers + latency_s * _TRANSFERS[one]
                + per_byte_s * self._sent_bytes(bucket, one, peers.size)
                for one in total
            }  # fmt: skip
            for one, seconds in expected.items():
                total[one] += seconds
            if not bucket.matrices:
                expected.pop(POWERSGD, None)
            current = self._chosen(bucket)
            self._by_bucket[name] = chosen(current if current in expected else DENSE, expected)
            self.predicted_s += expected[self._by_bucket[name]]
        return total

    def _link(self, peers: Peers) -> tuple[float, float]:
        """Return the seconds of a transfer of one number, and those per byte of long ones. Collective."""
        latency_s, numbers = self._transfer_s(1, peers), _FEWEST
        most = min(_MOST, max(bucket.numbers for bucket in self._buckets.values()))
        while (seconds := self._transfer_s(numbers, peers)) < _LONG_S and numbers < most:
            numbers *= 4
        return latency_s, max(0.0, seconds - latency_s) / self._sent_bytes(Bucket("", numbers), DENSE, peers.size)

    def _transfer_s(self, numbers: int, peers: Peers) -> float:
        """Return the median seconds of a dense exchange of this many numbers. Collective."""
        values, found = torch.zeros(numbers, device=self._device), []
        for _ in range(5 if numbers < _FEWEST else 3):
            spent = Spent(self._device)
            with spent.on(WIRE):
                dist.all_reduce(values, group=peers.group)
            found.append(spent.seconds(WIRE))
        return self._fastest([statistics.median(found)], peers)[0]

    def _measured(self, latency_s: float, per_byte_s: float, peers: Peers) -> dict[str, float]:
        """Return C of the algorithms that enough numbers used. Collective."""
        numbers, found = sum(bucket.numbers for bucket in self._buckets.values()), {}
        for name in sorted({name for uses in self._uses for name in uses} - {DENSE}):
            uses = [uses[name] for uses in self._uses if name in uses]
            if name in self._other_s and uses[-1].numbers < numbers / 2:  # what is constant per exchange prevails
                continue
            seconds = statistics.median(self._fastest([one.seconds for one in uses], peers))
            link_s = latency_s * uses[-1].transfers + per_byte_s * uses[-1].sent
            found[name] = max(0.0, seconds - link_s) / uses[-1].numbers
        return found

    def _fastest(self, seconds: Sequence[float], peers: Peers) -> list[float]:
        """Return the shortest of each over the ranks. Collective."""
        found = torch.tensor(seconds, dtype=torch.float64, device=self._device)
        backend_all_reduce(found, "min", peers.group)
        return [float(one) for one in found.tolist()]


def chosen(current: str, expected_s: Mapping[str, float]) -> str:
    """Return the candidate that replaces `current`, or `current`: dense as soon as it is faster, others if they gain enough."""
    best = min(expected_s, key=lambda name: expected_s[name])
    if best == DENSE and expected_s[DENSE] < expected_s[current]:
        return DENSE
    return best if expected_s[current] >= _GAIN * expected_s[best] else current
