"""The error of a collective that did not finish: its name, the ranks that entered it, and those that did not."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from toolkit.comm.presence import Presence, RankObservation
from toolkit.errors import OwnFailureError

# Errors of gloo, NCCL and the store for a late, exited or disconnected peer; other errors propagate unchanged.
_TRANSPORT = re.compile(
    r"gloo|NCCL|[Tt]imed? ?out|Connection (closed|reset|refused)|Broken pipe|[Ss]ocket|store", re.ASCII
)
_TIME_OUT = re.compile(r"[Tt]imed? ?out", re.ASCII)


class CollectiveError(OwnFailureError):
    """A collective that did not finish on this rank.

    `sequence` counts the communicator's collectives from 1; 0 is its creation. All ranks are world ranks. `missing` are
    those that had not entered this collective, or whose heartbeat stopped; `present` are the others.
    """

    def __init__(
        self, message: str, *, where: str, fix: str, collective: str, sequence: int, present: Sequence[int],
        missing: Sequence[int],
    ) -> None:  # fmt: skip
        super().__init__(message, where=where, fix=fix)
        self.collective = collective
        self.sequence = sequence
        self.present = tuple(present)
        self.missing = tuple(missing)

    def __reduce__(self) -> tuple[Any, ...]:  # ranks send their errors to each other
        restored = partial(
            CollectiveError, where=self.where, fix=self.fix, collective=self.collective, sequence=self.sequence,
            present=self.present, missing=self.missing,
        )  # fmt: skip
        return restored, (self.message,)


def is_transport_error(error: BaseException) -> bool:
    """Return whether the network or a peer caused the error, rather than the caller's tensors."""
    return isinstance(error, (RuntimeError, OSError)) and bool(_TRANSPORT.search(str(error)))


def is_time_out(error: BaseException) -> bool:
    """Return whether the transport (gloo, NCCL or the store) timed out."""
    return bool(_TIME_OUT.search(str(error)))


@dataclass(frozen=True)
class Ticket:
    """Identifies a call: its kind, its number among the collectives, and the peer if only two ranks take part."""

    kind: str
    sequence: int
    peer: int | None = None

    def __str__(self) -> str:
        is_numbered = self.peer is None and self.sequence > 0
        return f"{self.kind} number {self.sequence}" if is_numbered else self.kind


class Witness:
    """Creates the errors of one rank, `where`, in a group of world `ranks`. `presence` is None for a single rank."""

    def __init__(self, ranks: Sequence[int], where: str, presence: Presence | None) -> None:
        self._ranks = ranks
        self._where = where
        self._presence = presence
        self._subject = presence.subject if presence is not None else "communicator"

    def explained(self, ticket: Ticket, seconds: float, error: BaseException | None = None) -> CollectiveError:
        """Return an error, with the missing ranks, for a call that failed or was not finished after `seconds`."""
        outcome = f"did not finish in {seconds:.1f} s" if error is None else f"failed after {seconds:.1f} s"
        try:
            observations = self._presence.observe() if self._presence is not None else []
        except RuntimeError:
            return self._error(
                f"{ticket} {outcome}, and the store does not respond: rank 0, or the agent that hosts the "
                "store, has exited or is disconnected",
                ticket, (), (), "see the log of rank 0",
            )  # fmt: skip
        if ticket.peer is not None:
            others = [place for place in range(len(self._ranks)) if place != ticket.peer]
            missing = [ticket.peer]
        else:
            missing = [place for place, seen in enumerate(observations) if not seen.has_entered(ticket.sequence)]
            others = [place for place in range(len(observations)) if place not in missing]
        return self._named(ticket, outcome, observations, missing, others, error)

    def refused(self, kind: str, sequence: int, before: CollectiveError) -> CollectiveError:
        """Return the error for a call that is rejected because an earlier one failed."""
        return CollectiveError(
            f"{kind} cannot be issued: {before.collective} number {before.sequence} failed before it",
            where=self._where, fix=f"create a new {self._subject}, or exit this rank", collective=kind, sequence=sequence,
            present=before.present, missing=before.missing,
        )  # fmt: skip

    def _named(
        self, ticket: Ticket, outcome: str, observations: Sequence[RankObservation], missing: Sequence[int],
        present: Sequence[int], error: BaseException | None,
    ) -> CollectiveError:  # fmt: skip
        parts = [f"{ticket} {outcome}"]
        parts += [
            f"rank {self._ranks[place]} did not join ({self._last_seen(observations[place])})" for place in missing[:8]
        ]
        if len(missing) > 8:
            parts.append(f"nor did {len(missing) - 8} other ranks")
        parts += [
            f"rank {self._ranks[place]} is in {line.collective} instead"
            for place in present
            if (line := observations[place].line)
            and line.sequence == ticket.sequence
            and line.collective != ticket.kind
        ][: 8 if ticket.peer is None else 0]
        gave_up = [place for place in present if (line := observations[place].line) and line.gave_up]
        if gave_up and not missing:
            parts.append(f"{_listed([self._ranks[place] for place in gave_up])} joined and timed out")
        if ticket.peer is None and present:
            parts.append(f"joined: {_listed([self._ranks[place] for place in present])}")
        if error is not None and not missing:
            parts.append(f"network error: {str(error).splitlines()[0]}")
        return self._error(
            "; ".join(parts),
            ticket,
            [self._ranks[place] for place in present],
            [self._ranks[place] for place in missing],
            self._fix(missing, gave_up),
        )

    def _fix(self, missing: Sequence[int], gave_up: Sequence[int]) -> str:
        if missing:
            first = self._ranks[missing[0]]
            return f"see the log of rank {first} for its state or error; if this rank is only slow, increase timeout_s"
        if gave_up:
            return f"see the log of rank {self._ranks[gave_up[0]]}, which names the missing rank"
        return "all ranks entered the collective: check the network between them"

    def _last_seen(self, observation: RankObservation) -> str:
        line = observation.line
        if line is None:
            return f"it never created this {self._subject}"
        state = (
            "alive" if observation.is_alive else f"it has left this {self._subject}" if line.left else "no heartbeat"
        )
        return f"{state}, last in {Ticket(line.collective, line.sequence)}"

    def _error(
        self, message: str, ticket: Ticket, present: Sequence[int], missing: Sequence[int], fix: str
    ) -> CollectiveError:
        return CollectiveError(
            message,
            where=self._where,
            fix=fix,
            collective=ticket.kind,
            sequence=ticket.sequence,
            present=present,
            missing=missing,
        )


def _listed(ranks: Sequence[int]) -> str:
    if not ranks:
        return "no rank"
    return ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
