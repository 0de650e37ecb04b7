"""`algorithm = "auto"`: dense, bf16 or int8 messages, whichever is fastest by the times of the run's own exchanges.

A candidate takes C n + L m + B / rate seconds for n numbers: C is the time to encode and decode one, L the latency of one
of m transfers, B the bytes that a rank sends. The transfers of the last steps, without their latency, give the rate. Once a
candidate was in use, its steps give C, when cores are as busy as they are; before, a trial does. Ranks wait for each other in
a transfer, so the fastest rank's time counts, and of C the slowest rank's. Each of the candidates can follow another at any
step, because none keeps a residual.
"""

import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist

from toolkit.comm.compression.algorithms import BUILD
from toolkit.comm.compression.compressor import Compressor
from toolkit.comm.compression.exchange import sent_bytes
from toolkit.comm.peers import Peers
from toolkit.comm.reductions import backend_all_reduce
from toolkit.config.gradient_compression import GradientCompressionTable

DENSE = "none"
CANDIDATES = (DENSE, "bf16", "int8")
_FIRST, _EVERY = 10, 50  # steps before the first decision, and between two
_GAIN = 1.15  # a candidate must be this many times as fast as what it replaces
_TRANSFERS = {DENSE: 1, "bf16": 3, "int8": 3}  # per bucket: two phases, and dense ones of small parameters
_SAMPLE = 1 << 18  # numbers that are encoded to measure C


class AutomaticChoice:
    """The candidate of the current step, the same on all ranks.

    Attributes:
        algorithm: one of `CANDIDATES`.
    """

    def __init__(self, table: GradientCompressionTable, device: torch.device) -> None:
        self.algorithm = DENSE
        self._device = device
        self._compressors = {name: BUILD[name](table) for name in CANDIDATES if name != DENSE}
        self._coding_s: dict[str, float] = {}  # per number
        self._step, self._numbers, self._buckets = 0, 0, 0
        self._exchange_s: list[float] = []  # of each step since the last decision
        self._wire_s: list[float] = []  # of them, the transfers

    @property
    def compressor(self) -> Compressor | None:
        """The compressor of the current step; None for dense messages."""
        return self._compressors.get(self.algorithm)

    def begin(self, step: int, peers: Peers) -> None:
        """Note that an exchange of step `step`, from 0, begins, and decide at each 50th new step. Collective."""
        if step == self._step and self._wire_s:
            return
        if self._wire_s and step % _EVERY == _FIRST:
            self._decide(step, peers)
            self._exchange_s, self._wire_s = [], []
        self._step, self._numbers, self._buckets = step, 0, 0
        self._exchange_s.append(0.0)
        self._wire_s.append(0.0)

    @contextmanager
    def exchanging(self, numbers: int) -> Iterator[None]:
        """Add the time of an exchange of `numbers` gradients to this step."""
        with self._timed(self._exchange_s):
            yield
        self._numbers += numbers
        self._buckets += 1

    def wire(self) -> AbstractContextManager[None]:
        """Return a context that adds the time of a transfer to this step."""
        return self._timed(self._wire_s)

    @contextmanager
    def _timed(self, seconds: list[float]) -> Iterator[None]:
        self._synchronize()
        begun = time.perf_counter()
        yield
        self._synchronize()
        seconds[-1] += time.perf_counter() - begun

    def _decide(self, step: int, peers: Peers) -> None:
        if self.algorithm != DENSE:
            coding = [whole - wire for whole, wire in zip(self._exchange_s, self._wire_s, strict=True)]
            self._coding_s[self.algorithm] = statistics.median(coding) / max(1, self._numbers)
        for name, compressor in self._compressors.items():
            if name not in self._coding_s:
                self._coding_s[name] = _coding_s(compressor, self._device)
        expected = self._expected_s(peers)
        before, self.algorithm = self.algorithm, chosen(self.algorithm, expected)
        if dist.get_rank() == 0 and (step == _FIRST or before != self.algorithm):
            times = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in expected.items())
            sys.stderr.write(
                f"gradient compression: {self.algorithm} after {step} steps; expected exchanges per step: {times}\n"
            )

    def _expected_s(self, peers: Peers) -> dict[str, float]:
        """Return the seconds per step of each candidate. Collective."""
        fastest = torch.tensor([*self._wire_s, self._latency_s(peers)], dtype=torch.float64, device=self._device)
        backend_all_reduce(fastest, "min", peers.group)
        *wire_s, latency_s = fastest.tolist()
        slowest = torch.tensor(
            [self._coding_s[name] for name in self._compressors], dtype=torch.float64, device=self._device
        )
        backend_all_reduce(slowest, "max", peers.group)
        coding_s = {DENSE: 0.0} | dict(zip(self._compressors, (slowest * self._numbers).tolist(), strict=True))
        waits_s = {name: latency_s * number * self._buckets for name, number in _TRANSFERS.items()}
        sent = {DENSE: 8 * (peers.size - 1) / peers.size * self._numbers} | {
            name: sent_bytes(self._numbers, one, peers.size) for name, one in self._compressors.items()
        }
        per_byte_s = max(0.0, statistics.median(wire_s) - waits_s[self.algorithm]) / max(1.0, sent[self.algorithm])
        return {name: coding_s[name] + waits_s[name] + sent[name] * per_byte_s for name in CANDIDATES}

    def _latency_s(self, peers: Peers) -> float:
        """Return the median seconds of a transfer of one number. Collective."""
        number, found = torch.zeros(1, device=self._device), []
        for _ in range(5):
            with self._timed(seconds := [0.0]):
                dist.all_reduce(number, group=peers.group)
            found += seconds
        return statistics.median(found)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def chosen(current: str, expected_s: dict[str, float]) -> str:
    """Return the candidate that replaces `current`, or `current`: dense as soon as it is faster, others if they gain enough."""
    best = min(expected_s, key=lambda name: expected_s[name])
    if current != DENSE and expected_s[DENSE] < expected_s[current] and best == DENSE:
        return DENSE
    return best if expected_s[current] >= _GAIN * expected_s[best] else current


def _coding_s(compressor: Compressor, device: torch.device) -> float:
    """Return the seconds to encode and decode one number, as two phases do: encoded once, decoded three times."""
    values = torch.randn(1, _SAMPLE, device=device)
    found = []
    for _ in range(3):
        begun = time.perf_counter()
        message = compressor.encode(values, 0)
        for _ in range(3):
            compressor.decode(message, _SAMPLE, 0)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - begun)
    return statistics.median(found) / _SAMPLE
