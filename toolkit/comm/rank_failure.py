"""The failure of one rank, with its JSON form for the other ranks. Does not import torch."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import NamedTuple

from toolkit.errors import OwnFailureError, ToolkitError

__all__ = ["RankFailure", "add_failure_kind"]


class FailureKind(NamedTuple):
    """An error class that keeps its type on other ranks; `comes_first` gives it priority over lower ranks' failures."""

    error: type[ToolkitError]
    comes_first: bool = False


_KINDS = {"own": FailureKind(OwnFailureError), "refused": FailureKind(ToolkitError)}


def add_failure_kind(name: str, error: type[ToolkitError], *, comes_first: bool = False) -> None:
    """Add an error class of a package above `comm`; the module that defines the class calls this."""
    _KINDS[name] = FailureKind(error, comes_first)


def _kind_of(error: ToolkitError) -> str:
    """Return the name of the most specific kind that matches the error."""
    return max(
        (name for name, kind in _KINDS.items() if isinstance(error, kind.error)),
        key=lambda name: len(_KINDS[name].error.__mro__),
    )


class RankFailure(Exception):  # noqa: N818 - toolkit always catches it before a user sees it
    """The error that one rank raised; identical on every rank after they agreed on it."""

    def __init__(self, rank: int, error: Exception) -> None:
        super().__init__(f"rank {rank}: {error}")
        self.rank = rank
        self.error = error

    @classmethod
    def of(cls, rank: int, error: Exception) -> RankFailure:
        """Return the failure of this rank, or `error` itself if it is the failure of another rank."""
        if isinstance(error, cls):
            return error
        failure = cls(rank, error)
        failure.__cause__ = error
        return failure

    @classmethod
    def worst(cls, failures: Sequence[RankFailure]) -> RankFailure:
        """Return the failure of the lowest rank; a kind with `comes_first` has priority over all others."""
        return min(failures, key=lambda failure: (not failure._comes_first, failure.rank))

    @property
    def _comes_first(self) -> bool:
        return isinstance(self.error, ToolkitError) and _KINDS[_kind_of(self.error)].comes_first

    def to_json(self) -> str:
        error = self.error
        body: dict[str, object] = {"rank": self.rank}
        if isinstance(error, ToolkitError):
            body |= {"kind": _kind_of(error), "message": error.message, "where": error.where, "fix": error.fix}
        elif isinstance(error, OSError) and error.errno:
            body |= {"kind": "system", "errno": error.errno, "filename": str(error.filename or "")}
        else:
            body |= {"kind": "other", "message": f"{type(error).__name__}: {error}"}
        return json.dumps(body)

    @classmethod
    def from_json(cls, text: str) -> RankFailure:
        body = json.loads(text)
        if body["kind"] in _KINDS:
            error: Exception = _KINDS[body["kind"]].error(body["message"], where=body["where"], fix=body["fix"])
        elif body["kind"] == "system":
            error = OSError(body["errno"], os.strerror(body["errno"]), body["filename"] or None)
        else:
            error = RuntimeError(body["message"])
        return cls(body["rank"], error)
