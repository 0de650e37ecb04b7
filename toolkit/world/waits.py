"""Record in the step profile how long a rank waits for communication that computation does not hide."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives

from toolkit.metrics.phases import Profile
from toolkit.metrics.step_profile import BACKWARD, COMMUNICATION

__all__ = ["backward", "backwards_noted", "waits_as", "waits_noted"]


class _Waits(threading.local):
    phase = COMMUNICATION


_waits = _Waits()


@contextmanager
def waits_as(phase: str) -> Iterator[None]:
    """Within this context, count the waits of this thread as this phase, one of `WAITS` or `BUBBLE`."""
    before, _waits.phase = _waits.phase, phase
    try:
        yield
    finally:
        _waits.phase = before


@contextmanager
def waits_noted(profile: Profile, *, functional: bool = True) -> Iterator[None]:
    """Within this context, record waits for collectives in torch's Python code as phase "communication" of `profile`, or as `waits_as` names them.

    These are synchronous calls of torch.distributed, `wait` of asynchronous ones, FSDP2 on the CPU, and DTensor. All of
    them call one of the two functions that this context replaces. DDP waits in C++, at the end of `backward`.

    Args:
        functional: also replace the function of FSDP2 on the CPU and DTensor, which compiled modules contain: after each
            change of it, torch would compile them again.
    """
    wait, wait_tensor = dist.Work.wait, _functional_collectives.wait_tensor
    dist.Work.wait = _noted(wait, profile)  # type: ignore[method-assign]
    if functional:
        _functional_collectives.wait_tensor = _noted(wait_tensor, profile)
    try:
        yield
    finally:
        dist.Work.wait = wait  # type: ignore[method-assign]
        _functional_collectives.wait_tensor = wait_tensor


def _noted(function: Callable[..., Any], profile: Profile) -> Callable[..., Any]:
    def noted(*given: Any, **named: Any) -> Any:
        if _is_captured():
            return function(*given, **named)
        with profile.phase(_waits.phase):
            return function(*given, **named)

    return noted


def _is_captured() -> bool:
    """Return whether a program captures a CUDA graph, whose events have no times."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def backward(loss: Tensor, profile: Profile) -> None:
    """Run `loss.backward()` as a phase; the part after the last gradient counts as communication.

    In that part, DDP waits for unfinished buckets, and FSDP2 reduces its last parameter group.
    """
    if not profile.on:
        loss.backward()
        return
    with profile.phase(BACKWARD):
        _noted_after_gradients(loss, profile, loss.backward)


@contextmanager
def backwards_noted(profile: Profile) -> Iterator[None]:
    """Within this context, count the part of a backward pass after its last gradient as phase "communication", as `backward` does.

    It replaces the function that `Tensor.backward` calls, for a program whose loop is its own.
    """
    run = torch.autograd.backward

    def noted(tensors: Any, *arguments: Any, **named: Any) -> None:
        loss = tensors if isinstance(tensors, Tensor) else next(iter(tensors), None)
        if isinstance(loss, Tensor) and loss.requires_grad and not _is_captured():
            _noted_after_gradients(loss, profile, lambda: run(tensors, *arguments, **named))
        else:
            run(tensors, *arguments, **named)

    torch.autograd.backward = noted
    try:
        yield
    finally:
        torch.autograd.backward = run


def _noted_after_gradients(loss: Tensor, profile: Profile, run: Callable[[], None]) -> None:
    """Run a backward pass of `loss`, and count what follows its last gradient as communication."""
    with ExitStack() as end:

        def computed() -> None:
            end.enter_context(profile.phase(COMMUNICATION))

        def begun(_: Tensor) -> None:
            # The hook of the loss runs first: DDP and FSDP2 register the callbacks in which they wait later.
            torch.autograd.Variable._execution_engine.queue_callback(computed)

        with loss.register_hook(begun):
            run()
