"""What a user of one communicator meets: refusals, many tensors at once, counts, and a rank that is alone."""

import pytest
import torch
import torch.distributed as dist
from rank_pool import LAYOUTS, topology_of, world_of

from toolkit.comm.algorithms import ALGORITHMS, available
from toolkit.comm.communicator import Communicator
from toolkit.comm.compat import count_groups, world_store
from toolkit.errors import OwnFailureError, ToolkitError

REFUSED = [
    (torch.int64, "avg", "gloo", "use op 'sum' and divide"),
    (torch.bool, "sum", "gloo", "to count, convert to torch.int64"),
    (torch.complex64, "max", "gloo", "view_as_real"),
    (torch.float8_e4m3fn, "sum", "gloo", "convert the tensor to torch.float32"),
    (torch.uint32, "sum", "gloo", "convert the tensor to torch.float32 or torch.int64"),
]


def refuse(state, dtype, op, backend, fix):
    for call in (state.communicator.all_reduce, state.communicator.reduce_scatter):
        with pytest.raises(ToolkitError, match=f"op '{op}' does not support {dtype} over {backend}") as caught:
            call(torch.zeros(4).to(dtype), op)
        assert fix in caught.value.fix


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: f"{row[0]} {row[1]}")
def test_what_cannot_be_reduced_names_type_and_backend(ranks, row):
    ranks(2).run(refuse, *row)


