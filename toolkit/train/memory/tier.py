"""Where offloaded tensors are kept: in host memory, or in a file that is read and written without the page cache.

A tier gives each tensor a slot. Transfers between a slot and a tensor on the device of training run beside it: on a CUDA
stream, or in threads that read and write a file in pieces with O_DIRECT (open(2)). A copy is exact, bit by bit.
"""

import ctypes
import errno
import mmap
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import torch
from torch import Tensor

from toolkit.errors import ToolkitError, first_line
from toolkit.units import format_bytes

__all__ = [
    "FileTier", "HostTier", "InThreads", "Slot", "Tier", "Traffic", "Transfer", "file_buffer_bytes", "is_dense", "wait_for",
]  # fmt: skip

_ALIGNMENT = 4096  # of positions, lengths and addresses with O_DIRECT, on all common file systems
_PIECE_BYTES = 8 << 20
_SEGMENT_BYTES = 1 << 30  # of one mapping of the file
_THREADS = 4


@dataclass
class Traffic:
    """What a tier moved since its creation, and the time in which training waited (files only)."""

    read_bytes: int = 0
    written_bytes: int = 0
    waited_s: float = 0.0

    def __str__(self) -> str:
        moved = f"{format_bytes(self.read_bytes)} read, {format_bytes(self.written_bytes)} written"
        return f"{moved}, waited {self.waited_s:.1f} s" if self.waited_s else moved


@dataclass
class Slot:
    """The place of one tensor. `kept` is a CPU tensor with its content, which a checkpoint can read and fill."""

    kept: Tensor
    first_byte: int = 0
    last: "Transfer | None" = None  # the last transfer, which a later one must follow


@dataclass
class _OnStream:
    """A copy on a stream of its own. Its tensor stays alive until a wait: only work after the copy may reuse the memory."""

    event: torch.cuda.Event
    kept_alive: Tensor | None = field(repr=False)

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)
        self.kept_alive = None


class Tier(ABC):
    """A place for tensors outside of the device of training."""

    def __init__(self) -> None:
        self.traffic = Traffic()

    @abstractmethod
    def slot(self, like: Tensor) -> Slot:
        """Return a new slot for dense tensors with this shape, these strides and this type; its content is undefined."""

    def empty(self, slot: Slot, device: torch.device) -> Tensor:
        """Return a new tensor like a slot, to read it into."""
        kept = slot.kept
        return torch.empty_strided(kept.shape, kept.stride(), dtype=kept.dtype, device=device)

    def write(self, slot: Slot, tensor: Tensor) -> "Transfer":
        """Copy a tensor into a slot; do not change the tensor before the transfer has ended."""
        self.traffic.written_bytes += tensor.nbytes
        return self._copy(slot, tensor, is_write=True)

    def read(self, slot: Slot, tensor: Tensor) -> "Transfer":
        """Copy a slot into a tensor."""
        self.traffic.read_bytes += tensor.nbytes
        return self._copy(slot, tensor, is_write=False)

    @abstractmethod
    def host_access(self) -> AbstractContextManager[None]:
        """Return a context in which the host may use `Slot.kept`: transfers have ended, and memory is bounded."""

    @abstractmethod
    def _copy(self, slot: Slot, tensor: Tensor, *, is_write: bool) -> "Transfer": ...


