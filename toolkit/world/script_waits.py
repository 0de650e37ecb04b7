"""Measure how long a rank waits for others in some steps of a script that only calls `toolkit.step(n)`. Standard library only.

DDP, FSDP2 and other code that waits in torch.distributed need no change: within a measured step, this module replaces three
functions of torch. Other steps cost one comparison more. On a GPU, FSDP2's waits for all-gathered parameters are not measured.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from toolkit.metrics.recorder import Recorder
from toolkit.metrics.windows import COLUMNS, EXPOSED

if TYPE_CHECKING:
    from toolkit.world.sampled_phases import SampledPhases

__all__ = ["ScriptWaits"]

_EXPOSED = COLUMNS.index(EXPOSED)
_RETRY_NS = 1_000_000_000  # pause between queries whether torch.distributed has started


class ScriptWaits:
    """Ends the steps that a script reports, and measures its waits in some of them."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._sampled: SampledPhases | None = None
        self._due_ns = 0

    def end(self, number: int) -> None:
        """End step `number`, and choose whether the next one is measured."""
        recorder, sampled = self._recorder, self._sampled
        if _EXPOSED in recorder.noted:  # the program measures its waits itself
            self._due_ns = sys.maxsize
        at_ns = recorder.end(number) if sampled is None else sampled.end(number)
        if at_ns < self._due_ns or (sampled is not None and at_ns < sampled.due_ns):
            return
        if sampled is None:
            self._due_ns = at_ns + _RETRY_NS
            self._sampled = sampled = _start(recorder)
        if sampled is not None:
            self._due_ns = 0
            from toolkit.world.waits import backwards_noted, waits_noted

            noted = waits_noted(sampled.profile, functional=not _is_compiled())
            sampled.begin(number, noted, backwards_noted(sampled.profile))


def _start(recorder: Recorder) -> SampledPhases | None:
    """Return what measures the waits; None if this process has no peers in torch.distributed."""
    # Not imported here: a program without torch must not load it.
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    import torch

    from toolkit.metrics.phases import Profile
    from toolkit.world.sampled_phases import SampledPhases

    return SampledPhases(recorder, Profile(), on_gpu=torch.cuda.is_initialized(), of_script=True)


def _is_compiled() -> bool:
    """Return whether torch.compile has compiled code of this process, which a change of the replaced functions would compile again."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"])
