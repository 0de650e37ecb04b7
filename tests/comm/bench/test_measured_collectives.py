"""Real measurements over gloo ranks: all operations are right, and what is made wrong is counted."""

import dataclasses
import time

import pytest
import torch

from toolkit.comm.bench import measure as measuring
from toolkit.comm.bench.measure import find_limit, measure, torch_trials
from toolkit.comm.bench.request import BenchRequest
from toolkit.comm.bench.trial import CollectiveCase, Room, Trial, pattern, pattern_sum
from toolkit.metrics.collectives import OPERATIONS
from toolkit.topology.facts import Topology, unknown
from toolkit.topology.machine_facts import topology_of_machine
from toolkit.world.facts import World

QUICK = {"iterations": 2, "warmup": 1, "factor": 8}


def test_the_pattern_is_exact_and_tells_ranks_and_places_apart():
    summed = sum(pattern(rank, 1000) for rank in range(7))
    assert torch.equal(summed, pattern_sum(7, 1000)) and torch.equal(pattern_sum(7, 500, 500), summed[500:])
    assert not torch.equal(pattern(0, 64), pattern(1, 64)) and not torch.equal(pattern(0, 64), pattern(0, 64, 64))
    assert pattern_sum(60_000, 251).max() < 2**24


def test_calls_take_turns_on_the_buffers():
    room = Room(100, "cpu")
    starts = [room.sent(30, turn).storage_offset() for turn in range(5)]
    assert starts == [0, 30, 60, 0, 30]
    room.received(100, 3).fill_(1)
    room.clear()
    assert room.received(100, 0).sum() == 0 and room.sent(100, 0).sum() == 0


def measured(state, arguments, planted=None):
    """(what was measured, the lines); `planted` is a rank whose results are wrong in two places."""
    lines = []
    if planted is not None:
        real = measuring.torch_trials

        def wrong(*given):
            return tuple(damaged(trial, state.world.rank == planted) for trial in real(*given))

        measuring.torch_trials = wrong
    try:
        found = measure(state.world, BenchRequest(**QUICK, **arguments), lines.append)
    finally:
        if planted is not None:
            measuring.torch_trials = real
    return found, lines


def damaged(trial, here):
    def call(turn):
        found = trial.call(turn)
        if here and found is not None:
            found[1:3] += 1
        return found

    return trial and dataclasses.replace(trial, call=call)


@pytest.mark.parametrize("size", [2, 3])
def test_every_operation_is_measured_and_right(ranks, size):
    answers = ranks(size).run(measured, {"operations": "all", "sizes": "64..1K"})
    found, lines = answers[0]
    assert [series.operation for series in found.series] == list(OPERATIONS)
    assert all(series.wrong == 0 and len(series.rows) >= 2 for series in found.series)
    for series in found.series:
        for row in series.rows:
            assert all(half.time_us > 0 and half.median_us > 0 for half in row.halves)
    assert [len(other) for _, other in answers[1:]] == [0] * (size - 1), "rank 0 alone prints"
    blocks = "\n".join(lines).split("# Collective test starting: ")[1:]
    for series, block in zip(found.series, blocks, strict=True):
        printed = block.splitlines()
        assert printed[0] == OPERATIONS[series.operation].program
        assert sum(line.startswith("#  Rank") for line in printed) == size
        assert sum(not line.startswith("#") for line in printed[1:]) == len(series.rows)


def test_all_algorithms_and_what_the_model_expects_of_them(ranks):
    found, _ = ranks(4).run(measured, {"algorithms": "all", "sizes": "1K"})[0]
    names = [series.algorithm for series in found.series]
    assert {"flat", "ring", "leader"} < set(names)
    expected = [series.rows[0].model_us / series.rows[0].in_place.time_us for series in found.series]
    # On a busy machine either is late; far off, it would be of another size or in another unit.
    assert 0.03 < min(expected) <= max(expected) < 30
    assert len(set(expected)) == len(expected), "each algorithm has its own"


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_result_that_is_wrong_is_counted(ranks, operation):
    """Two elements on a rank that does not print, or on the one that has a result, in each half."""
    planted = 0 if operation == "reduce" else 1
    found, lines = ranks(2).run(measured, {"operations": operation, "sizes": "4K"}, planted)[0]
    (series,) = found.series
    assert [half.wrong for row in series.rows for half in row.halves] == [2] * len(series.rows[0].halves)
    assert f"# Out of bounds values : {series.wrong} FAILED" in lines


SLOW_S = 0.05


def measured_with_a_slow_rank(state):
    """Calls in which no rank waits for another, and rank 1 is slow."""

    def slow(_communicator, case, _algorithm, room):
        def call(turn):
            time.sleep(SLOW_S if case.rank == 1 else 0)

        trial = Trial(call, lambda turn: room.sent(case.elements, turn), case)
        return trial, trial

    real, measuring.torch_trials = measuring.torch_trials, slow
    try:
        return measure(state.world, BenchRequest(sizes="64", **QUICK), lambda line: None)
    finally:
        measuring.torch_trials = real


