"""What DDP's hook and FSDP2's plug say of a rank that dies or is late in the middle of a step, on real ranks."""

import os
import time
from datetime import timedelta

import pytest
import torch
from rank_pool import RankPool, topology_of
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from toolkit.comm.compat import world_timeout
from toolkit.comm.failures import CollectiveError
from toolkit.comm.gradient import GRADIENTS, find_reduction
from toolkit.comm.sharding import ALL_GATHER, REDUCE_SCATTER, choose_sharding_collectives

LAYOUT = (2, 2)
LOST = 3
TIMEOUT_S = 2.0


@pytest.fixture
def four_ranks():
    pool = RankPool(LAYOUT)
    yield pool
    pool.close()


def layers_of(kind):
    """A model of ten layers, each with its own bucket or shard, and the fifth of them on the way back."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(60, 60) for _ in range(10)]
    if kind == "DDP":
        return DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.01), layers[5]
    return fully_shard(torch.nn.Sequential(*[fully_shard(layer) for layer in layers])), layers[5]


def choose(state, model, timeout_s):
    patience = {"timeout_s": timeout_s, "beat_s": 0.1}
    if isinstance(model, DistributedDataParallel):
        found = find_reduction(model.process_group, state.world, "auto", topology_of(LAYOUT), **patience)
        found.register_on(model)
        line = found.line
    else:
        line = choose_sharding_collectives(model, state.world, "auto", topology_of(LAYOUT), **patience)
    assert "hierarchical" in line


def step(model):
    model(torch.ones(4, 60)).square().mean().backward()


def told(call):
    try:
        call()
    except CollectiveError as error:
        return str(error), error.fix, error.collective, error.sequence, error.present, error.missing
    return None


def on_the_way_back(layer, happens):
    def forward_is_over(_layer, _input, output):
        output.register_hook(lambda _gradient: happens())

    layer.register_forward_hook(forward_is_over)


def lose_one(state, kind, happens):
    """One step with all ranks; in the second backward pass something happens to a rank."""
    model, layer = layers_of(kind)
    choose(state, model, TIMEOUT_S)
    step(model)
    time.sleep(0.3)  # beats, which tell of the first step
    if state.world.rank == LOST:
        on_the_way_back(layer, happens)
    failure = told(lambda: step(model))
    return failure, told(lambda: step(model))


def dies():
    os._exit(3)


def is_late():
    time.sleep(2 * TIMEOUT_S)


@pytest.mark.parametrize(("kind", "calls"), [("DDP", (GRADIENTS,)), ("FSDP2", (ALL_GATHER, REDUCE_SCATTER))])
def test_a_rank_that_dies_in_a_backward_pass_is_named_by_the_others(four_ranks, kind, calls):
    *others, last = four_ranks.outcomes(lose_one, kind, dies)
    assert last == (False, "ended")
    for rank, (well, answer) in enumerate(others):
        assert well, answer
        (text, fix, collective, sequence, present, missing), after = answer
        assert collective in calls and sequence > 1
        assert (present, missing) == ((0, 1, 2), (LOST,)), text
        assert text.startswith(f"rank {rank} on node{rank // 2}: {collective} number {sequence} ")
        assert f"rank {LOST} did not join (no heartbeat, last in sharding" in text.replace(GRADIENTS, "sharding")
        assert fix.startswith(f"see the log of rank {LOST} for its state or error; ")
        assert f"number {sequence} failed before it" in after[0]


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_a_rank_that_is_late_is_named_and_said_to_live_and_is_told_who_gave_up(four_ranks, kind):
    *others, (late, _) = four_ranks.run(lose_one, kind, is_late)
    for (text, _, _, _, present, missing), _ in others:
        assert (present, missing) == ((0, 1, 2), (LOST,)), text
        assert f"did not finish in {TIMEOUT_S:.0f}." in text and f"rank {LOST} did not join (alive, last in " in text
    text, fix, _, _, _, missing = late
    assert missing == () and "joined and timed out" in text
    assert fix == "see the log of rank 0, which names the missing rank"


def never_makes_it(state, kind):
    model, _ = layers_of(kind)
    if state.world.rank == LOST:
        time.sleep(1.5)
        return None
    return told(lambda: choose(state, model, 0.5))


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_a_rank_that_does_not_come_to_make_the_groups_is_named(four_ranks, kind):
    for text, _, _, sequence, _, missing in four_ranks.run(never_makes_it, kind)[:LOST]:
        assert (sequence, missing) == (0, (LOST,)), text
        assert "making the " in text and f"rank {LOST} did not join (it never created this " in text


def patience_of_the_world(state):
    return world_timeout()


def test_groups_wait_as_long_as_the_default_one(four_ranks):
    assert four_ranks.run(patience_of_the_world) == [timedelta(seconds=60)] * 4
