"""Count the bytes that a rank uses in each phase of a step, and those of its activations and gradients."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from toolkit.metrics.phases import Profile
from toolkit.metrics.step_profile import BACKWARD, FORWARD, OPTIMIZER
from toolkit.train.memory.local_parts import bytes_on

__all__ = ["PHASES", "Meter", "meter_of"]

PHASES = (FORWARD, BACKWARD, OPTIMIZER)


class Meter(Profile):
    """A profile of bytes instead of times.

    `peaks` are by phase; `activations` those of a forward pass, without parameters that FSDP2 gathers. `used` returns the
    bytes in use, `peak` the most since `reset`.
    """

    def __init__(self, used: Callable[[], int], peak: Callable[[], int], reset: Callable[[], object]) -> None:
        super().__init__()
        self.on = True
        self.used, self.peak, self.reset = used, peak, reset
        self.model: nn.Module = nn.Module()
        self.begin()

    def begin(self) -> None:
        """Forget what was counted so far."""
        self.peaks: dict[str, int] = {}
        self.activations = self.gradients = 0

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self._counted(name) if name in PHASES else nullcontext()

    @contextmanager
    def _counted(self, name: str) -> Iterator[None]:
        self.reset()
        before = self._ungathered()
        if name == OPTIMIZER:
            given = [one.grad for one in self.model.parameters() if one.grad is not None]
            self.gradients = bytes_on(given[0].device, given) if given else 0
        yield
        self.peaks[name] = max(self.peaks.get(name, 0), self.peak())
        if name == FORWARD:
            self.activations = max(self.activations, self._ungathered() - before)

    def _ungathered(self) -> int:
        groups = [
            one._get_fsdp_state()._fsdp_param_group for one in self.model.modules() if isinstance(one, FSDPModule)
        ]
        parameters = [one for group in groups if group for one in group.fsdp_params]
        outputs = [out for one in parameters for out in getattr(one, "all_gather_outputs", ())]
        return self.used() - sum(out.untyped_storage().nbytes() for out in outputs)

    def begin_step(self, number: int) -> None:
        """Do nothing: a recorder of times must not end the phases of this profile."""

    def take_step(self) -> list[tuple[str | None, Any]]:
        return []

    def use(self, clock: Any, most_spans: int) -> None:
        """Do nothing, like `begin_step`."""


def meter_of(device: str) -> Meter:
    """Return a meter of what this process allocates from now on: on a GPU by torch, else in anonymous memory."""
    if torch.device(device).type == "cuda":
        cuda = torch.cuda
        return Meter(cuda.memory_allocated, cuda.max_memory_allocated, cuda.reset_peak_memory_stats)

    def resident(name: str, *without: str) -> int:
        """Return the resident memory without the pages of files and libraries (proc(5))."""
        lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
        sizes = {words[0].rstrip(":"): int(words[1]) << 10 for words in lines if words[-1] == "kB"}
        return sizes[name] - sum(sizes[other] for other in without) - base

    base = 0
    base = resident("RssAnon")
    return Meter(
        lambda: resident("RssAnon"), lambda: resident("VmHWM", "RssFile", "RssShmem"),
        lambda: Path("/proc/self/clear_refs").write_text("5"),  # proc(5): reset the peak resident set size
    )  # fmt: skip
