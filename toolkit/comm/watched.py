"""Number the collectives that torch starts in backward passes or module hooks, and add missing ranks to their errors.

DDP and FSDP call their extension points in the same order on all ranks, so each rank can count the calls itself. Errors
name ranks in the same form as those of a communicator.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

from toolkit.comm.failures import CollectiveError, Ticket, Witness, is_time_out, is_transport_error
from toolkit.comm.presence import BEAT_S, Presence, new_board
from toolkit.world.facts import World

T = TypeVar("T")


class WatchedCalls:
    """The calls that all ranks of the world make for one `subject`. A rank sends heartbeats until it exits."""

    def __init__(self, world: World, subject: str, *, beat_s: float = BEAT_S) -> None:
        """Start the heartbeat of this rank, every `beat_s` seconds."""
        board = new_board(subject, world.rank)
        self._presence = Presence(board, world.rank, world.size, beat_s=beat_s, subject=subject)
        self._witness = Witness(range(world.size), f"rank {world.rank} on {world.host}", self._presence)
        self._making = Ticket(f"making the {subject}", 0)
        self._sequence = 0
        self._broken: CollectiveError | None = None

    @contextmanager
    def making(self) -> Iterator[None]:
        """Add the missing ranks to a failure while all ranks create the shared objects, before the first call."""
        with self._explaining(self._making):
            yield

    @contextmanager
    def watch(self, kind: str) -> Iterator[None]:
        """Add the missing ranks to a failure of the call in this block.

        Raises:
            CollectiveError: a peer or the network failed, or an earlier call failed.
        """
        with self._explaining(self._enter(kind)):
            yield

    def start(self, kind: str, begin: Callable[[], Future[T]]) -> Future[T]:
        """Start a call; return a future with the result of `begin`'s future, or its error with the missing ranks.

        Raises:
            CollectiveError: an earlier call failed.
        """
        ticket, outcome, began = self._enter(kind), Future[T](), time.monotonic()

        def forward(done: Future[T]) -> None:
            if error := done.exception():
                outcome.set_exception(self._explained(ticket, time.monotonic() - began, error))
            else:
                outcome.set_result(done.result())

        begin().add_done_callback(forward)
        return outcome

    def _enter(self, kind: str) -> Ticket:
        if self._broken is not None:
            raise self._witness.refused(kind, self._sequence, self._broken) from self._broken
        self._sequence += 1
        self._presence.enter(self._sequence, kind)
        return Ticket(kind, self._sequence)

    @contextmanager
    def _explaining(self, ticket: Ticket) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        except Exception as error:
            explained = self._explained(ticket, time.monotonic() - began, error)
            if explained is error:
                raise
            raise explained from error

    def _explained(self, ticket: Ticket, seconds: float, error: BaseException) -> BaseException:
        """Return the error to raise; after a transport failure, the same CollectiveError for all calls in progress."""
        if not is_transport_error(error):
            return error
        if self._broken is None:
            self._broken = self._witness.explained(ticket, seconds, None if is_time_out(error) else error)
            self._broken.__cause__ = error
            self._presence.give_up()
        return self._broken
