"""What a transformer's mesh exchanges: figures by hand, and what they may depend on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.errors import ToolkitError
from toolkit.topology.model_traffic import Step, Transformer, model_traffic, step_of
from toolkit.topology.traffic import edge_bytes

SMALL = Transformer(1000.0, layers=4, width=8, context=16)
ACTIVATIONS = ("tp", "cp", "ep", "pp")  # what goes with the samples
sizes_of = st.fixed_dictionaries(
    {name: st.sampled_from([1, 2, 4]) for name in ("pp", "replicate", "shard", "cp", "tp")}
)
steps = st.builds(Step, st.integers(1, 8), st.integers(1, 8))
models = st.builds(
    Transformer,
    parameters=st.floats(1e6, 1e12),
    layers=st.integers(1, 100),
    width=st.integers(1, 100).map(lambda n: 128 * n),
    context=st.integers(1, 64).map(lambda n: 1024 * n),
    key_width=st.sampled_from([0, 128]),
    experts=st.sampled_from([0, 8]),
)


def total(traffic):
    return {name: one.payload_bytes for name, one in traffic.items()}


def test_figures_by_hand():
    """Two samples of 16 tokens, three micro-batches; tokens x width x 2 bytes is 512 bytes of activations."""
    traffic = total(model_traffic(replace(SMALL, experts=4), Step(2, 3), {}, zero=3))
    assert traffic["tp"] == 4 * 4 * 3 * 512
    assert traffic["ep"] == 4 * 4 * 3 * 512 * 2
    assert traffic["pp"] == 2 * 3 * 512
    assert traffic["replicate"] == 2000
    dense = total(model_traffic(SMALL, Step(2, 3), {"shard": 2}, zero=3))
    assert dense["shard"] == 3 * 3 * 2000
    assert total(model_traffic(SMALL, Step(2, 3), {"shard": 2}, zero=2))["shard"] == (1 + 3) * 2000
    alone = total(model_traffic(SMALL, Step(2, 3), {"cp": 2}, zero=3))
    assert alone["cp"] == 8 * 4 * 3 * 512 + 2 * 2000, "without shard, gradients are reduced once"
    assert total(model_traffic(SMALL, Step(2, 3), {"cp": 2}, context="heads"))["cp"] == 8 * 4 * 3 * 256 + 2 * 2000


def test_figures_by_hand_on_a_mesh_of_all_dimensions():
    """Of three layers a stage has two at most; 8 tokens of a micro-batch on a rank, 500 bytes of parameters."""
    sizes = {"pp": 2, "replicate": 2, "shard": 2, "cp": 4, "tp": 2}
    traffic = total(model_traffic(replace(SMALL, layers=3), Step(2, 3), sizes, zero=3))
    assert traffic == {
        "tp": 4 * 2 * 3 * 128,
        "cp": pytest.approx((4 + 2 * 4 / 3) * 2 * 3 * (2 * 16 * 8 / 2 * 2) + 7 * 500 / 2),
        "shard": 7 * 500,
        "replicate": 500 / 8,
        "pp": 2 * 3 * 128,
    }


def test_the_papers_volumes_on_a_ring():
    """ZeRO, section 7: 3 Psi with parameters sharded, 2 Psi without, as plain data parallel; a micro-batch, many ranks."""
    step, many = Step(1, 1), 10**6
    for zero, times in ((0, 2), (1, 2), (2, 2), (3, 3)):
        shard = model_traffic(SMALL, step, {"shard": many}, zero)["shard"]
        assert edge_bytes(shard, many) == pytest.approx(times * 2000, rel=1e-5)
    assert edge_bytes(model_traffic(SMALL, step, {"replicate": many})["replicate"], many) == pytest.approx(
        4000, rel=1e-5
    )


@given(models, steps, sizes_of, st.integers(0, 3))
def test_activations_grow_linearly_with_the_batch_and_parameters_do_not(model, step, sizes, zero):
    once, twice = (
        model_traffic(model, Step(samples, step.micro_batches), sizes, zero)
        for samples in (step.micro_batch, 2 * step.micro_batch)
    )
    for name, one in once.items():
        assert twice[name].calls == one.calls
        if name in ("tp", "ep", "pp"):
            assert twice[name].payload_bytes == pytest.approx(2 * one.payload_bytes)
        elif name != "cp":  # which carries both
            assert twice[name].payload_bytes == one.payload_bytes


@given(models, steps, sizes_of)
def test_tp_cp_ep_and_pp_do_not_know_how_many_parameters_there_are(model, step, sizes):
    one, other = (model_traffic(replace(model, parameters=count), step, sizes | {"cp": 1}) for count in (1e9, 7e9))
    for name in ("tp", "ep", "pp"):
        assert one.get(name) == other.get(name)
    keys = [
        total(model_traffic(replace(model, parameters=0.0, experts=0), step, sizes | {"shard": n}))["cp"]
        for n in (1, 4)
    ]
    assert keys[0] == keys[1], "without parameters only keys and values go round the ring"


@given(models, steps, sizes_of, st.integers(0, 3))
def test_shard_and_cp_exchange_together_what_one_ring_of_both_would(model, step, sizes, zero):
    """(n-1)/n of the parameters over n = shard x cp ranks is what crosses shard's edges and then cp's."""
    sizes = sizes | {"cp": 4, "shard": 2, "pp": 1, "tp": 1}
    model = replace(model, experts=0, width=0, key_width=0, layers=1)
    split = model_traffic(model, step, sizes, zero)
    whole = model_traffic(model, step, {**sizes, "cp": 1, "shard": 8}, zero)["shard"]
    crossing = edge_bytes(split["shard"], 2) + edge_bytes(split["cp"], 4)
    assert crossing == pytest.approx(edge_bytes(whole, 8))


@given(models, steps, sizes_of)
def test_a_finer_mesh_never_exchanges_more_a_rank(model, step, sizes):
    model = replace(model, experts=0)  # with more shard ranks, more of them have the same experts
    whole = total(model_traffic(model, step, sizes))
    for name in ("pp", "tp", "shard", "cp"):
        finer = total(model_traffic(model, step, sizes | {name: 2 * sizes[name]}))
        # Stages of a pipeline may be uneven; with shard, parameters are exchanged over cp for each micro-batch.
        compared = [one for one in whole if (one, name) not in (("tp", "pp"), ("cp", "shard"))]
        assert all(finer[one] <= whole[one] * (1 + 1e-9) for one in compared)


def test_experts_leave_a_rank_less_to_gather_and_the_rest_as_it_is():
    sizes = {"shard": 8}
    model = Transformer(1e9, layers=10, width=1024, context=1024, experts=8)
    alone, spread = (model_traffic(model, Step(1, 1), sizes | {"ep": ep}) for ep in (1, 8))
    kept = 10 * 4 * 1024**2
    assert alone["shard"].payload_bytes == pytest.approx(3 * 2 * 1e9)
    assert spread["shard"].payload_bytes == pytest.approx(3 * 2 * kept), "no other rank has the same experts"
    assert alone["ep"] == spread["ep"]


def test_more_ep_ranks_than_ranks_with_shards_exchange_no_experts():
    """A mesh rejects them; its message, not a division by zero, is what the user gets."""
    model = Transformer(1e9, layers=10, width=1024, context=1024, experts=8)
    traffic = model_traffic(model, Step(1, 1), {"shard": 2, "ep": 4})
    assert traffic["shard"].payload_bytes == pytest.approx(3 * 2 * model.attention_parameters)


@pytest.mark.parametrize(
    ("experts", "ep", "said"),
    [(0, 2, "this model has none"), (6, 4, "6 experts per layer are not divisible by ep = 4")],
)
def test_experts_that_are_not_there_are_refused(experts, ep, said):
    with pytest.raises(ToolkitError, match=said):
        model_traffic(replace(SMALL, experts=experts), Step(1, 1), {"shard": 8, "ep": ep})


@given(st.integers(1, 512), st.integers(0, 64), st.integers(1, 8), st.integers(1, 8))
def test_micro_batches_cover_a_ranks_share(batch, micro_batch, replicate, shard):
    step = step_of(batch, micro_batch, {"replicate": replicate, "shard": shard, "tp": 4})
    share = max(1, batch // (replicate * shard))
    assert step.micro_batch <= share <= step.micro_batch * step.micro_batches < share + step.micro_batch
    assert not micro_batch or step.micro_batch <= micro_batch