def misuse(state):
    communicator = state.communicator
    for call, message in (
        (lambda: communicator.all_reduce(torch.ones(2), "mean"), "unknown op 'mean'"),
        (lambda: communicator.all_reduce(torch.ones(2), "sum", "star"), "unknown all-reduce algorithm 'star'"),
        (
            lambda: communicator.all_reduce(torch.ones(2), "sum", "hierarchical"),
            "same number of ranks, two or more each",
        ),
        (lambda: communicator.reduce_scatter(torch.ones(4)), "4 rows are not divisible by 3 ranks"),
        (lambda: communicator.reduce_scatter(torch.ones(4), "sum", [1, 2, 2]), "do not split 4 rows among 3 ranks"),
        (lambda: communicator.all_to_all_unequal(torch.ones(4), [5, -1, 0]), "do not split 4 rows"),
        (lambda: communicator.all_to_all(torch.tensor(1.0)), "without dimensions"),
        (lambda: communicator.broadcast(torch.ones(2), 3), "expected a rank from 0 to 2, got 3"),
        (lambda: communicator.broadcast_many([torch.ones(2)], []), "got 1 tensors, but 0 roots"),
        (lambda: communicator.send(torch.ones(2), communicator.rank), "cannot send to or receive from itself"),
    ):
        with pytest.raises(ToolkitError, match=message) as caught:
            call()
        assert caught.value.fix
    if communicator.rank == 0:
        for tensors in (None, [torch.ones(2)], [torch.ones(2), torch.ones(3), torch.ones(2)]):
            with pytest.raises(ToolkitError, match=r"expected 3 tensors to scatter|for rank 1, got"):
                communicator.scatter(tensors, torch.ones(2), 0)
    # Only the exchange shows this, so that all ranks take part and all are told.
    row = torch.ones(2, 1 + communicator.rank // 2)
    for call in (
        lambda: communicator.all_gather_unequal(row),
        lambda: communicator.gather(row, 1),
        lambda: communicator.all_to_all_unequal(row, [1, 1, 0]),
    ):
        with pytest.raises(ToolkitError, match="got another type or other trailing dimensions from rank"):
            call()
    communicator.barrier()


def test_wrong_calls_say_what_and_how_to_mend_it_and_the_communicator_goes_on(ranks):
    ranks(3).run(misuse)


def without_a_topology(state):
    with Communicator(state.world, timeout_s=20) as communicator:
        assert set(ALGORITHMS) - set(communicator.algorithms) == {"leader", "hierarchical"}
        with pytest.raises(
            ToolkitError, match="requires the node of each rank, but the nodes of the ranks are unknown"
        ) as caught:
            communicator.all_reduce(torch.ones(1), "sum", "leader")
        assert "topology=gather_topology(world)" in caught.value.fix
    return state.communicator.algorithms


def test_algorithms_that_need_the_nodes_are_there_only_with_them(ranks):
    assert set(ranks(4).run(without_a_topology)) == {tuple(ALGORITHMS)}
    assert "hierarchical" not in ranks(3).run(algorithms_of)[0]


def algorithms_of(state):
    return available(state.communicator._peers)


def many_tensors(state, bucket_bytes):
    """The sums, and how many all-reduces it took."""
    communicator = state.communicator
    shapes = [(3, 5), (0,), (), (1000,), (7,), (40, 2)]
    tensors = [torch.full(shape, float(index + state.world.rank)) for index, shape in enumerate(shapes)]
    tensors += [torch.full((6,), state.world.rank, dtype=torch.int64), torch.ones(5, 4).t()]
    before = count(communicator, "all-reduce (ring)")
    communicator.all_reduce_many(tensors, "sum", "ring", bucket_bytes)
    for index, tensor in enumerate(tensors[:6]):
        assert tensor.shape == shapes[index] and (tensor == 4 * index + 6).all(), index
    assert (tensors[6] == 6).all() and (tensors[7] == 4).all()
    return count(communicator, "all-reduce (ring)") - before


def count(communicator, kind):
    totals = communicator.counters.totals()
    return totals[kind].calls if kind in totals else 0


def test_many_tensors_go_in_one_call_a_type_or_in_buckets(ranks):
    assert ranks(4).run(many_tensors, None) == [2] * 4
    # From the last: 80 bytes wait; whole numbers wait; 80 + 320 is full; 28 wait, 4000 go alone, and so on.
    assert ranks(4).run(many_tensors, 400) == [5] * 4


def gradients_as_they_come(state):
    """A bucket is under way before the last gradient is there."""
    communicator = state.communicator
    layers = [torch.nn.Linear(50, 50) for _ in range(6)]
    torch.manual_seed(state.world.rank)
    value = torch.randn(4, 50)
    buckets = communicator.start.buckets("avg", "direct", bucket_bytes=25_000)
    seen = []

    def hand_over(parameter):
        buckets.put(parameter.grad)
        seen.append(buckets.under_way)

    for layer in layers:
        for parameter in layer.parameters():
            torch.nn.init.constant_(parameter, 0.01)
            parameter.register_post_accumulate_grad_hook(hand_over)
    for layer in layers:
        value = layer(value)
    value.sum().backward()
    expected = [parameter.grad.clone() for layer in layers for parameter in layer.parameters()]
    buckets.finish()
    for gradient, parameter in zip(expected, (p for layer in layers for p in layer.parameters()), strict=True):
        communicator.all_reduce(gradient, "avg")
        torch.testing.assert_close(parameter.grad, gradient)
    return seen


def test_buckets_leave_while_gradients_still_come(ranks):
    for seen in ranks(2).run(gradients_as_they_come):
        assert len(seen) == 12 and seen[5] >= 1 and seen[-1] >= 2


def counted(state, name):
    communicator = state.communicator
    kind = f"all-reduce ({name})"
    before = communicator.counters.totals().get(kind)
    sent = sum(communicator.sent_bytes.values())
    communicator.all_reduce(torch.ones(1000), "sum", name)
    after = communicator.counters.totals()[kind]
    calls, paid, seconds = (before.calls, before.payload_bytes, before.seconds) if before else (0, 0, 0.0)
    assert (after.calls - calls, after.payload_bytes - paid) == (1, 4000)
    assert after.timed_calls == after.calls and after.seconds > seconds
    return sum(communicator.sent_bytes.values()) - sent


@pytest.mark.parametrize("name", ALGORITHMS)
def test_each_call_is_counted_by_kind_and_algorithm(ranks, name):
    sent = ranks(4).run(counted, name)
    own = name not in ("flat", "hierarchical")
    assert (sum(sent) > 0) == own


def test_one_rank_alone_needs_no_process_group():
    world = world_of(0, LAYOUTS[1])
    with Communicator(world, topology=topology_of(LAYOUTS[1])) as communicator:
        tensor = torch.arange(4.0)
        for name in communicator.algorithms:
            assert communicator.all_reduce(tensor, "avg", name).tolist() == [0, 1, 2, 3]
        with pytest.raises(ToolkitError, match=r"does not support torch\.bool over one rank"):
            communicator.all_reduce(torch.ones(1, dtype=torch.bool))
        assert communicator.reduce_scatter(tensor).tolist() == [0, 1, 2, 3]
        assert communicator.all_gather(tensor).tolist() == communicator.all_to_all(tensor).tolist() == [0, 1, 2, 3]
        assert [one.tolist() for one in communicator.all_to_all_unequal(tensor, [4])] == [[0, 1, 2, 3]]
        assert communicator.gather(tensor[:1], 0) == [tensor[:1]] and communicator.reduce(tensor[1:2], 0) == 1
        assert communicator.scatter([tensor], tensor, 0).tolist() == communicator.broadcast(tensor, 0).tolist()
        communicator.barrier()


def test_ranks_without_a_process_group_are_told_how_to_start():
    with pytest.raises(OwnFailureError, match="default process group is not initialised for 2 ranks") as caught:
        Communicator(world_of(0, (2,)))
    assert "start_groups(world)" in caught.value.fix


def private_names(state):
    """What compat.py takes from torch does what we ask of it."""
    store = world_store()
    assert store.add(f"smoke of {state.world.rank}", 1) >= 1
    before = count_groups()
    group = dist.new_group(list(range(state.world.size)), use_local_synchronization=True)
    assert count_groups() == before + 1 and dist.get_world_size(group) == state.world.size


def test_private_names_of_torch_do_what_we_ask(ranks):
    ranks(2).run(private_names)
