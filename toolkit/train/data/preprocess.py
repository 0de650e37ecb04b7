"""Pack text files into one token file; its bytes do not depend on the number of tokenizing processes."""

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

__all__ = ["Packing", "pack"]

_AHEAD = 2  # pieces per process that are in progress or waiting to be written
_FIX_OUTPUT = "choose another folder, or free space there"


@dataclass(frozen=True)
class Packing:
    """How to tokenize: `tokenizer` is "bytes" or "module:name"; `end_token` is appended to each file unless None."""

    tokenizer: str = BYTES
    dtype: str = "uint16"
    end_token: int | None = None
    vocabulary: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in TYPES:
            raise ToolkitError(f"unsupported token type {self.dtype!r}", where="dtype", fix="use uint16 or uint32")
        most = np.iinfo(self.dtype).max
        if self.end_token is not None and not 0 <= self.end_token <= most:
            raise ToolkitError(
                f"the token {self.end_token} does not fit in {self.dtype}", where="end token", fix=f"set 0 to {most}"
            )

    def tokens(self, piece: Piece) -> NDArray[Any]:
        """Return the tokens of one piece; the last piece of a file adds the end token."""
        tokens = tokens_of(piece.read(), load_tokenizer(self.tokenizer), self.dtype, piece.where)
        return (
            np.append(tokens, tokens.dtype.type(self.end_token))
            if piece.last and self.end_token is not None
            else tokens
        )

    @property
    def known_vocabulary(self) -> int:
        """The configured vocabulary size, or the size for byte tokens; 0 if unknown."""
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
    """Tokenize the files, in order, into one token file, which is renamed to `output` when it is complete.

    Args:
        processes: tokenizing processes; a script that passes more than 1 needs `if __name__ == "__main__":`.
        replace: replace an existing `output` when the new file is complete.
        advance: called with the number of text bytes of each written piece.

    Raises:
        ToolkitError: a file cannot be read or tokenized, there are no tokens, or the output cannot be written.
    """
    packing = packing or Packing()
    load_tokenizer(packing.tokenizer)  # raises for an unknown name before any work starts
    if not paths:
        raise ToolkitError("no text files to pack", where=str(output), fix="pass text files")
    named = ", ".join(map(str, paths[:3])) + (", ..." if len(paths) > 3 else "")
    if not any(map(size_of, paths)):
        raise ToolkitError("no text to pack: the files are empty", where=named, fix="pass files with text")
    if any(output.exists() and path.exists() and path.samefile(output) for path in paths):
        raise ToolkitError("the file is both input and output", where=str(output), fix="choose another output name")
    if output.exists() and not replace:
        raise ToolkitError(
            "the file already exists", where=str(output), fix="pass --force to replace it, or choose another name"
        )
    with _part_of(output) as stream:
        tokenised = _tokenised(pieces_of(paths, piece_bytes), packing, processes)
        header = _write(stream, tokenised, packing, len(paths), advance)
        if not header.tokens:
            raise ToolkitError(
                f"the tokenizer {packing.tokenizer} returned no tokens for this text",
                where=named,
                fix="fix the tokenizer, or pass other files",
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
    stream.write(bytes(HEADER_BYTES))  # no valid header yet, because a truncated file must not look complete
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
            f"the token {largest} is outside the vocabulary of {vocabulary} tokens",
            where="vocabulary",
            fix=f"set a vocabulary of {largest + 1} or more, or omit the vocabulary",
        )
    header = TokenHeader(packing.dtype, vocabulary, tokens, texts, digest.digest())
    stream.seek(0)
    stream.write(header.to_bytes())
    return header


def _tokenised(pieces: Iterator[Piece], packing: Packing, processes: int) -> Iterator[tuple[Piece, NDArray[Any]]]:
    """Yield the pieces with their tokens, in order, while worker processes tokenize the next ones."""
    if processes <= 1:
        for piece in pieces:
            yield piece, packing.tokens(piece)
        return
    # Spawn instead of fork, because threads of the caller may hold locks.
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
                "a tokenizing process was killed, possibly for lack of memory",
                where=where,
                fix="use fewer processes with --processes",
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _leave_interrupts() -> None:
    """Ignore SIGINT: on Ctrl-C, the parent process stops the workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def _part_of(output: Path) -> Iterator[BinaryIO]:
    """Open a temporary file next to `output`; sync and rename it at the end, or remove it after an error.

    The temporary file of a killed process is reused, because its lock was released.
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
    """Lock the temporary file against other processes.

    Raises:
        ToolkitError: another process is writing it, or has just renamed it.
    """
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if part.stat().st_ino == os.fstat(stream.fileno()).st_ino:
            return
    except (BlockingIOError, FileNotFoundError):
        pass  # reported below
    raise ToolkitError(
        "another process is writing this file", where=str(output), fix="wait for that process, or choose another name"
    )
