"""Record the steps of the training loop on this rank; the phases of some steps, on a GPU by events read some steps later."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch

from toolkit.comm.sent_bytes import SentBytes
from toolkit.metrics.phases import Profile
from toolkit.metrics.recorder import Recorder
from toolkit.metrics.windows import BYTES, COLUMNS, GRAD_NORM, LOSS, SAVE, TOKENS
from toolkit.parallel.experts.balancing import ExpertLoad
from toolkit.world.record import record, recorder_of_rank
from toolkit.world.sampled_phases import SampledPhases
from toolkit.world.waits import waits_noted

_TOKENS, _LOSS, _GRAD_NORM, _SAVE, _BYTES = map(COLUMNS.index, (TOKENS, LOSS, GRAD_NORM, SAVE, BYTES))
_STEPS_PER_COUNT = 2000  # a step is slower while its bytes are counted, about twice as slow if its operators are small
_FIRST_COUNT = 3  # DDP still makes its buckets in the second step
_NOT_COUNTING = nullcontext()


class RecordedSteps:
    """Records the steps of a loop that calls `begin` at the start of each step and `close` after the last one.

    It does nothing if this process is not a rank of a run, or if the run records no steps.

    Args:
        profile: the phases of the model.
        profiled: the steps in which `ProfiledSteps` uses `profile`.
        is_compiled: whether `train.compile` is set.
    """

    def __init__(self, device: str, profile: Profile, profiled: range, *, is_compiled: bool) -> None:
        self._recorder, self._profiled, self._is_compiled = recorder_of_rank(), profiled, is_compiled
        self._number: int | None = None
        self._steps = 0
        self._counting: SentBytes | None = None
        self._sent: int | None = None  # bytes
        self._exchanged = 0  # bytes, after this step
        if self._recorder is not None:
            self._sampled = SampledPhases(self._recorder, profile, on_gpu=torch.device(device).type == "cuda")
            self._recorder.is_driven = True

    def begin(self, number: int) -> None:
        """Start step `number`, which ends the previous one."""
        recorder = self._recorder
        if recorder is None:
            return
        if self._number is None:
            at_ns = recorder.begin(number - 1)
        elif self._sampled.is_on or self._counting is not None or self._exchanged:
            at_ns = self._end(recorder, self._number)
        else:  # most steps, at the lowest cost
            at_ns = recorder.end(self._number)
        self._number = number
        if at_ns >= self._sampled.due_ns and number not in self._profiled:
            self._sampled.begin(number, waits_noted(self._sampled.profile, functional=not self._is_compiled))

    def close(self) -> None:
        """End the last step, and write all steps."""
        if self._recorder is not None and self._number is not None:
            self._end(self._recorder, self._number)
            self._number = None
            self._recorder.write(is_last=True)

    def counting_bytes(self) -> AbstractContextManager[object]:
        """Return a context in which the bytes that this rank sends are counted in some steps; call it once in each step.

        The other steps are recorded with the last count. Compiled models are not counted, because counting changes what runs.
        """
        self._steps += 1
        if self._recorder is None or self._is_compiled:
            return _NOT_COUNTING
        if self._steps % _STEPS_PER_COUNT != _FIRST_COUNT:
            if self._sent is not None:
                self._recorder.noted[_BYTES] = self._sent
            return _NOT_COUNTING
        self._counting = SentBytes()
        return self._counting

    def exchanged(self, sent: int) -> None:
        """Add bytes that this rank sent after this step, which `counting_bytes` does not cover."""
        self._exchanged = sent

    def logged(self, tokens: int, loss: float, grad_norm: float) -> None:
        """Record values of this step: the number of tokens on this rank, and what the loop has read from the device."""
        if self._recorder is not None:
            noted = self._recorder.noted
            noted[_TOKENS], noted[_LOSS], noted[_GRAD_NORM] = tokens, loss, grad_norm

    def balanced(self, load: ExpertLoad) -> None:
        """Record the load of the experts in this step."""
        record("expert_imbalance", load.imbalance)
        record("expert_load", load.own)
        record("expert_dropped", load.dropped)
        record("expert_balance_loss", load.loss)

    def compressed(self, measures: Mapping[str, float]) -> None:
        """Record what the compression of gradients took and lost in this step."""
        for name, value in measures.items():
            record(name, value)

    def saved(self, seconds: float) -> None:
        """Record the duration of a save in this step."""
        if self._recorder is not None:
            self._recorder.noted[_SAVE] = seconds

    def _end(self, recorder: Recorder, number: int) -> int:
        """End a step; return the time in nanoseconds."""
        if self._counting is not None:
            self._sent, self._counting = self._counting.total, None
        if self._sent is not None:
            recorder.noted[_BYTES] = self._sent + self._exchanged
        self._exchanged = 0
        return self._sampled.end(number)
