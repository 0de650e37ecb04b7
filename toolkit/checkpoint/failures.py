"""DCP's failures, which carry every rank's traceback, as the one line that a user needs."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from torch.distributed.checkpoint import CheckpointException

from toolkit.checkpoint.errors import CorruptCheckpointError
from toolkit.errors import OwnFailureError, ToolkitError


def save_error(directory: Path, step: int, last: int | None, failure: CheckpointException) -> ToolkitError:
    """Why `step` was not saved; `last` is the newest committed step."""
    rank, error = _first_failure(failure)
    kept = "there is no earlier checkpoint" if last is None else f"step {last} is the last good checkpoint"
    message = f"checkpoint of step {step} was not saved: rank {rank}: {_reason(error)}; {kept}"
    if isinstance(error, ToolkitError):
        return _of_its_kind(error)(message, where=str(directory), fix=error.fix)
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    fix = "free space there, or keep fewer checkpoints (checkpoint.keep_last)" if full else ""
    return OwnFailureError(message, where=str(directory), fix=fix)


def load_error(folder: Path, failure: CheckpointException) -> ToolkitError:
    """Why a checkpoint was not loaded. A damaged one stays a `CorruptCheckpointError`."""
    rank, error = _first_failure(failure)
    if isinstance(error, CorruptCheckpointError):
        return error
    if isinstance(error, ToolkitError):
        where = f"{folder}: {error.where}" if error.where else str(folder)
        return _of_its_kind(error)(error.message, where=where, fix=error.fix)
    return OwnFailureError(f"could not be loaded: rank {rank}: {_reason(error)}", where=str(folder))


def _of_its_kind(error: ToolkitError) -> type[ToolkitError]:
    """A failure of the machine may pass, and is told apart from a refusal, which will not."""
    return OwnFailureError if isinstance(error, OwnFailureError) else ToolkitError


def _first_failure(failure: CheckpointException) -> tuple[int, BaseException]:
    """The failure of the lowest rank; a damaged checkpoint comes before all others."""
    failures = sorted((rank, error) for rank, (error, _) in failure.failures.items())
    return next((found for found in failures if isinstance(found[1], CorruptCheckpointError)), failures[0])


def _reason(error: BaseException) -> str:
    """One line. HDF5 puts addresses and times into its own messages; the system's error says it all."""
    if isinstance(error, ToolkitError):
        return f"{error.where}: {error.message}" if error.where else error.message
    if isinstance(error, OSError) and error.errno:
        return f"{os.strerror(error.errno)}" + (f": {error.filename}" if error.filename else "")
    return f"{type(error).__name__}: {error}".splitlines()[0]
