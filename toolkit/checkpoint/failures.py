"""A rank's failure, as it travels to the others and as the one line that a user needs."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path

from toolkit.checkpoint.errors import CorruptCheckpointError
from toolkit.errors import OwnFailureError, ToolkitError

# Kinds of errors that stay what they are on the other ranks; the first that fits counts.
_KINDS: dict[str, type[ToolkitError]] = {
    "corrupt": CorruptCheckpointError,
    "own": OwnFailureError,
    "refused": ToolkitError,
}


_PRUNE = "free space there, as with `toolkit ckpt prune RUN --keep-last 1`"
_OPEN = "make that folder writable for whoever runs this"
_FIXES = {
    errno.ENOSPC: _PRUNE, errno.EDQUOT: _PRUNE, errno.EROFS: _OPEN, errno.EACCES: _OPEN, errno.EPERM: _OPEN,
}  # fmt: skip


class RankFailure(Exception):  # noqa: N818 - it says what happened, and is caught before a user sees it
    """What one rank raised. The same on every rank once all agreed on it."""

    def __init__(self, rank: int, error: Exception) -> None:
        super().__init__(f"rank {rank}: {error}")
        self.rank = rank
        self.error = error

    @classmethod
    def of(cls, rank: int, error: Exception) -> RankFailure:
        """The failure of this rank, or the one of another that reached it already."""
        if isinstance(error, cls):
            return error
        failure = cls(rank, error)
        failure.__cause__ = error
        return failure

    @classmethod
    def worst(cls, failures: Sequence[RankFailure]) -> RankFailure:
        """That of the lowest rank; a damaged checkpoint comes before all others."""
        ordered = sorted(failures, key=lambda failure: failure.rank)
        return next((found for found in ordered if isinstance(found.error, CorruptCheckpointError)), ordered[0])

    def to_json(self) -> str:
        error = self.error
        body: dict[str, object] = {"rank": self.rank}
        if isinstance(error, ToolkitError):
            kind = next(name for name, of_kind in _KINDS.items() if isinstance(error, of_kind))
            body |= {"kind": kind, "message": error.message, "where": error.where, "fix": error.fix}
        elif isinstance(error, OSError) and error.errno:
            body |= {"kind": "system", "errno": error.errno, "filename": str(error.filename or "")}
        else:
            body |= {"kind": "other", "message": f"{type(error).__name__}: {error}"}
        return json.dumps(body)

    @classmethod
    def from_json(cls, text: str) -> RankFailure:
        body = json.loads(text)
        if body["kind"] in _KINDS:
            error: Exception = _KINDS[body["kind"]](body["message"], where=body["where"], fix=body["fix"])
        elif body["kind"] == "system":
            error = OSError(body["errno"], os.strerror(body["errno"]), body["filename"] or None)
        else:
            error = RuntimeError(body["message"])
        return cls(body["rank"], error)


def save_error(directory: Path, step: int, kept: str, failure: RankFailure) -> ToolkitError:
    """Why `step` was not saved; `kept` says what stands there."""
    error = failure.error
    message = f"checkpoint of step {step} was not saved: rank {failure.rank}: {_reason(error)}; {kept}"
    if isinstance(error, ToolkitError):
        return _of_its_kind(error)(message, where=str(directory), fix=error.fix)
    number = error.errno if isinstance(error, OSError) else None
    return OwnFailureError(message, where=str(directory), fix=_FIXES.get(number or 0, ""))


def load_error(folder: Path, failure: RankFailure) -> ToolkitError:
    """Why a checkpoint was not loaded. A damaged one stays a `CorruptCheckpointError`."""
    error = failure.error
    if isinstance(error, CorruptCheckpointError):
        return error
    if isinstance(error, ToolkitError):
        where = f"{folder}: {error.where}" if error.where else str(folder)
        return _of_its_kind(error)(error.message, where=where, fix=error.fix)
    return OwnFailureError(f"could not be loaded: rank {failure.rank}: {_reason(error)}", where=str(folder))


def _of_its_kind(error: ToolkitError) -> type[ToolkitError]:
    """A failure of the machine may pass, and is told apart from a refusal, which will not."""
    return OwnFailureError if isinstance(error, OwnFailureError) else ToolkitError


def _reason(error: Exception) -> str:
    """One line: the system's error says it all."""
    if isinstance(error, ToolkitError):
        return f"{error.where}: {error.message}" if error.where else error.message
    if isinstance(error, OSError) and error.errno:
        return f"{os.strerror(error.errno)}" + (f": {error.filename}" if error.filename else "")
    text = str(error) if type(error) is RuntimeError else f"{type(error).__name__}: {error}"
    return text.splitlines()[0]
