"""Count the bytes of tensors by what they are, as operations create and drop them; tensors may have shapes alone."""

import weakref
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from toolkit.train.memory.local_parts import local_of
from toolkit.train.memory.meter import Meter

__all__ = ["TensorMeter"]


class TensorMeter(Meter):
    """Counts the storages of tensors on a device, by what they are."""

    def __init__(self, device: str) -> None:
        self.counting, self._device, self._now, self._peak = _Counting(self), device, 0, 0
        self._alive: dict[int, tuple[Any, int, str]] = {}
        self._of_kind: Counter[str] = Counter()
        super().__init__(lambda: self._now, lambda: self._peak, self._reset)

    def begin(self) -> None:
        super().begin()
        self.most = Counter(self._of_kind)

    def _reset(self) -> None:
        self._peak = self._now

    def name(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Count these tensors as a kind of their own."""
        for tensor in tensors:
            self.saw(local_of(tensor).untyped_storage(), local_of(tensor).device.type, kind)

    def saw(self, storage: Any, device: str, kind: str = "") -> None:
        """Count the present size of a storage."""
        key = storage._cdata
        known, before, its_kind = self._alive.get(key, (None, 0, kind or "temporary"))
        if device != self._device or (known is not None and before == storage.nbytes() and not kind):
            return
        self._add(its_kind, -before)
        self._add(kind or its_kind, storage.nbytes())
        known = known or weakref.ref(storage, partial(self._gone, key))
        self._alive[key] = (known, storage.nbytes(), kind or its_kind)

    def _gone(self, key: int, _: Any) -> None:
        _, size, kind = self._alive.pop(key)
        self._add(kind, -size)

    def _add(self, kind: str, size: int) -> None:
        self._now += size
        self._of_kind[kind] += size
        self._peak = max(self._peak, self._now)
        self.most[kind] = max(self.most[kind], self._of_kind[kind])


class _Counting(TorchDispatchMode):
    """Shows a meter the results of all operations, and the changes of the sizes of storages."""

    def __init__(self, meter: TensorMeter) -> None:
        super().__init__()
        self._meter = meter

    def __enter__(self) -> Any:
        self._resize, meter = torch.UntypedStorage.resize_, self._meter

        def resize(storage: Any, size: int) -> Any:
            result = self._resize(storage, size)
            meter.saw(storage, meter._device)
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]  # by FSDP2
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # count the operations on its local tensors instead
        kind = "communication" if "c10d" in func.namespace else ""
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, result) if kind else result):
            if isinstance(tensor, Tensor):
                self._meter.saw(tensor.untyped_storage(), tensor.device.type, kind)
        return result