class HostTier(Tier):
    """Keeps tensors in host memory, which is pinned if they come from a GPU, so that copies run beside computation."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._on_gpu = torch.device(device).type == "cuda"
        self._streams = (torch.cuda.Stream(), torch.cuda.Stream()) if self._on_gpu else None  # out and in

    def slot(self, like: Tensor) -> Slot:
        try:
            return Slot(torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, pin_memory=self._on_gpu))
        except RuntimeError as error:
            raise ToolkitError(
                f"cannot allocate {format_bytes(like.nbytes)} of {'pinned ' * self._on_gpu}host memory: {first_line(error)}",
                where="train.offload",
                fix="request more memory per rank, use more ranks, or set train.offload_to to a folder on a local disk",
            ) from error

    def host_access(self) -> AbstractContextManager[None]:
        for stream in self._streams or ():
            stream.synchronize()
        return nullcontext()

    def _copy(self, slot: Slot, tensor: Tensor, *, is_write: bool) -> "Transfer":
        target, source = (slot.kept, tensor) if is_write else (tensor, slot.kept)
        if self._streams is None:
            target.copy_(source)
            slot.last = _Done()
            return slot.last
        stream = self._streams[0 if is_write else 1]
        if isinstance(slot.last, _OnStream):
            slot.last.wait()  # the host does not wait
            stream.wait_event(slot.last.event)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            slot.last = _OnStream(stream.record_event(), tensor)
        return slot.last


class _Done:
    def wait(self) -> None:
        """Return at once."""


@dataclass
class InThreads:
    """Pieces of a transfer of a file tier; a failed one raises its error in `wait`."""

    pieces: Sequence[Future[None]]
    traffic: Traffic
    where: Path
    kept_alive: Tensor | None = field(default=None, repr=False)

    def wait(self) -> None:
        began = time.perf_counter()
        try:
            for piece in self.pieces:
                piece.result()
        except OSError as error:
            raise ToolkitError(
                f"cannot move offloaded tensors: {error.strerror}",
                where=str(self.where),
                fix="check this disk, or set train.offload_to to a folder on another one",
            ) from error
        finally:
            self.pieces, self.kept_alive = (), None
        self.traffic.waited_s += time.perf_counter() - began


class FileTier(Tier):
    """Keeps tensors in a file without a name, which disappears with the process, even if that is killed.

    `Slot.kept` is mapped from the file: its pages use memory only while a reader, such as a checkpoint, needs them.
    """

    def __init__(self, folder: Path) -> None:
        """Create the file in a folder.

        Raises:
            ToolkitError: the folder does not exist, or is not writable.
        """
        super().__init__()
        self._folder = folder
        # No process number: it repeats in containers, and on nodes that share the folder.
        name = folder / f"offload-{uuid4().hex}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            self._file = self._opened(name, flags)
        except OSError as error:
            raise ToolkitError(
                f"cannot create a file for offloaded tensors: {error.strerror}",
                where=f"train.offload_to = {str(folder)!r}",
                fix="use an existing folder on a local disk that the job may write to",
            ) from error
        name.unlink()
        weakref.finalize(self, os.close, self._file).atexit = False
        self._size = self._mapped = 0  # bytes in use, and end of the last mapping
        self._segments: list[mmap.mmap] = []
        self._storages: set[int] = set()
        self._segment: Tensor | None = None  # the last one
        self._threads = ThreadPoolExecutor(_THREADS, "offload")
        self._own = threading.local()

    def _opened(self, name: Path, flags: int) -> int:
        try:
            descriptor = os.open(name, flags | os.O_DIRECT, 0o600)
            self.is_direct = True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            name.unlink(missing_ok=True)
            descriptor = os.open(name, flags, 0o600)
            self.is_direct = False  # reported by the caller: the page cache then counts as memory of the job
        return descriptor

    def slot(self, like: Tensor) -> Slot:
        assert is_dense(like), "elements with gaps would reach into the next slot"
        length = _aligned(max(1, like.nbytes))
        try:
            if self._segment is None or self._size + length > self._mapped:
                self._map(max(_SEGMENT_BYTES, length))
            os.posix_fallocate(self._file, self._size, length)
        except OSError as error:
            raise ToolkitError(
                f"cannot reserve {format_bytes(length)} for offloaded tensors: {error.strerror}",
                where=str(self._folder),
                fix="free space, or set train.offload_to to a folder on a larger disk",
            ) from error
        assert self._segment is not None
        start = self._size - self._segment_at
        kept = self._segment[start : start + like.nbytes].view(like.dtype).as_strided(like.shape, like.stride())
        slot = Slot(kept, self._size)
        self._size += length
        return slot

    def empty(self, slot: Slot, device: torch.device) -> Tensor:
        """Return a new tensor like a slot; on a CPU, O_DIRECT reads into its memory and writes from it without a copy."""
        kept = slot.kept
        if device.type != "cpu" or kept.nbytes < _PIECE_BYTES // 8:
            return super().empty(slot, device)
        return _pages(kept.nbytes)[: kept.nbytes].view(kept.dtype).as_strided(kept.shape, kept.stride())

    def _map(self, length: int) -> None:
        os.ftruncate(self._file, self._mapped + length)
        # A shared mapping: neither RLIMIT_DATA nor the job's own memory counts it before its pages are used.
        self._segments.append(mmap.mmap(self._file, length, offset=self._mapped))
        self._segment = torch.frombuffer(self._segments[-1], dtype=torch.uint8)
        self._storages.add(self._segment.untyped_storage()._cdata)
        self._size = self._segment_at = self._mapped
        self._mapped += length

    def has_mapped(self, tensor: Tensor) -> bool:
        """Return whether the memory of a tensor is mapped from the file, as that of `Slot.kept` is."""
        return tensor.untyped_storage()._cdata in self._storages

    @contextmanager
    def host_access(self) -> Iterator[None]:
        ended = threading.Event()
        thread = threading.Thread(target=self._forget_pages, args=(ended,), name="offload pages", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _forget_pages(self, ended: threading.Event) -> None:
        """Release used pages of the mapping every 50 ms: the page cache keeps changed ones, and writes them."""
        is_last = False
        while not is_last:
            is_last = ended.wait(0.05)
            for segment in self._segments:
                segment.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)

    def _copy(self, slot: Slot, tensor: Tensor, *, is_write: bool) -> "Transfer":
        if slot.last is not None:
            slot.last.wait()
        content = bytes_in_memory(tensor)
        is_whole_pages = not tensor.is_cuda and content.data_ptr() % _ALIGNMENT == len(content) % _ALIGNMENT == 0
        move = self._move if is_whole_pages else self._move_through_buffer
        ready = torch.cuda.current_stream().record_event() if tensor.is_cuda else None
        pieces = [
            self._threads.submit(move, slot.first_byte + at, content[at : at + _PIECE_BYTES], is_write, ready)
            for at in range(0, len(content), _PIECE_BYTES)
        ]
        slot.last = InThreads(pieces, self.traffic, self._folder, tensor)
        return slot.last

    def _move(self, first_byte: int, pages: Tensor, is_write: bool, ready: torch.cuda.Event | None = None) -> None:
        """Read or write memory whose address and length O_DIRECT accepts."""
        # Not `numpy`, after which torch could not resize the storage.
        memory = memoryview((ctypes.c_char * len(pages)).from_address(pages.data_ptr())).cast("B")
        done, call = 0, os.pwritev if is_write else os.preadv
        while done < len(memory):
            count = call(self._file, [memory[done:]], first_byte + done)
            if count == 0:
                raise OSError(errno.EIO, "the file is shorter than its slots")
            done += count

    def _move_through_buffer(
        self, first_byte: int, piece: Tensor, is_write: bool, ready: torch.cuda.Event | None
    ) -> None:
        if ready is not None:
            ready.synchronize()
        buffer = self._buffer()[: _aligned(len(piece))]
        if is_write:
            _copy_bytes(buffer, piece)
        self._move(first_byte, buffer, is_write)
        if not is_write:
            _copy_bytes(piece, buffer)

    def _buffer(self) -> Tensor:
        """Return the buffer of this thread."""
        if not hasattr(self._own, "buffer"):
            self._own.buffer = _pages(_PIECE_BYTES)
        buffer: Tensor = self._own.buffer
        return buffer


Transfer = _Done | _OnStream | InThreads  # under way; `wait` returns when later work on the device has the new content


def file_buffer_bytes(moved: Iterable[Tensor]) -> int:
    """Return the bytes of the buffers that a file tier uses to move these tensors."""
    return _THREADS * min(_PIECE_BYTES, max(one.nbytes for one in moved))


def wait_for(transfers: Iterable[Transfer]) -> None:
    """Wait for transfers as `Transfer.wait` does."""
    for transfer in transfers:
        transfer.wait()


def _aligned(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill one range of memory, in any order of dimensions."""
    strides = tensor.stride()
    return tensor.permute(sorted(range(tensor.dim()), key=strides.__getitem__, reverse=True)).is_contiguous()


def _pages(length: int) -> Tensor:
    """Return new memory of whole pages, of at least this many bytes."""
    pages = mmap.mmap(-1, _aligned(length), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_DONTFORK)  # open(2): a fork while O_DIRECT transfers private pages may corrupt them
    return torch.frombuffer(pages, dtype=torch.uint8)


def _copy_bytes(target: Tensor, source: Tensor) -> None:
    """Copy the bytes of the shorter tensor. On a CPU without `copy_`, whose OpenMP threads would spin beside computation."""
    length = min(len(target), len(source))
    if target.is_cuda or source.is_cuda:
        target[:length].copy_(source[:length])
    else:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), length)


def bytes_in_memory(tensor: Tensor) -> Tensor:
    """Return the memory of a tensor without gaps between its elements as bytes, in the order of its strides."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    first = tensor.storage_offset() * tensor.element_size()
    return flat.set_(tensor.untyped_storage(), first, (tensor.nbytes,), (1,))
