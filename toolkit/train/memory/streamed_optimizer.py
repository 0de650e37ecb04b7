"""An optimizer whose state is in a tier outside of the device: the update fetches it in chunks.

The update runs where the parameters are, with the optimizer of the job, so that its result is the same to the last bit.
While one chunk is updated, the next one is read and the previous one is written. In `updating`, this happens during the
backward pass: each parameter is updated as soon as its gradient is complete. After S. Rajbhandari et al.,
"ZeRO-Infinity", SC 2021, arXiv:2104.07857, which updates on the CPU instead.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.train.memory.local_parts import like_parameter, local_of
from toolkit.train.memory.offload_gradients import OffloadedGradients
from toolkit.train.memory.offload_parameters import StreamedParameters
from toolkit.train.memory.tier import Slot, Tier, Transfer, wait_for
from toolkit.train.optim.optimizers import JointOptimizer

__all__ = ["StreamedOptimizer"]

# Of parameters, by the type of device. Three chunks with state and gradients, three times as large, are in memory at once.
_CHUNK_BYTES = {"cpu": 16 << 20, "cuda": 64 << 20}
_LEAST_ELEMENTS = 1024  # smaller state, such as a step counter, stays where it is


@dataclass
class _Fetched:
    """What a chunk of parameters needs for its update, under way from the tier."""

    parameters: Sequence[nn.Parameter]
    state: list[tuple[nn.Parameter, str, Tensor]] = field(default_factory=list)
    gradients: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)


class StreamedOptimizer(JointOptimizer):
    """Updates parameters chunk by chunk. `state` has CPU tensors of the tier, which checkpoints read and fill.

    Args:
        optimizer: the optimizer of the job, without state yet.
        with_state: whether the tier has its state; else only `gradients` and `parameters` are fetched.
        gradients: those of the parameters, if the tier has them.

    `parameters` may be set later.
    """

    parameters: StreamedParameters | None = None

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        tier: Tier,
        gradients: OffloadedGradients | None = None,
        *,
        with_state: bool = True,
    ) -> None:
        super().__init__(optimizer.members if isinstance(optimizer, JointOptimizer) else (optimizer,))
        self._tier, self._gradients, self._with_state = tier, gradients, with_state
        self._slots: dict[tuple[nn.Parameter, str], Slot] = {}
        self._chunk_bytes = _CHUNK_BYTES[self.param_groups[0]["params"][0].device.type]
        self.chunks = list(_chunks_of(self.param_groups, self._chunk_bytes))
        self._backward = gradients.parameters[::-1] if gradients is not None else []
        self._order = {parameter: place for place, parameter in enumerate(self._backward)}
        self._ahead: dict[nn.Parameter, _Fetched] = {}  # those whose state is read before their gradient is complete
        self._writes: deque[list[Transfer]] = deque()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters with gradients, chunk by chunk; those that the backward pass updated have none any more."""
        assert closure is None, "a closure would have to compute all gradients again"
        writes: deque[list[Transfer]] = deque()
        with_gradients = ([one for one in chunk if self._has_gradient(one)] for chunk in self.chunks)
        following = map(self._fetch, filter(None, with_gradients))
        fetched = next(following, None)
        while fetched is not None:
            if len(writes) > 1:
                wait_for(writes.popleft())
            next_one = next(following, None)
            writes.append(self._update(fetched))
            fetched = next_one
        for transfers in writes:
            wait_for(transfers)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Update each parameter in the backward pass within this context, which must have a single one; `step` does the rest.

        Gradients then do not pass through the tier. `lr` must be final.
        """
        assert self._gradients is not None
        self._gradients.update = self._update_now
        try:
            yield
        finally:
            self._gradients.update = None
            self._ahead.clear()
            while self._writes:
                wait_for(self._writes.popleft())

    @torch.no_grad()
    def _update_now(self, parameter: nn.Parameter) -> None:
        assert self._gradients is not None
        fetched = self._ahead.pop(parameter, None) or self._fetch([parameter])
        self._read_ahead(self._order[parameter] + 1)
        if len(self._writes) > 1:
            wait_for(self._writes.popleft())
        self._writes.append(self._update(fetched))

    def _read_ahead(self, place: int) -> None:
        """Start to read the state of the next parameters; a backward pass visits them from the last to the first one."""
        assert self._gradients is not None
        ahead_bytes = 0
        for following in self._backward[place:]:
            if ahead_bytes >= self._chunk_bytes:
                break
            ahead_bytes += local_of(following).nbytes
            if following not in self._ahead and not self._gradients.is_complete(following):
                self._ahead[following] = self._fetch([following], with_values=False)

    def _has_gradient(self, parameter: nn.Parameter) -> bool:
        return parameter.grad is not None or (self._gradients is not None and self._gradients.holds(parameter))

    def step_chunk(self, parameters: Sequence[nn.Parameter]) -> None:
        """Update some parameters, which have gradients."""
        with torch.no_grad():
            wait_for(self._update(self._fetch(parameters)))

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        if self._gradients is not None:
            self._gradients.forget()

    def _fetch(self, parameters: Sequence[nn.Parameter], *, with_values: bool = True) -> _Fetched:
        """Start to read what the update of these parameters needs, with their own values if the tier has them."""
        fetched = _Fetched(parameters)
        for parameter in parameters:
            found = self._gradients.read(parameter) if self._gradients is not None else None
            if found is not None:
                fetched.gradients.append((parameter, found[0]))
                fetched.transfers.append(found[1])
            if self.parameters is not None and with_values:
                fetched.transfers += self.parameters.fetch([parameter])
            for name, value in self.state.get(parameter, {}).items():
                if not isinstance(value, Tensor) or value.numel() < _LEAST_ELEMENTS:
                    continue
                kept, own = local_of(value), local_of(parameter)
                slot = self._slots.get((parameter, name))
                if slot is None or _place(kept) != _place(slot.kept):  # not in the tier, but loaded since
                    continue
                near = self._tier.empty(slot, own.device)
                fetched.state.append((parameter, name, near))
                fetched.transfers.append(self._tier.read(slot, near))
        return fetched

    def _update(self, fetched: _Fetched) -> list[Transfer]:
        """Update the parameters of a chunk; return the transfers of its new state into the tier."""
        wait_for(fetched.transfers)
        for parameter, name, near in fetched.state:
            self.state[parameter][name] = like_parameter(parameter, near)
        if self._gradients is not None:
            self._gradients.set_gradients(fetched.gradients)
        chosen = set(fetched.parameters)
        groups = [group["params"] for group in self.param_groups]
        try:
            for group in self.param_groups:
                group["params"] = [parameter for parameter in group["params"] if parameter in chosen]
            super().step()
        finally:
            for group, parameters in zip(self.param_groups, groups, strict=True):
                group["params"] = parameters
        writes = [write for parameter in fetched.parameters for write in self._put_away(parameter)]
        for parameter, _ in fetched.gradients:
            parameter.grad = None
        if self.parameters is not None:
            writes += self.parameters.put_away(fetched.parameters)
        return writes

    def _put_away(self, parameter: nn.Parameter) -> Iterator[Transfer]:
        for name, value in self.state.get(parameter, {}).items():
            if self._with_state and isinstance(value, Tensor) and value.numel() >= _LEAST_ELEMENTS:
                near = local_of(value)
                slot = self._slots.get((parameter, name))
                if slot is None:
                    slot = self._slots[parameter, name] = self._tier.slot(near)
                yield self._tier.write(slot, near)
                self.state[parameter][name] = like_parameter(parameter, slot.kept)


def _chunks_of(groups: Sequence[dict[str, Any]], chunk_bytes: int) -> Iterator[list[nn.Parameter]]:
    chunk: list[nn.Parameter] = []
    for parameter in (parameter for group in groups for parameter in group["params"]):
        if chunk and sum(local_of(one).nbytes for one in (*chunk, parameter)) > chunk_bytes:
            yield chunk
            chunk = []
        chunk.append(parameter)
    yield chunk


def _place(kept: Tensor) -> tuple[Any, Any]:
    return kept.untyped_storage()._cdata, kept.storage_offset()
