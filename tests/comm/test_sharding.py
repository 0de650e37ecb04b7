"""FSDP2 with the two-tier collectives against torch's own, on two simulated nodes of two ranks."""

import copy

import pytest
import torch
import torch.distributed as dist
from rank_pool import topology_of, world_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from toolkit.comm.counters import Counters
from toolkit.comm.sharding import (
    CROSS_ALL_GATHER,
    CROSS_REDUCE_SCATTER,
    NODE_ALL_GATHER,
    NODE_REDUCE_SCATTER,
    choose_sharding_collectives,
)
from toolkit.errors import ToolkitError
from toolkit.topology.facts import Topology

BLOCK = topology_of((2, 2))
CYCLIC = Topology((), {"node0": (0, 2), "node1": (1, 3)})


def train(state, topology, half, setting="auto"):
    """Three steps of the same model in both ways; parameters of this rank's shards, and the counts."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(33, 65), torch.nn.Tanh(), torch.nn.Linear(65, 65), torch.nn.Linear(65, 3)]
    model = torch.nn.Sequential(*layers)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else MixedPrecisionPolicy()
    counters = Counters()
    results = []
    for ours in (False, True):
        sharded = copy.deepcopy(model)
        for layer in sharded:
            fully_shard(layer, mp_policy=policy)
        fully_shard(sharded, mp_policy=policy)
        if ours:
            line = choose_sharding_collectives(sharded, state.world, setting, topology, counters)
            assert line == "sharding collectives: hierarchical (2 nodes with 2 ranks each)"
        torch.manual_seed(7 + state.world.rank)
        losses = []
        for _ in range(3):
            loss = sharded(torch.randn(8, 33)).float().square().mean()
            loss.backward()
            with torch.no_grad():  # by hand: torch.optim takes long to import
                for parameter in sharded.parameters():
                    parameter.sub_(parameter.grad, alpha=0.1)
            sharded.zero_grad()
            losses.append(loss.item())
        results.append((losses, [parameter.to_local().clone() for parameter in sharded.parameters()]))
    (losses, parameters), (our_losses, our_parameters) = results
    torch.testing.assert_close(our_losses, losses, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(our_parameters, parameters, rtol=1e-5, atol=1e-6)
    return {kind: (count.calls, count.payload_bytes) for kind, count in counters.totals().items()}


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("topology", [BLOCK, CYCLIC], ids=["block", "cyclic"])
def test_a_training_step_equals_torchs_own(ranks, topology, half):
    for counts in ranks(4).run(train, topology, half):
        assert set(counts) == {CROSS_ALL_GATHER, NODE_ALL_GATHER, NODE_REDUCE_SCATTER, CROSS_REDUCE_SCATTER}
        assert all(calls >= 9 for calls, _ in counts.values())
        assert counts[NODE_ALL_GATHER][1] == 2 * counts[CROSS_ALL_GATHER][1]
        assert counts[NODE_REDUCE_SCATTER][1] == 2 * counts[CROSS_REDUCE_SCATTER][1]


def refuse_what_does_not_fit(state):
    flat = choose_sharding_collectives(fully_shard(torch.nn.Linear(4, 4)), state.world, "flat", BLOCK)
    assert flat == "sharding collectives: flat (the job sets parallel.reduction to flat)"
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(torch.nn.Linear(4, 4), mesh=mesh["shard"])
    choose_sharding_collectives(model, state.world, "auto", BLOCK)
    with pytest.raises(ToolkitError, match="sharded over all 4 ranks, got 2 ranks") as caught:
        model(torch.ones(2, 4))
    assert "shard over all ranks" in caught.value.fix


def test_a_model_that_is_sharded_over_a_part_of_the_ranks_is_refused(ranks):
    ranks(4).run(refuse_what_does_not_fit)


def divide_by_another_factor(state):
    model = fully_shard(torch.nn.Linear(4, 4))
    choose_sharding_collectives(model, state.world, "auto", BLOCK)
    model.set_gradient_divide_factor(3.0)
    with pytest.raises(ToolkitError, match="supports sum and avg, got") as caught:
        model(torch.ones(2, 4)).sum().backward()
    assert "set_force_sum_reduction_for_comms(True)" in caught.value.fix


def test_a_factor_that_only_nccl_knows_is_refused_with_the_fix(ranks):
    ranks(4).run(divide_by_another_factor)


def test_torch_has_the_plugs():
    assert callable(FSDPModule.set_custom_all_gather) and callable(FSDPModule.set_custom_reduce_scatter)
    assert dist.ReduceOp.AVG != dist.ReduceOp.SUM


def test_a_sharded_model_has_nothing_to_measure():
    with pytest.raises(ToolkitError, match="selects all-reduce algorithms") as caught:
        choose_sharding_collectives(torch.nn.Linear(2, 2), world_of(0, (2, 2)), "measured", topology_of((2, 2)))
    assert 'reduction = "auto"' in caught.value.fix
