"""Text files to one file of tokens, by several processes, with the same bytes whatever their number."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from toolkit.errors import ToolkitError
from toolkit.rundir.files import is_unwritable, sync
from toolkit.train.data.pieces import PIECE_BYTES, Piece, pieces_of, size_of
from toolkit.train.data.token_file import HEADER_BYTES, TYPES, TokenHeader
from toolkit.train.data.tokenizers import BYTES, load_tokenizer, tokens_of

_AHEAD = 2  # pieces for each process that are given out or wait to be written
_FIX_OUTPUT = "choose another folder, or free space there"


@dataclass(frozen=True)
class Packing:
    """How text becomes tokens: `tokenizer` is "bytes" or "module:name"; `end_token` closes each file, None closes none."""

    tokenizer: str = BYTES
    dtype: str = "uint16"
    end_token: int | None = None
    vocabulary: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in TYPES:
            raise ToolkitError(f"{self.dtype!r} is not a token type", where="dtype", fix="use uint16 or uint32")
        most = np.iinfo(self.dtype).max
        if self.end_token is not None and not 0 <= self.end_token <= most:
            raise ToolkitError(
                f"the token {self.end_token} does not fit {self.dtype}", where="end token", fix=f"take 0 to {most}"
            )

    def tokens(self, piece: Piece) -> NDArray[Any]:
        """The tokens of one piece; the last of a file brings the end token."""
        tokens = tokens_of(piece.read(), load_tokenizer(self.tokenizer), self.dtype, piece.where)
        return (
            np.append(tokens, tokens.dtype.type(self.end_token))
            if piece.last and self.end_token is not None
            else tokens
        )

    @property
    def known_vocabulary(self) -> int:
        """As it was given; of bytes, it is known. 0 where it is not."""
        if self.vocabulary or self.tokenizer != BYTES:
            return self.vocabulary
        return max(256, (self.end_token or 0) + 1)


def pack(
    paths: Sequence[Path],
    output: Path,
    packing: Packing | None = None,
    *,
    processes: int = 1,
    replace: bool = False,
    advance: Callable[[int], None] = lambda count: None,
    piece_bytes: int = PIECE_BYTES,
) -> TokenHeader:
    """Tokenise the files, in their order, into one token file; it gets its name when it is whole.

    Args:
        processes: how many tokenise; a script that calls this with more than 1 needs `if __name__ == "__main__":`.
        replace: an older file of that name gives way, at the end.
        advance: told the bytes of text of each piece that was written.

    Raises:
        ToolkitError: a file cannot be read or tokenised, they hold no token, or the output cannot be written.
    """
    packing = packing or Packing()
    load_tokenizer(packing.tokenizer)  # a mistake in its name is told before anything is begun
    if not paths:
        raise ToolkitError("no text is named", where=str(output), fix="name text files")
    named = ", ".join(map(str, paths[:3])) + (", ..." if len(paths) > 3 else "")
    if not any(map(size_of, paths)):
        raise ToolkitError("holds no text to pack", where=named, fix="name files with text")
    if any(output.exists() and path.exists() and path.samefile(output) for path in paths):
        raise ToolkitError("is to be read and written", where=str(output), fix="give the output another name")
    if output.exists() and not replace:
        raise ToolkitError(
            "the file is there already", where=str(output), fix="give --force to replace it, or another name"
        )
    with _part_of(output) as stream:
        tokenised = _tokenised(pieces_of(paths, piece_bytes), packing, processes)
        header = _write(stream, tokenised, packing, len(paths), advance)
        if not header.tokens:
            raise ToolkitError(
                f"the tokenizer {packing.tokenizer} made no token of this text",
                where=named,
                fix="fix the tokenizer, or name other files",
            )
        return header


def _write(
    stream: BinaryIO,
    tokenised: Iterator[tuple[Piece, NDArray[Any]]],
    packing: Packing,
    texts: int,
    advance: Callable[[int], None],
) -> TokenHeader:
    digest, tokens, largest = xxhash.xxh3_128(), 0, 0
    stream.write(bytes(HEADER_BYTES))  # a truncated file must not look complete
    for piece, found in tokenised:
        data = found.tobytes()
        stream.write(data)
        digest.update(data)
        tokens += len(found)
        largest = max(largest, int(found.max()) if len(found) else 0)
        advance(piece.end - piece.begin)
    vocabulary = packing.known_vocabulary
    if vocabulary and largest >= vocabulary:
        raise ToolkitError(
            f"the token {largest} is outside a vocabulary of {vocabulary}",
            where="vocabulary",
            fix=f"give {largest + 1} or more, or none",
        )
    header = TokenHeader(packing.dtype, vocabulary, tokens, texts, digest.digest())
    stream.seek(0)
    stream.write(header.to_bytes())
    return header


def _tokenised(pieces: Iterator[Piece], packing: Packing, processes: int) -> Iterator[tuple[Piece, NDArray[Any]]]:
    """The pieces with their tokens, in order; some are under way ahead of the one that is given."""
    if processes <= 1:
        for piece in pieces:
            yield piece, packing.tokens(piece)
        return
    # Not forked: the caller may have threads that hold locks.
    context = multiprocessing.get_context("spawn")
    under_way: deque[tuple[Piece, Future[NDArray[Any]]]] = deque()
    where = ""
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_leave_interrupts) as pool:
        try:
            for piece in pieces:
                under_way.append((piece, pool.submit(packing.tokens, piece)))
                if len(under_way) >= _AHEAD * processes:
                    piece, tokens = under_way.popleft()
                    where = piece.where
                    yield piece, tokens.result()
            while under_way:
                piece, tokens = under_way.popleft()
                where = piece.where
                yield piece, tokens.result()
        except BrokenProcessPool as error:
            raise ToolkitError(
                "a process that tokenises died, for want of memory perhaps",
                where=where,
                fix="take fewer with --processes",
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _leave_interrupts() -> None:
    """Ctrl-C at a terminal is for the process that was started there; it ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def _part_of(output: Path) -> Iterator[BinaryIO]:
    """The file beside its place, which is brought to the disk and renamed at the end, or removed.

    What a killed process left is taken over: the lock goes with the process.
    """
    part = output.with_name(f".{output.name}.part")
    try:
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT, 0o666)
        with os.fdopen(descriptor, "r+b") as stream:
            _lock(stream, part, output)
            try:
                stream.truncate(0)
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
                part.replace(output)
            except BaseException:
                part.unlink(missing_ok=True)
                raise
        sync(output.parent)
    except OSError as error:
        if is_unwritable(error) or isinstance(
            error, PermissionError | FileNotFoundError | NotADirectoryError | IsADirectoryError
        ):
            raise ToolkitError(
                f"cannot write: {error.strerror}", where=str(error.filename or output), fix=_FIX_OUTPUT
            ) from error
        raise


def _lock(stream: BinaryIO, part: Path, output: Path) -> None:
    """Keep others from this part.

    Raises:
        ToolkitError: another process writes it, or has just given it its name.
    """
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if part.stat().st_ino == os.fstat(stream.fileno()).st_ino:
            return
    except (BlockingIOError, FileNotFoundError):
        pass  # told below
    raise ToolkitError(
        "is being written by another process", where=str(output), fix="wait for it, or give another name"
    )
