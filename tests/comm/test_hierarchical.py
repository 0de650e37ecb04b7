"""The three-stage all-reduce and its DDP hook on real gloo ranks, nodes simulated by host names."""

import hashlib
import os
import random
import re
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from toolkit.comm.communicator import Communicator
from toolkit.comm.compat import reduce_scatter_single
from toolkit.comm.counters import Counters
from toolkit.comm.gradient import find_reduction, hierarchical_hook
from toolkit.comm.hierarchical import CROSS_ALL_REDUCE, NODE_REDUCE_SCATTER, HierarchicalReducer
from toolkit.errors import ToolkitError
from toolkit.topology.gather import gather_topology
from toolkit.topology.groups import plan_groups
from toolkit.world.facts import World

TENSORS = 160  # over all ranks
SUMMABLE = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64]


def make_world(rank, nodes, local_size):
    node, local_rank = divmod(rank, local_size)
    host = f"node{node}"
    size = nodes * local_size
    return World(rank, local_rank, size, local_size, node, nodes, host, "cpu", "local", "test")


def assert_same_bits_on_all_ranks(data, where):
    digest = torch.frombuffer(bytearray(hashlib.sha256(data).digest()), dtype=torch.uint8)
    digests = [torch.empty_like(digest) for _ in range(dist.get_world_size())]
    dist.all_gather(digests, digest)
    assert all(torch.equal(digests[0], other) for other in digests), where


def bits(tensor):
    return tensor.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes()


def draw_tensor(shared, rank_generator, dtype, whole_numbers):
    """Same shape and strides on all ranks (`shared`), other values on each; empty and single elements included."""
    shape = shared.choice([(0,), (1,), (), (3, 0, 2), (shared.randint(1, 4000),), (shared.randint(1, 40), 7, 5)])
    if whole_numbers:
        values = torch.randint(-8, 9, shape, generator=rank_generator).to(dtype)
    else:
        values = (torch.randn(shape, generator=rank_generator) * 10 ** shared.uniform(-3, 3)).to(dtype)
    view = shared.choice(["whole", "transposed", "strided"])
    if view == "transposed" and values.dim() > 1:
        return values.transpose(0, -1)
    if view == "strided" and values.dim() > 0:
        return values[::2]
    return values


