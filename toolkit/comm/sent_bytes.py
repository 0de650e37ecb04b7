"""Count the bytes that a rank sends in torch's collectives, as ring algorithms send them.

To exchange S bytes over n ranks, each rank sends 2 (n-1)/n S in an all-reduce, and (n-1)/n S in an all-gather, a
reduce-scatter or an all-to-all; the same formulas predict the traffic in `topology/traffic.py`. Other algorithms send at least as much.
"""

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

__all__ = ["SentBytes", "counted_here"]

T = TypeVar("T")


@dataclass(frozen=True)
class _Collective:
    """How the arguments of an operator of torch hold its payload and its process group.

    Args:
        payload: the place of the argument with the tensors.
        group: the place of the argument with the process group or its name.
        share: the bytes that one of n ranks sends for each byte of these tensors.
    """

    kind: str
    payload: int
    group: int
    share: Callable[[int], float]


def _all_reduce(n: int) -> float:
    return 2 * (n - 1) / n


def _of_whole(n: int) -> float:
    return (n - 1) / n


def _of_part(n: int) -> float:
    return n - 1


def _send(n: int) -> float:
    return 1.0


_C10D: Mapping[str, _Collective] = {
    "allreduce_": _Collective("all-reduce", 0, 1, _all_reduce),
    "allreduce_coalesced_": _Collective("all-reduce", 0, 1, _all_reduce),
    "allgather_": _Collective("all-gather", 1, 2, _of_part),
    "_allgather_base_": _Collective("all-gather", 1, 2, _of_part),
    "allgather_into_tensor_coalesced_": _Collective("all-gather", 1, 2, _of_part),
    "reduce_scatter_": _Collective("reduce-scatter", 1, 2, _of_whole),
    "_reduce_scatter_base_": _Collective("reduce-scatter", 1, 2, _of_whole),
    "reduce_scatter_tensor_coalesced_": _Collective("reduce-scatter", 1, 2, _of_whole),
    "alltoall_": _Collective("all-to-all", 1, 2, _of_whole),
    "alltoall_base_": _Collective("all-to-all", 1, 2, _of_whole),
    "broadcast_": _Collective("broadcast", 0, 1, _of_whole),
    "send": _Collective("send", 0, 1, _send),
}
_FUNCTIONAL: Mapping[str, _Collective] = {
    "all_reduce": _Collective("all-reduce", 0, 2, _all_reduce),
    "all_reduce_": _Collective("all-reduce", 0, 2, _all_reduce),
    "all_reduce_coalesced": _Collective("all-reduce", 0, 2, _all_reduce),
    "all_gather_into_tensor": _Collective("all-gather", 0, 2, _of_part),
    "all_gather_into_tensor_out": _Collective("all-gather", 0, 2, _of_part),
    "all_gather_into_tensor_coalesced": _Collective("all-gather", 0, 2, _of_part),
    "reduce_scatter_tensor": _Collective("reduce-scatter", 0, 3, _of_whole),
    "reduce_scatter_tensor_coalesced": _Collective("reduce-scatter", 0, 3, _of_whole),
    "all_to_all_single": _Collective("all-to-all", 0, 3, _of_whole),
    "broadcast": _Collective("broadcast", 0, 2, _of_whole),
    "broadcast_": _Collective("broadcast", 0, 2, _of_whole),
}
_DTENSOR: Mapping[str, _Collective] = {"shard_dim_alltoall": _Collective("all-to-all", 0, 3, _of_whole)}
_SPLITS = 4  # the place of the sizes of the parts that a rank sends, in `alltoall_base_`
_adding = threading.Lock()
_NAMESPACES = {"c10d": _C10D, "_c10d_functional": _FUNCTIONAL, "_dtensor": _DTENSOR}


class SentBytes(TorchDispatchMode):
    """Counts while it is entered, also in backward passes; slows every operator down by microseconds.

    Collectives of compiled functions are not counted, and those of other threads only through `counted_here`. A compiled
    function runs as plain Python within this context, so the results of a compiled model may change in their last bits.

    Attributes:
        of: the bytes by the kind of collective.
    """

    def __init__(self, of: Counter[str] | None = None) -> None:
        super().__init__()
        self.of: Counter[str] = Counter() if of is None else of

    @property
    def total(self) -> int:
        return sum(self.of.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # counted as what it does with its parts
        known = _NAMESPACES.get(func.namespace)
        if known is not None and (collective := known.get(func._opname)) is not None:
            group = _group_of(args[collective.group])
            share = collective.share(group.size())
            if func._opname == "alltoall_base_" and args[_SPLITS]:  # unequal parts
                share = 1 - args[_SPLITS][group.rank()] / max(1, sum(args[_SPLITS]))
            with _adding:
                self.of[collective.kind] += round(_bytes_of(args[collective.payload]) * share)
        return func(*args, **(kwargs or {}))


def counted_here(work: Callable[[], T]) -> Callable[[], T]:
    """Return `work` for another thread, which counts as if this thread did it."""
    entered = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, SentBytes)]
    if not entered:
        return work

    def counted() -> T:
        with ExitStack() as counting:
            for mode in entered:
                counting.enter_context(SentBytes(mode.of))
            return work()

    return counted


def _group_of(group: Any) -> dist.ProcessGroup:
    found: dist.ProcessGroup = (
        _resolve_process_group(dist.GroupName(group)) if isinstance(group, str) else dist.ProcessGroup.unbox(group)
    )
    return found


def _bytes_of(tensors: Any) -> int:
    return tensors.nbytes if isinstance(tensors, Tensor) else sum(map(_bytes_of, tensors))
