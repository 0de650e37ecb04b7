"""The board of the living, on a real store."""

import time

import pytest
import torch.distributed as dist

from toolkit.comm.counters import Counters
from toolkit.comm.failures import Ticket, Witness
from toolkit.comm.issuer import Issuer
from toolkit.comm.presence import Line, Presence


@pytest.fixture
def server():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def joined(server, rank, size=3):
    store = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    return Presence(store, rank, size, beat_s=0.05)


def test_who_beats_lives_who_stops_does_not_and_who_never_came_is_unknown(server):
    first, second = joined(server, 0), joined(server, 1)
    first.enter(7, "barrier")
    mine, other, nobody = first.observe()
    assert mine.is_alive and mine.line.sequence == 7 and mine.line.collective == "barrier"
    assert other.is_alive and other.has_entered(0) and not other.has_entered(1)
    assert nobody.line is None and not nobody.is_alive and not nobody.has_entered(0)
    second._stop.set()  # as a process that is frozen: it ends without a word
    second._run = lambda: None
    second._thread.join()
    server.set("1", "9 7 0 all-gather (flat)")
    frozen = first.observe()[1]
    assert frozen.line == Line(9, 7, "all-gather (flat)") and not frozen.is_alive and not frozen.has_entered(7)
    first.close()


def test_who_left_in_order_after_a_collective_came_to_it(server):
    first, second = joined(server, 0, 2), joined(server, 1, 2)
    second.enter(4, "broadcast (tree)")
    second.close()
    left = first.observe()[1]
    assert left.line.left and left.has_entered(4) and not left.has_entered(5)
    first.close()


def test_who_gave_up_came_to_it_and_is_told_from_who_left_in_order(server):
    first, second = joined(server, 0, 2), joined(server, 1, 2)
    second.enter(4, "barrier")
    second.give_up()
    error = Witness([0, 1], "rank 0 on node0", first).explained(
        Ticket("barrier", 4), 0.1, RuntimeError("[gloo] closed")
    )
    assert (error.missing, error.present) == ((0,), (1,))  # rank 0 itself has not entered it
    first.enter(4, "barrier")
    error = Witness([0, 1], "rank 0 on node0", first).explained(
        Ticket("barrier", 4), 0.1, RuntimeError("[gloo] closed")
    )
    assert "failed after 0.1 s; 1 joined and timed out; joined: 0, 1; network error: [gloo] closed" in str(error)
    assert error.fix == "see the log of rank 1, which names the missing rank"
    first.close()


def test_a_store_that_is_gone_is_said_to_be_gone():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    presence = joined(server, 1, 2)
    issuer = Issuer([0, 1], "rank 1 on node0", presence, Counters(), 1.0)
    del server
    start = time.monotonic()
    error = issuer.explained(Ticket("barrier", 3), 1.0)
    assert "barrier number 3 did not finish in 1.0 s, and the store does not respond: rank 0" in str(error)
    assert (error.present, error.missing) == ((), ()) and time.monotonic() - start < 30
    issuer.close()
