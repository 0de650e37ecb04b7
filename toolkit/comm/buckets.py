"""All-reduce many tensors with few calls: pack them into buckets, and unpack the results.

With a limit in bytes, a bucket is sent as soon as it is full, and reduced while the next one is packed. Add gradients
in the order in which the backward pass computes them, from the last layer to the first. Without a limit, all tensors of
one dtype go into one call ("fused"), which is best for many small tensors that already exist.
"""

from collections.abc import Callable, Sequence

import torch

from toolkit.comm.handle import Handle
from toolkit.comm.reductions import plain

BUCKET_BYTES = 25 * 1024 * 1024  # DDP's default
StartAllReduce = Callable[[torch.Tensor], Handle[torch.Tensor]]


class Buckets:
    """Packs tensors into buckets and all-reduces them. All ranks add equal shapes and dtypes in the same order."""

    def __init__(self, start: StartAllReduce, bucket_bytes: int | None = BUCKET_BYTES) -> None:
        """Reduce buckets with `start`; `bucket_bytes` None means no limit."""
        self._start = start
        self._bucket_bytes = bucket_bytes
        self._open: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        self._started: list[tuple[list[torch.Tensor], Handle[torch.Tensor]]] = []

    @property
    def under_way(self) -> int:
        """The number of buckets that were started and not yet unpacked."""
        return len(self._started)

    def put(self, tensor: torch.Tensor) -> None:
        """Add a tensor, which must not change until `finish`, and start full buckets; a large tensor gets its own."""
        key = (tensor.dtype, tensor.device)
        held = self._open.setdefault(key, [])
        if held and self._bucket_bytes is not None and _bytes_of([*held, tensor]) > self._bucket_bytes:
            self._send(key)
            held = self._open.setdefault(key, [])
        held.append(tensor)
        if self._bucket_bytes is not None and _bytes_of(held) >= self._bucket_bytes:
            self._send(key)

    def flush(self) -> None:
        """Start all buckets that are not full yet."""
        for key in list(self._open):
            self._send(key)

    def finish(self, timeout_s: float | None = None) -> None:
        """Flush, wait for every bucket, and write the results into the tensors. `timeout_s` applies to each bucket."""
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
