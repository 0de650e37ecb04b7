"""The time that a rank stands still for others, as phases of a profile: what communication costs that nothing hides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives

from toolkit.comm.compat import when_computed
from toolkit.metrics.phases import Profile
from toolkit.metrics.step_profile import BACKWARD, COMMUNICATION


@contextmanager
def waits_noted(profile: Profile) -> Iterator[None]:
    """Within, what torch's Python code waits for in a collective is a phase "communication" of `profile`.

    That is every call of torch.distributed that is not asynchronous, the `wait` of those that are, FSDP2's on the CPU,
    and DTensor's. All of them come through two functions, which are replaced while a profile looks. DDP waits in C++, at
    the end of `backward`.
    """
    wait, wait_tensor = dist.Work.wait, _functional_collectives.wait_tensor
    dist.Work.wait = _noted(wait, profile)  # type: ignore[method-assign]
    _functional_collectives.wait_tensor = _noted(wait_tensor, profile)
    try:
        yield
    finally:
        dist.Work.wait = wait  # type: ignore[method-assign]
        _functional_collectives.wait_tensor = wait_tensor


def _noted(function: Callable[..., Any], profile: Profile) -> Callable[..., Any]:
    def noted(*given: Any, **named: Any) -> Any:
        with profile.phase(COMMUNICATION):
            return function(*given, **named)

    return noted


def backward(loss: Tensor, profile: Profile) -> None:
    """`loss.backward()` as a phase, whose end, from the last gradient on, is communication.

    There DDP waits for the buckets that are still under way, and FSDP2 sums up its last group.
    """
    if not profile.on:
        loss.backward()
        return
    with profile.phase(BACKWARD), ExitStack() as end:

        def computed() -> None:
            end.enter_context(profile.phase(COMMUNICATION))

        def begun(_: Tensor) -> None:
            when_computed(computed)

        loss.register_hook(begun)
        loss.backward()
