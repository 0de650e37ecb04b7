"""Which CPUs a rank keeps: never more than it was given, never none, and none of another's where there are enough."""

from __future__ import annotations

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from toolkit.world.binding import Processors, RankOfNode, bind, unbound

# A busy machine is no fault of what is tested.
patiently = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def machine(nodes: int, cores_per_node: int, threads: int = 1, holes: frozenset[int] = frozenset()) -> Processors:
    """NUMA nodes of as many cores; hyper-threads are numbered behind all cores, as Linux does. `holes` are offline."""
    count = nodes * cores_per_node
    cores = [frozenset(core + count * thread for thread in range(threads)) - holes for core in range(count)]
    numa = {
        node: frozenset().union(*cores[node * cores_per_node : (node + 1) * cores_per_node]) for node in range(nodes)
    }
    return Processors(numa, tuple(core for core in cores if core))


def all_cpus(processors: Processors) -> frozenset[int]:
    return frozenset().union(*processors.cores)


def bound(processors, ranks, *, on_gpu):
    return [bind(rank, ranks, processors, on_gpu=on_gpu) for rank in range(len(ranks))]


@st.composite
def nodes_with_ranks(draw, gpus_alone=False):
    """(processors, ranks, on_gpu): 2 to 8 NUMA nodes with holes and SMT, a cpuset, GPUs of which one may be left out."""
    nodes, threads = draw(st.integers(1, 8)), draw(st.integers(1, 2))
    cores = draw(st.integers(1, 8))
    whole = nodes * cores * threads
    holes = draw(st.frozensets(st.integers(0, whole - 1), max_size=whole // 4))
    processors = machine(nodes, cores, threads, holes)
    cpus = all_cpus(processors)
    cpuset = frozenset(draw(st.lists(st.sampled_from(sorted(cpus)), min_size=1))) if draw(st.booleans()) else cpus
    on_gpu = gpus_alone or draw(st.booleans())
    if on_gpu:
        gpus = [gpu * nodes // 8 for gpu in range(8)]
        near = gpus[: draw(st.integers(1, 8))]
        if draw(st.booleans()):
            near = [*near[:-1], None]
    else:
        near = [None] * draw(st.integers(1, 12))
    return processors, [RankOfNode(cpuset, node) for node in near], on_gpu


@patiently
@given(nodes_with_ranks())
def test_whatever_the_node_no_rank_has_more_than_it_was_given_or_nothing(node):
    processors, ranks, on_gpu = node
    for rank, one in zip(ranks, bound(processors, ranks, on_gpu=on_gpu), strict=True):
        assert one.cpus and one.cpus <= rank.given
        assert 1 <= one.threads <= len(processors.cores_of(one.cpus))
        assert one.reason


@patiently
@given(nodes_with_ranks())
def test_ranks_that_are_held_share_no_core_and_differ_by_one_core_at_most(node):
    processors, ranks, on_gpu = node
    chosen = bound(processors, ranks, on_gpu=on_gpu)
    assume(all(rank.near is not None for rank in ranks) or not on_gpu)
    held = [(rank.near, one) for rank, one in zip(ranks, chosen, strict=True) if one.cpus != rank.given]
    cores = [frozenset(core) for _, one in held for core in processors.cores if core & one.cpus]
    assert len(cores) == len(set(cores)), "two ranks work on one core"
    for near in {near for near, _ in held}:
        sizes = {one.threads for where, one in held if where == near}
        assert max(sizes) - min(sizes) <= 1


@patiently
@given(nodes_with_ranks(gpus_alone=True))
def test_a_rank_that_is_held_by_its_gpu_lies_in_the_numa_node_of_that(node):
    processors, ranks, _ = node
    for rank, one in zip(ranks, bound(processors, ranks, on_gpu=True), strict=True):
        if one.cpus != rank.given:
            assert one.cpus <= processors.numa_nodes[rank.near]


@patiently
@given(nodes_with_ranks(), st.randoms())
def test_what_the_launcher_gave_to_one_alone_is_not_divided(node, random):
    processors, ranks, on_gpu = node
    cores = processors.cores_of(ranks[0].given)
    ranks = ranks[: len(cores)]
    random.shuffle(cores)
    own = [RankOfNode(frozenset().union(*cores[n :: len(ranks)]), rank.near) for n, rank in enumerate(ranks)]
    for rank, one in zip(own, bound(processors, own, on_gpu=on_gpu), strict=True):
        near = processors.numa_nodes[rank.near] if rank.near is not None else frozenset()
        assert one.cpus in (rank.given, rank.given & near)


def test_two_ranks_on_a_laptop_keep_all_of_it():
    laptop = machine(1, 2)
    for one in bound(laptop, [RankOfNode(frozenset({0, 1}))] * 2, on_gpu=False):
        assert (one.cpus, one.threads, one.reason) == ({0, 1}, 1, "2 ranks share one NUMA node")
    for one in bound(laptop, [RankOfNode(frozenset({0, 1}))] * 3, on_gpu=False):
        assert (one.cpus, one.threads, one.reason) == ({0, 1}, 1, "3 ranks share 2 cores")


def test_a_rank_alone_keeps_what_it_has_and_says_why():
    server = machine(2, 4)
    (alone,) = bound(server, [RankOfNode(all_cpus(server))], on_gpu=False)
    assert (alone.cpus, alone.threads, alone.reason) == (all_cpus(server), 8, "the node has no other rank")
    own = [RankOfNode(frozenset({0, 1, 4})), RankOfNode(frozenset({2, 3, 5}))]
    for rank, one in zip(own, bound(server, own, on_gpu=False), strict=True):
        assert (one.cpus, one.threads, one.reason) == (rank.given, 3, "no other rank may use these CPUs")


def test_ranks_without_gpus_divide_two_sockets_core_by_core():
    server = machine(2, 4, threads=2)
    chosen = bound(server, [RankOfNode(all_cpus(server))] * 4, on_gpu=False)
    assert [sorted(one.cpus) for one in chosen] == [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]]
    assert {(one.threads, one.reason) for one in chosen} == {(2, "4 ranks divide the CPUs by NUMA node")}


def test_seven_of_eight_gpus_divide_their_own_numa_nodes():
    server = machine(2, 12)
    ranks = [RankOfNode(all_cpus(server), gpu // 4) for gpu in range(7)]
    chosen = bound(server, ranks, on_gpu=True)
    assert [one.threads for one in chosen] == [3, 3, 3, 3, 4, 4, 4]
    assert chosen[0].reason == "NUMA node 0 is next to its GPU; 4 ranks divide it"
    assert chosen[6].reason == "NUMA node 1 is next to its GPU; 3 ranks divide it"


def test_a_mask_far_from_the_gpu_is_kept_and_named():
    server = machine(2, 8)
    (far,) = bound(server, [RankOfNode(frozenset(range(8)), 1)], on_gpu=True)
    assert far.cpus == set(range(8))
    assert far.reason == "NUMA node 1 is next to its GPU, but contains none of the rank's CPUs"
    (stray,) = bound(server, [RankOfNode(frozenset(range(9)), 1)], on_gpu=True)
    assert len(stray.cpus) == 9 and stray.reason.endswith("but contains only 1 core of the 9 assigned")


def test_more_ranks_than_the_numa_node_has_cores_keep_all():
    server = machine(2, 2)
    for one in bound(server, [RankOfNode(all_cpus(server), 1)] * 3, on_gpu=True):
        assert (one.cpus, one.threads) == (all_cpus(server), 1)
        assert one.reason == "NUMA node 1 is next to its GPU, and 3 ranks share its 2 cores"


def test_where_other_ranks_are_unknown_nothing_is_divided():
    server = machine(2, 8)
    everything = all_cpus(server)
    mine = bind(0, [RankOfNode(everything, 0), RankOfNode(everything, None)], server, on_gpu=True)
    assert (mine.cpus, mine.threads) == (set(range(8)), 8) and "unknown" in mine.reason
    mine = bind(1, [RankOfNode(None, 0), RankOfNode(everything, 0)], server, on_gpu=True)
    assert (mine.cpus, mine.threads) == (set(range(8)), 8) and "unknown" in mine.reason
    assert bind(1, [RankOfNode(None), RankOfNode(everything)], server, on_gpu=False).cpus == everything


def test_masks_that_overlap_in_part_are_somebodys_wish():
    server = machine(2, 8)
    ranks = [RankOfNode(frozenset(range(10)), 0), RankOfNode(frozenset(range(8, 16)), 1)]
    assert [one.cpus for one in bound(server, ranks, on_gpu=True)] == [rank.given for rank in ranks]


def test_unbound_ranks_leave_each_other_room():
    server = machine(2, 8, threads=2)
    assert unbound(0, [RankOfNode(all_cpus(server))] * 4, server).threads == 4
    own = [RankOfNode(frozenset(range(8))), RankOfNode(frozenset(range(8, 16)))]
    assert unbound(0, own, server).threads == 8