def test_the_time_is_that_of_the_slowest_rank(ranks):
    found = ranks(2).run(measured_with_a_slow_rank)[0]
    (row,) = found.series[0].rows
    assert all(min(half.time_us, half.median_us) > 0.9e6 * SLOW_S for half in row.halves)


def wrong_part(state):
    """What a rank counts when a message went to the wrong place, or did not come."""
    case = CollectiveCase("all_gather", state.world.rank, 2, 64, "cpu")
    trial, _ = torch_trials(state.communicator, case, "flat", Room(64, "cpu"))
    swapped = dataclasses.replace(trial, call=lambda turn: trial.call(turn).roll(32))
    short = dataclasses.replace(trial, call=lambda turn: trial.call(turn)[:32])
    missing = dataclasses.replace(trial, call=lambda turn: None)
    return [one.count_wrong() for one in (trial, swapped, short, missing)]


def test_parts_at_the_wrong_place_and_missing_ones_are_wrong(ranks):
    assert ranks(2).run(wrong_part) == [[0, 64, 64, 64]] * 2


def test_a_run_that_is_asked_to_stop_keeps_what_it_has(ranks):
    found, lines = ranks(2).run(stopped)[0]
    assert [len(series.rows) for series in found.series] == [2]
    assert lines[-1] == "# Skipped: the remaining series: the run received a stop request"


class StoppingWorld(World):
    """Asked to stop after two sizes."""

    def should_stop(self, step):
        return step == 2


def stopped(state):
    world = StoppingWorld(**{field.name: getattr(state.world, field.name) for field in dataclasses.fields(World)})
    lines = []
    return measure(world, BenchRequest(operations="all", sizes="8..4K", **QUICK), lines.append), lines


def test_the_limit_of_one_node_without_gpus_is_a_cores_copy():
    world = World(0, 0, 2, 2, 0, 1, "n1", "cpu", "local", "test")
    limit, missing = find_limit(world, Topology((), {"n1": (0, 1)}), 1 << 20)
    assert missing == "" and limit.of == "rank" and limit.gb_per_s > 0.01
    assert limit.source == "memcpy of one core, 1 MiB at a time, measured"


@pytest.mark.parametrize(
    ("machine", "nodes", "device", "of", "gb_per_s"),
    [
        ("dgx-a100", 1, "cuda:0", "rank", 300.0),  # 12 NVLinks of 25 GB/s
        ("dgx-a100", 2, "cuda:0", "node", 200.0),  # 8 ports of 200 Gbit/s
        ("dgx-a100", 2, "cpu", "node", 200.0),
        ("gb200", 2, "cuda:0", "rank", 900.0),  # one NVLink fabric: 18 of 50 GB/s
        ("pcie-8", 1, "cuda:0", None, "not all connected by NVLink"),
        ("dgx-1", 1, "cuda:0", None, "not all connected by NVLink"),
    ],
)
def test_the_limit_of_gpus_and_nodes_is_that_of_their_links(machine, nodes, device, of, gb_per_s):
    topology = topology_of_machine(machine, [nodes])
    local = len(topology.nodes[0].hardware.gpus)
    ranks = {f"node{node}": tuple(range(node * local, (node + 1) * local)) for node in range(nodes)}
    world = World(0, 0, nodes * local, local, 0, nodes, "node0", device, "srun", "test")
    limit, missing = find_limit(world, dataclasses.replace(topology, ranks_by_host=ranks), 1 << 20)
    if of is None:
        assert limit is None and gb_per_s in missing
    else:
        assert (limit.of, limit.gb_per_s, missing) == (of, pytest.approx(gb_per_s), "")


def test_a_node_whose_adapters_tell_nothing_leaves_no_limit():
    topology = topology_of_machine("dgx-a100", [2])
    silent = dataclasses.replace(topology.nodes[1].hardware, nics=unknown("/sys", "no such folder"))
    nodes = (topology.nodes[0], dataclasses.replace(topology.nodes[1], hardware=silent))
    ranks = {"node0": tuple(range(8)), "node1": tuple(range(8, 16))}
    world = World(0, 0, 16, 8, 0, 2, "node0", "cuda:0", "srun", "test")
    limit, missing = find_limit(world, dataclasses.replace(topology, nodes=nodes, ranks_by_host=ranks), 1 << 20)
    assert limit is None and missing == "limit: the rate of every network adapter of node1 is unknown"


def test_without_facts_of_nodes_there_is_no_limit_and_it_is_said():
    world = World(0, 0, 2, 1, 0, 2, "n1", "cpu", "local", "test")
    limit, missing = find_limit(world, Topology((), {"n1": (0,), "n2": (1,)}), 1 << 20)
    assert limit is None and missing == "limit: no node has reported its topology"
