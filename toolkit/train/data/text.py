"""Text files as training samples: windows of bytes."""

import hashlib
import os
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from toolkit.config.data import matches
from toolkit.errors import NotFoundError, ToolkitError


def standard_library_sources() -> list[Path]:
    """Return the source files of Python's standard library, sorted by path: text that every machine has."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, inside, names in os.walk(root):
        inside[:] = [name for name in inside if name not in ("site-packages", "dist-packages")]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found)


def named_files(patterns: Iterable[str], folder: Path) -> list[Path]:
    """Return the files that match `[data] paths`, in the order of the patterns, sorted per pattern, without duplicates.

    Relative patterns are relative to `folder`; `**` matches any number of folders.

    Raises:
        NotFoundError: a pattern matches no file.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        files = [path for match in sorted(matches(pattern, folder)) if (path := folder / match).is_file()]
        if not files:
            raise NotFoundError(
                f"no file matches {pattern!r}",
                where="data.paths",
                fix=f"set data.paths to files that every node can read; relative patterns start at {folder}",
            )
        found.update(dict.fromkeys(files))
    return list(found)


def check_same_text(digest: str) -> None:
    """Check that all ranks read the same bytes; for example, nodes may have different Python versions. Collective.

    Args:
        digest: the digest of the bytes that this rank reads.

    Raises:
        ToolkitError: the digests differ; on every rank.
    """
    number = int(hashlib.sha256(digest.encode()).hexdigest()[:15], 16)
    extremes = torch.tensor([number, -number])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    if extremes[0] != -extremes[1]:
        raise ToolkitError(
            "the ranks read different text", where="data.paths", fix="set data.paths to files on a shared file system"
        )


def read_bytes(files: Iterable[Path], *, max_bytes: int) -> bytes:
    """Return the first `max_bytes` bytes of the concatenated files."""
    pieces: list[bytes] = []
    left = max_bytes
    for path in files:
        if left <= 0:
            break
        with path.open("rb") as stream:
            pieces.append(stream.read(left))
        left -= len(pieces[-1])
    return b"".join(pieces)


class Windows:
    """Samples from text in memory: `context` bytes, each with the next byte as target."""

    most_workers = 0  # copying some rows takes microseconds, less than a transfer from a worker

    def __init__(self, text: bytes, context: int) -> None:
        self.count = (len(text) - 1) // context
        if self.count < 1:
            raise ToolkitError(
                f"expected at least one window of {context} bytes, got {len(text)} bytes of text",
                where="data.paths",
                fix=f"add text to data.paths, or set args.context below {max(1, len(text) - 1)}",
            )
        self.context = context
        self.digest = hashlib.sha256(text).hexdigest()
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._offsets = torch.arange(context + 1)

    def take(self, positions: NDArray[np.int64]) -> Tensor:
        """Return the windows at `positions`, uint8 of shape (len(positions), context + 1)."""
        starts = torch.from_numpy(positions) * self.context
        return self._text[starts[:, None] + self._offsets]

    def finished(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, both int64 of shape (samples, context)."""
        rows = batch.long()
        return rows[:, :-1], rows[:, 1:]

    def drain_skips(self) -> list[str]:
        return []
