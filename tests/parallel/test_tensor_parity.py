"""Tensor parallel ranks train as one process does: losses, norms of gradients, parameters, on every mesh that has them."""

from __future__ import annotations

import pytest
from sampling import sampled, selected
from tensor_cases import WAYS, difference, job, trained

# Of float32, whose sums are taken in another order. The least of the planted faults below is a thousand times as large.
BOUND = 1e-5
BOUND_BF16 = 5e-3  # of losses and norms: products of 8 bits are rounded before ranks add them up

LAYOUTS = {
    2: [{"tp": 2}, {"tp": 2, "sequence": True}],
    4: [
        {"tp": 4},
        {"tp": 4, "sequence": True},
        {"tp": 2, "replicate": 2},
        {"tp": 2, "replicate": 2, "sequence": True},
        {"tp": 2, "shard": 2},
        {"tp": 2, "shard": 2, "sequence": True},
    ],
}
# Every layout with a clipped model whose head is tied, and all ways on some.
ALL_WAYS = ({"tp": 2}, {"tp": 2, "shard": 2, "sequence": True})
CASES = [
    (ranks, way, parallel)
    for ranks, layouts in LAYOUTS.items()
    for parallel in layouts
    for way in (WAYS if parallel in ALL_WAYS else ("clipped",))
] + [(4, "tied", {"tp": 2, "shard": 2, "zero": 1}), (4, "tied", {"tp": 2, "shard": 2, "zero": 2, "sequence": True})]

SAMPLE_ON_4 = (4, "clipped", {"tp": 2, "shard": 2, "sequence": True})


def named(way: str, parallel: dict) -> str:
    return f"{way}, {' '.join(f'{key} {value}' for key, value in parallel.items())}"


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tensor")
    all_found = {1: trained(1, folder / "1", {way: job(**tables) for way, tables in WAYS.items()})}
    cases = [tuple(case.values()) for case in selected(request, "test_ranks_train_as_one_process_does")]
    for ranks in LAYOUTS:
        configs = {named(way, parallel): job(parallel, **WAYS[way]) for count, way, parallel in cases if count == ranks}
        all_found[ranks] = trained(ranks, folder / str(ranks), configs) if configs else {}
    return all_found


@pytest.mark.parametrize(
    ("ranks", "way", "parallel"),
    sampled(CASES, lambda case: case[0] == 2 or case == SAMPLE_ON_4),
    ids=[f"{r} {named(w, p)}" for r, w, p in CASES],
)
def test_ranks_train_as_one_process_does(found, ranks, way, parallel):
    one, several = found[1][way], found[ranks][named(way, parallel)]
    if way == "bf16":
        assert difference(several, one, "losses", "norms") < BOUND_BF16
    else:
        assert difference(several, one) < BOUND
