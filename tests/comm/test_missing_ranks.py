"""What the ranks that came say of those that did not: late, dead, elsewhere, or never there."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool

from toolkit.comm.communicator import Communicator
from toolkit.comm.failures import CollectiveError
from toolkit.errors import OWN_FAILURE, OwnFailureError, ToolkitError

TIMEOUT_S = 5.0  # on a busy machine a rank is seconds late for the first barrier


@pytest.fixture
def three_ranks():
    pool = RankPool((3,), timeout_s=TIMEOUT_S, beat_s=0.1)
    yield pool
    pool.close()


def told(call):
    """What the error of `call` says, as plain values."""
    try:
        call()
    except CollectiveError as error:
        assert isinstance(error, OwnFailureError) and error.exit_code == OWN_FAILURE
        return str(error), error.collective, error.sequence, error.present, error.missing
    return None


def one_sleeps(state, algorithm):
    communicator = state.communicator
    communicator.barrier()
    if communicator.rank == 1:
        time.sleep(2 * TIMEOUT_S)
        return None
    first = told(lambda: communicator.all_reduce(torch.ones(100), "sum", algorithm))
    time.sleep(TIMEOUT_S)
    return first


@pytest.mark.parametrize("algorithm", ["flat", "ring", "direct"])
def test_a_rank_that_sleeps_is_named_and_said_to_live(three_ranks, algorithm):
    first, nothing, third = three_ranks.run(one_sleeps, algorithm)
    assert nothing is None
    for rank, (text, collective, sequence, present, missing) in ((0, first), (2, third)):
        assert (collective, sequence, present, missing) == (f"all-reduce ({algorithm})", 2, (0, 2), (1,)), text
        assert f"rank {rank} on node0: all-reduce ({algorithm}) number 2 " in text
        assert "rank 1 did not join (alive, last in barrier number 1); joined: 0, 2. Fix: see the log of rank 1" in text


def one_dies(state):
    communicator = state.communicator
    communicator.barrier()
    if communicator.rank == 2:
        time.sleep(0.3)  # some beats, which tell of the first barrier
        os._exit(3)
    failure = told(communicator.barrier)
    return failure, told(lambda: communicator.all_reduce(torch.ones(1)))


def test_a_rank_that_died_is_named_and_said_to_be_dead_and_nothing_more_is_issued(three_ranks):
    first, second, third = three_ranks.outcomes(one_dies)
    assert third == (False, "ended")
    for well, (failure, after) in (first, second):
        assert well
        text, collective, sequence, present, missing = failure
        assert (collective, sequence, present, missing) == ("barrier", 2, (0, 1), (2,)), text
        assert "rank 2 did not join (no heartbeat, last in barrier number 1)" in text
        assert "all-reduce (flat) cannot be issued: barrier number 2 failed before it" in after[0]


def one_goes_elsewhere(state):
    communicator = state.communicator
    if communicator.rank == 0:
        return told(communicator.barrier)
    return told(lambda: communicator.broadcast(torch.ones(3), root=0))


def test_a_rank_in_another_collective_is_named(three_ranks):
    answers = three_ranks.run(one_goes_elsewhere)
    text, _, sequence, present, missing = answers[0]
    assert (sequence, present, missing) == (1, (0, 1, 2), ())
    assert "rank 1 is in broadcast (tree) instead; rank 2 is in broadcast (tree) instead" in text


def nobody_sends(state):
    communicator = state.communicator
    room = torch.ones(3)
    if communicator.rank == 0:
        return told(lambda: communicator.receive(room, source=2))
    time.sleep(2 * TIMEOUT_S)
    return None


def test_a_peer_that_sends_nothing_is_named(three_ranks):
    text, collective, _, _, missing = three_ranks.run(nobody_sends)[0]
    assert (collective, missing) == ("receive from rank 2", (2,))
    assert "rank 2 did not join (alive" in text


def waits_shorter_than_the_communicator(state):
    communicator = state.communicator
    communicator.barrier()  # on a loaded machine, a rank may come into this function seconds after another
    if communicator.rank == 2:
        time.sleep(3.0)
    handle = communicator.start.barrier()
    early = None if communicator.rank == 2 else (handle.done(), told(lambda: handle.wait(1.0)))
    handle.wait()
    communicator.barrier()
    return early


def test_a_handle_that_was_waited_for_too_early_is_waited_for_again():
    pool = RankPool((3,), timeout_s=20, beat_s=0.1)
    answers = pool.run(waits_shorter_than_the_communicator)
    pool.close()
    done, (text, _, _, _, missing) = answers[0]
    assert not done and missing == (2,), text
    assert "barrier number 2 did not finish in 1.0 s" in text


def is_made_without_one(state):
    communicator = state.communicator
    if communicator.rank == 2:
        time.sleep(2 * TIMEOUT_S)
        return None
    return told(lambda: Communicator(state.world, timeout_s=TIMEOUT_S, beat_s=0.1))


def test_a_rank_that_never_makes_the_communicator_is_named(three_ranks):
    for text, collective, sequence, present, missing in three_ranks.run(is_made_without_one)[:2]:
        assert (collective, sequence, present, missing) == ("making the communicator", 0, (0, 1), (2,)), text
        assert "rank 2 did not join (it never created this communicator)" in text


def has_made_more_groups(state):
    if state.communicator.rank == 2:
        return None
    pair = dist.new_group([0, 1], use_local_synchronization=True, timeout=timedelta(seconds=5))
    if state.communicator.rank == 1:
        dist.new_group([1], use_local_synchronization=True)
    try:
        Communicator(state.world, pair, timeout_s=5)
    except ToolkitError as error:
        return str(error)


def test_ranks_that_know_unequally_many_groups_are_told_and_do_not_hang(three_ranks):
    first, second, _ = three_ranks.run(has_made_more_groups)
    for text in (first, second):
        assert "rank 0 has " in text and "rank 1 has " in text and "each rank has the same number" in text


def makes_a_part(state):
    half = [dist.new_group([0, 2]), dist.new_group([1])][state.communicator.rank % 2]
    with Communicator(state.world, half, timeout_s=10) as part:
        return part.size, part.rank, part.all_reduce(torch.tensor([float(state.world.rank)])).item()


def test_a_communicator_of_a_group_counts_its_ranks_only(three_ranks):
    assert three_ranks.run(makes_a_part) == [(2, 0, 2.0), (1, 0, 1.0), (2, 1, 2.0)]
