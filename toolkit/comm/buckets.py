"""Many tensors in few all-reduces: they are packed side by side as they come, and unpacked when a bucket is back.

With a limit in bytes, a bucket goes off as soon as it is full, and is reduced while the next is packed: hand gradients
over in the order in which the backward pass makes them, the last layer's first. Without a limit all of one type go
in one call ("fused"), which is best for many small tensors that are there already.
"""

from collections.abc import Callable, Sequence

import torch

from toolkit.comm.handle import Handle
from toolkit.comm.reductions import plain

BUCKET_BYTES = 25 * 1024 * 1024  # as DDP's
StartAllReduce = Callable[[torch.Tensor], Handle[torch.Tensor]]


class Buckets:
    """Tensors on their way. All ranks put the same shapes and types in the same order."""

    def __init__(self, start: StartAllReduce, bucket_bytes: int | None = BUCKET_BYTES) -> None:
        """Reduce buckets by `start`; `bucket_bytes` None means no limit."""
        self._start = start
        self._bucket_bytes = bucket_bytes
        self._open: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        self._started: list[tuple[list[torch.Tensor], Handle[torch.Tensor]]] = []

    @property
    def under_way(self) -> int:
        """How many buckets were started and not yet unpacked."""
        return len(self._started)

    def put(self, tensor: torch.Tensor) -> None:
        """Add a tensor that must not change until `finish`; a full bucket starts. Larger tensors get their own bucket."""
        key = (tensor.dtype, tensor.device)
        held = self._open.setdefault(key, [])
        if held and self._bucket_bytes is not None and _bytes_of([*held, tensor]) > self._bucket_bytes:
            self._send(key)
            held = self._open.setdefault(key, [])
        held.append(tensor)
        if self._bucket_bytes is not None and _bytes_of(held) >= self._bucket_bytes:
            self._send(key)

    def flush(self) -> None:
        """Start what is still open."""
        for key in list(self._open):
            self._send(key)

    def finish(self, timeout_s: float | None = None) -> None:
        """Flush, wait for every bucket, and write the results into the tensors. `timeout_s` is for each bucket."""
        self.flush()
        while self._started:
            tensors, handle = self._started[0]
            packed = handle.wait(timeout_s)
            del self._started[0]
            for tensor, part in zip(tensors, packed.split([one.numel() for one in tensors]), strict=True):
                tensor.detach().copy_(part.view(tensor.shape))

    def _send(self, key: tuple[torch.dtype, torch.device]) -> None:
        tensors = self._open.pop(key)
        self._started.append((tensors, self._start(torch.cat([plain(one).view(-1) for one in tensors]))))


def _bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
