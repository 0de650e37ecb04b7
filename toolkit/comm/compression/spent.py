"""Where the seconds of an exchange go: encoding, decoding, transfers, and those of dense gradients in a node."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.comm.compression.compressor import Compressor

ENCODE, DECODE, WIRE, NODE, EXCHANGE = "encode", "decode", "wire", "node", "exchange"


class Spent:
    """The seconds of one exchange by part; those of transfers at the same time, or during encoding, count once in "wire".

    On a GPU each reading waits for the device, so that `is_measured` should be set in some steps only.
    """

    def __init__(self, device: torch.device, *, is_measured: bool = True) -> None:
        self.is_measured = is_measured
        self._device = device
        self._intervals: dict[str, list[tuple[float, float]]] = {}

    def seconds(self, part: str) -> float:
        """Return the time in which at least one operation of this part was in progress."""
        total, reached = 0.0, 0.0
        for begun, ended in sorted(self._intervals.get(part, ())):
            total += max(0.0, ended - max(begun, reached))
            reached = max(reached, ended)
        return total

    @contextmanager
    def on(self, part: str) -> Iterator[None]:
        """Add the time of this context to `part`."""
        begun = self._now()
        yield
        self._add(part, begun, self._now())

    def transfer(self, start: Callable[[], dist.Work]) -> Callable[[], None]:
        """Start a transfer between CPUs and return what waits for it; its end counts also if it comes before the wait."""
        begun = time.perf_counter()
        work = start()
        # The future of `then` is complete after the callback; a wait for the work may return before it.
        noted = work.get_future().then(lambda _: self._add(WIRE, begun, time.perf_counter()))

        def wait() -> None:
            work.wait()
            noted.wait()

        return wait

    def coding(self, compressor: Compressor) -> Compressor:
        """Return a compressor whose time counts."""

        def timed(part: str, call: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def run(*arguments: Any) -> Tensor:
                with self.on(part):
                    return call(*arguments)

            return run

        return replace(compressor, encode=timed(ENCODE, compressor.encode), decode=timed(DECODE, compressor.decode))

    def _add(self, part: str, begun: float, ended: float) -> None:
        if self.is_measured:
            self._intervals.setdefault(part, []).append((begun, ended))

    def _now(self) -> float:
        if self.is_measured and self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return time.perf_counter()


@dataclass
class StepMeasures:
    """What the exchanges of one step took: seconds by part, and the squares of what was encoded, and of what it lost."""

    is_measured: bool = False
    has_error: bool = False
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys((ENCODE, WIRE, DECODE, EXCHANGE), 0.0))
    sent: float = 0.0  # bytes
    encoded: list[Tensor] = field(default_factory=list)
    lost: list[Tensor] = field(default_factory=list)

    def note_error(self, x: Tensor, own: Tensor, ranks: int = 1) -> None:
        """Add what was encoded and what others decode of it; a loss counts `ranks` times in a node with as many ranks."""
        self.encoded.append(x.square().sum())
        self.lost.append((x - own).square().sum() / ranks)

    def add(self, spent: Spent, sent: float) -> None:
        self.sent += sent
        self.seconds = {part: seconds + spent.seconds(part) for part, seconds in self.seconds.items()}