def check_equal_to_flat(reducer, rank, size):
    generator = torch.Generator().manual_seed(1000 + rank)
    for seed in range(TENSORS // size):
        shared = random.Random(seed)
        dtype = shared.choice(SUMMABLE)
        op = shared.choice(["sum", "avg"]) if dtype.is_floating_point else "sum"
        tensor = draw_tensor(shared, generator, dtype, whole_numbers=True)
        expected = tensor.clone()
        dist.all_reduce(expected)
        reducer.all_reduce(tensor, op)
        expected = expected / size if op == "avg" else expected
        assert torch.equal(tensor, expected), (seed, dtype, op, tuple(tensor.shape))


def check_gpu_collective_exists(size):
    """A GPU uses torch's own reduce-scatter, under the name that this version has."""
    part = torch.empty(3)
    reduce_scatter_single(part, torch.ones(3 * size))
    assert part.tolist() == [size] * 3


def check_rounding(reducer, rank, size):
    generator = torch.Generator().manual_seed(2000 + rank)
    for seed in range(TENSORS // size):
        shared = random.Random(seed)
        dtype = shared.choice([torch.float32, torch.bfloat16])
        tensor = draw_tensor(shared, generator, dtype, whole_numbers=False)
        exact, magnitude = tensor.double(), tensor.double().abs()
        dist.all_reduce(exact)
        dist.all_reduce(magnitude)
        reducer.all_reduce(tensor)
        bound = 2 * (size - 1) * torch.finfo(dtype).eps * magnitude
        assert ((tensor.double() - exact).abs() <= bound).all(), (seed, dtype, tuple(tensor.shape))
        assert_same_bits_on_all_ranks(bits(tensor), seed)


def check_model_gradients(world, topology):
    """Several buckets in flight, three steps: as flat DDP, and the same bits on all ranks."""
    counters = Counters()
    models = {}
    with Communicator(world, topology=topology) as communicator:
        communicator.choose_by_measurement(budget_s=0.1)  # the job finds it in the run directory
    for setting in ("flat", "auto", "measured"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(33, 601),
            torch.nn.Tanh(),
            torch.nn.Linear(601, 500),
            torch.nn.Linear(500, 500),
            torch.nn.Linear(500, 3),
        )
        models[setting] = DistributedDataParallel(model, bucket_cap_mb=0.01)
        found = find_reduction(dist.group.WORLD, world, setting, topology, counters)
        found.register_on(models[setting])
        expected = {
            "flat": "flat (the job sets parallel.reduction to flat)",
            "auto": f"hierarchical ({world.nodes} nodes with {world.local_size} ranks each)",
        }
        if setting == "measured":
            assert re.fullmatch(
                r"gradient reduction: chosen by measurement: .* at 4 KiB.* \(measured 20[^ ]*Z\)", found.line
            ), found.line
        else:
            assert found.line == f"gradient reduction: {expected[setting]}"
    torch.manual_seed(100 + world.rank)
    for _ in range(3):
        batch = torch.randn(8, 33)
        for model in models.values():
            model.zero_grad()
            model(batch).square().mean().backward()
        gradients = {name: [p.grad for p in model.parameters()] for name, model in models.items()}
        for setting in ("auto", "measured"):
            for flat, ours in zip(gradients["flat"], gradients[setting], strict=True):
                torch.testing.assert_close(ours, flat, rtol=1e-5, atol=1e-7)
                assert_same_bits_on_all_ranks(bits(ours), f"gradient, {setting}")
    totals = counters.totals()
    assert totals[CROSS_ALL_REDUCE].calls >= 6, "the test must have several buckets a step"
    assert totals[CROSS_ALL_REDUCE].seconds > 0
    scattered, crossed = totals[NODE_REDUCE_SCATTER].payload_bytes, totals[CROSS_ALL_REDUCE].payload_bytes
    assert scattered == crossed * world.local_size


def check_error_reaches_backward(plan):
    class Failing(HierarchicalReducer):
        def _all_reduce(self, part, op):
            raise RuntimeError("link went down")

    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    model.register_comm_hook(None, hierarchical_hook(Failing(plan)))
    with pytest.raises(RuntimeError, match="link went down"):
        model(torch.ones(2, 4)).sum().backward()


def run_rank(rank, nodes, local_size, folder):
    # Forked from a server that knows neither the test's environment nor its output.
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
    with (folder / f"said-{rank}").open("w") as said:
        os.dup2(said.fileno(), 2)
    torch.set_num_threads(1)
    size = nodes * local_size
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    world = make_world(rank, nodes, local_size)
    topology = gather_topology(world)
    assert_same_bits_on_all_ranks(repr(topology).encode(), "topology")
    assert [facts.host.value for facts in topology.nodes] == [f"node{n}" for n in range(nodes)]
    assert all([gpu.label for gpu in facts.hardware.gpus] == ["GPU0"] for facts in topology.nodes)

    plan = plan_groups(topology)
    reducer = HierarchicalReducer(plan, segment_bytes=8000)  # large tensors take several segments
    check_equal_to_flat(reducer, rank, size)
    check_rounding(reducer, rank, size)
    check_gpu_collective_exists(size)
    with pytest.raises(ValueError, match="average"):
        reducer.all_reduce(torch.ones(3, dtype=torch.int64), "avg")
    check_model_gradients(replace(world, run_dir=folder), topology)
    check_error_reaches_backward(plan)
    check_one_node_is_refused(world)
    dist.destroy_process_group()


def check_one_node_is_refused(world):
    alone = gather_topology(make_world(world.rank, 1, world.size))
    found = find_reduction(dist.group.WORLD, world, "auto", alone)
    assert found.hook is None
    assert found.line == f"gradient reduction: flat (all {world.size} ranks are on one node)"
    with pytest.raises(ToolkitError, match="two or more nodes") as caught:
        find_reduction(dist.group.WORLD, world, "hierarchical", alone)
    assert "reduction = " in caught.value.fix


@pytest.mark.parametrize(("nodes", "local_size"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.evidence)])
def test_ranks_reduce_as_flat_does(nodes, local_size, tmp_path):
    calls = tmp_path / "calls"
    fake = tmp_path / "nvidia-smi"
    fake.write_text(f'#!/bin/sh\necho "$$" >> {calls}\nprintf "\\tGPU0\\tCPU Affinity\\nGPU0\\t X \\t0-3\\n"\n')
    fake.chmod(0o755)
    ranks = nodes * local_size
    mp.start_processes(run_rank, (nodes, local_size, tmp_path), nprocs=ranks, start_method="forkserver")
    # One question a node, and one more when all ranks count as one node: never one a rank.
    assert len(calls.read_text().splitlines()) == nodes + 1
    said = [(tmp_path / f"said-{rank}").read_text().count("gradient reduction: ") for rank in range(ranks)]
    assert said == [4] + [0] * (ranks - 1), "rank 0 alone says what is used"
