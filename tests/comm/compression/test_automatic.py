"""The automatic choice: compressed where a link is slow, dense where it is fast, the same on all ranks, without a flutter."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from compression_cases import digest, table, tiers_of

from toolkit.comm.compression.automatic import Bucket, Use, chosen
from toolkit.comm.compression.reducer import GradientCompression

LATENCY_S = 0.0005


@pytest.mark.parametrize(
    ("current", "expected_s", "wanted"),
    [
        ("none", {"none": 1.0, "bf16": 0.9, "int8": 0.88}, "none"),  # gains less than 15 %
        ("none", {"none": 1.0, "bf16": 0.6, "int8": 0.4}, "int8"),
        ("none", {"none": 1.0, "bf16": 0.6, "int8": 1.4}, "bf16"),
        ("int8", {"none": 0.9, "bf16": 1.1, "int8": 1.0}, "none"),
        ("int8", {"none": 1.01, "bf16": 1.0, "int8": 1.0}, "int8"),
        ("bf16", {"none": 2.0, "bf16": 1.0, "int8": 0.9}, "bf16"),
        ("bf16", {"none": 2.0, "bf16": 1.0, "int8": 0.5}, "int8"),
    ],
)
def test_a_candidate_must_gain_enough_and_dense_returns_at_once(current, expected_s, wanted):
    assert chosen(current, expected_s) == wanted


def test_dense_steps_are_no_trial_and_nothing_is_chosen_for_small_parameters(ranks):
    for used, other_s, choices in ranks(2).run(after_dense_steps):
        assert used == ["none"] * 35 + ["bf16"] * 3 + ["int8"] * 3
        assert set(choices) == {"large"}
        assert other_s["none"] == 0 and all(0 <= other_s[name] < 1e-4 for name in ("bf16", "int8"))


def after_dense_steps(state: Any) -> tuple[list[str], dict[str, float], dict[str, str]]:
    """The algorithms of 41 steps, then the seconds per number of candidates and the choices after a decision."""
    peers = state.communicator.peers
    shapes = {"large": (1 << 16,), "bias": (8,)}
    compression = GradientCompression(
        table("auto", dense_steps=35), {name: torch.zeros(shape) for name, shape in shapes.items()}
    )
    compression.kept.peers = peers
    choice = compression._choice
    assert choice is not None
    used = []
    for _ in range(42):
        for name, shape in shapes.items():
            gradient = torch.ones(shape)
            compression.reduce([name], [gradient], peers)
            if name == "large":
                used.append(compression._algorithm_of(compression._bucket([name], [gradient])))
    return used[:41], choice._other_s, choice._by_bucket


def test_a_rehearsal_leaves_no_choice(ranks):
    assert ranks(2).run(after_a_rehearsal) == [{}, {}]


def after_a_rehearsal(state: Any) -> dict[str, str]:
    peers = state.communicator.peers
    compression = GradientCompression(table("auto", policy="aggressive"), {"matrix": torch.zeros(64, 64)})
    compression.kept.peers = peers
    for _ in range(12):
        compression.reduce(["matrix"], [torch.ones(64, 64)], peers)
    assert compression._choice is not None
    assert compression._choice._by_bucket == {"matrix": "powersgd"}
    compression.reset()
    compression.reduce(["matrix"], [torch.ones(64, 64)], peers)
    return compression._choice._by_bucket


def on_a_link(
    state: Any, megabytes_per_s: list[float], policy: str = "bandwidth_aware", waits_s: dict[str, float] | None = None
) -> list[dict[str, str]]:
    """The choices after each 50 steps over a link of these rates; rank 1 always arrives late.

    `waits_s` are seconds per step of waits within the exchanges of an algorithm.
    """
    peers = state.communicator.peers
    shapes = {"vector": (1 << 16,), "matrix": (256, 256)}
    settings = table("auto", policy=policy)
    compression = GradientCompression(settings, {name: torch.zeros(shape) for name, shape in shapes.items()})
    compression.kept.peers = peers
    choice = compression._choice
    assert choice is not None
    rate = 1.0
    choice._link = lambda peers: (LATENCY_S, 1 / (rate * 1e6))  # type: ignore[method-assign]
    found = []
    for number, rate in enumerate(megabytes_per_s):
        for step in range(50):
            for name, shape in shapes.items():
                gradient = torch.ones(shape) * peers.place * 10.0**-number
                compression.reduce([name], [gradient], peers)
            # What these messages would take on the link; the time to encode is far below.
            late_s = (0.5 + 0.005 * (step % 7 == 0)) * (1 - peers.place)
            for name, use in choice._uses[-1].items() if choice._is_measured else ():
                other_s = late_s + 1e-9 * use.numbers + (waits_s or {}).get(name, 0.0)
                use.seconds = use.transfers * LATENCY_S + use.sent / (rate * 1e6) + other_s
        found.append({name: choice._by_bucket[name] for name in shapes})
    return found


def test_the_choice_follows_the_link_and_changes_twice(ranks):
    found = ranks(2).run(on_a_link, [100_000.0, 5.0, 5.0, 100_000.0, 100_000.0, 100_000.0])
    assert found[0] == found[1], "ranks agree"
    dense, slim = {"vector": "none", "matrix": "none"}, {"vector": "int8", "matrix": "powersgd"}
    assert found[0] == [dense, slim, slim, dense, dense, dense], "the first decision on a changed link suffices"


def test_waits_between_the_transfers_of_a_trial_count(ranks):
    slim = {"vector": "int8", "matrix": "powersgd"}
    assert ranks(2).run(on_a_link, [5.0], "bandwidth_aware", {})[0] == [slim]
    assert ranks(2).run(on_a_link, [5.0], "bandwidth_aware", {"powersgd": 0.05})[0] == [slim | {"matrix": "int8"}]


@pytest.mark.parametrize("in_nodes", [False, True])
def test_longer_transfers_give_the_rate_of_the_link(ranks, in_nodes):
    for latency_s, per_byte_s, tried in ranks(4).run(rate_of_a_link, in_nodes, 1e8):
        assert (latency_s, per_byte_s) == (pytest.approx(LATENCY_S), pytest.approx(1e-8))
        assert tried[0] == 1 and all(later == 4 * sooner for sooner, later in pairwise(tried[1:])), tried
    for _, per_byte_s, tried in ranks(4).run(rate_of_a_link, in_nodes, 1e4):
        assert per_byte_s == pytest.approx(1e-4) and len(tried) == 2, "the first transfer is long enough"


def rate_of_a_link(state: Any, in_nodes: bool, bytes_per_s: float) -> tuple[float, float, list[int]]:
    """What the choice takes a link for that carries the bytes of a ring between nodes, and the numbers of its transfers."""
    peers = state.communicator.peers
    compression = GradientCompression(table("auto"), {"matrix": torch.zeros(2048, 2048)})
    nodes, ranks_per_node, tried = (2, 2, []) if in_nodes else (4, 1, [])
    if in_nodes:
        compression.use_tiers(tiers_of(state))
    choice = compression._choice
    assert choice is not None
    choice._buckets = {"matrix": compression._bucket(["matrix"], [torch.zeros(2048, 2048)])}

    def transfer_s(numbers: int, peers: Any) -> float:
        tried.append(numbers)
        return LATENCY_S + (numbers > 1) * 2 * 4 * numbers * (nodes - 1) / nodes / ranks_per_node / bytes_per_s

    choice._transfer_s = transfer_s  # type: ignore[method-assign]
    return *choice._link(peers), tried


def test_a_load_in_trials_ends_them(ranks):
    for used in ranks(2).run(trials_around_a_load):
        assert used == ["bf16"] * 2 + ["none"] * 10 + ["bf16"] * 3


def trials_around_a_load(state: Any) -> list[str]:
    """The algorithms of the steps from the first trial on, with the state of step 2 loaded after two of them."""
    peers = state.communicator.peers
    compression = GradientCompression(table("auto"), {"vector": torch.zeros(8192)})
    compression.kept.peers = peers
    used = []
    for step in range(25):
        if step == 12:
            compression.load_state_dict({"step": 2})
        compression.reduce(["vector"], [torch.ones(8192)], peers)
        used.append(compression._algorithm_of(compression._bucket(["vector"], [torch.ones(8192)])))
    return used[10:]


def test_ranks_that_are_late_by_turns_delay_no_candidate(ranks):
    assert ranks(2).run(others_with_late_ranks) == [pytest.approx(1e-9)] * 2


def others_with_late_ranks(state: Any) -> float:
    """C of int8 after steps in each of which one rank comes last, and the other one waits for it."""
    peers = state.communicator.peers
    compression = GradientCompression(table("auto"), {"vector": torch.zeros(8192)})
    choice = compression._choice
    assert choice is not None
    choice._buckets = {"vector": Bucket("vector", 10**6)}
    choice._uses = [{"int8": Use(1e-3 + 0.5 * (step % 2 == peers.place), 10**6)} for step in range(3)]  # type: ignore[misc]
    return choice._measured(0.0, 0.0, peers)["int8"]


def test_ranks_of_nodes_choose_alike(ranks):
    bits, choices = zip(*ranks(4).run(chosen_in_nodes), strict=True)
    assert len(set(bits)) == 1 and choices[0] == choices[1] == choices[2] == choices[3] != {}


def chosen_in_nodes(state: Any) -> tuple[str, dict[str, str]]:
    peers = state.communicator.peers
    compression = GradientCompression(table("auto"), {"vector": torch.zeros(8192), "matrix": torch.zeros(96, 96)})
    compression.kept.peers = peers
    compression.use_tiers(tiers_of(state))
    for step in range(20):
        own = torch.randn(8192 + 96 * 96, generator=torch.Generator().manual_seed(4 * step + peers.place))
        compression.reduce(["vector", "matrix"], [own[:8192], own[8192:].view(96, 96)], peers)
    assert compression._choice is not None
    return digest([own]), compression._choice._by_bucket


def test_policies_choose_without_times(ranks):
    (conservative, *_), _ = ranks(2).run(on_a_link, [1.0], "conservative")
    (aggressive, *_), _ = ranks(2).run(on_a_link, [1.0], "aggressive")
    assert conservative == {"vector": "int8", "matrix": "int8"}
    assert aggressive == {"vector": "int8", "matrix": "powersgd"}
    # Every 50 steps, gradients become ten times as small.
    found, _ = ranks(2).run(on_a_link, [1.0, 1.0, 1.0], "loss_aware")
    assert [one["matrix"] for one in found] == ["int8", "int8", "int8"]
    steady, _ = ranks(2).run(steady_norm, 2)
    assert steady == ["int8", "powersgd"], "the first comparison has nothing before it"


def steady_norm(state: Any, decisions: int) -> list[str]:
    peers = state.communicator.peers
    compression = GradientCompression(table("auto", policy="loss_aware"), {"matrix": torch.zeros(64, 64)})
    compression.kept.peers = peers
    assert compression._choice is not None
    found = []
    for _ in range(decisions):
        for _ in range(50):
            compression.reduce(["matrix"], [torch.ones(64, 64)], peers)
        found.append(compression._choice._by_bucket["matrix"])
    return found


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_a_change_from_powersgd_loses_no_gradient(ranks, scale):
    for difference, is_empty in ranks(2).run(after_a_change, ["powersgd"] * 3 + ["none"], scale):
        assert difference < 1e-5 and is_empty
    for difference, is_empty in ranks(2).run(after_a_change, ["powersgd"] * 3 + ["int8"], scale):
        assert difference < 0.02 and is_empty
    for difference, is_empty in ranks(2).run(after_a_change, ["powersgd"] * 3, scale):
        assert difference > 0.1 and not is_empty


def after_a_change(state: Any, algorithms: list[str], scale: float) -> tuple[float, bool]:
    """The difference between the sums of gradients of a scaled loss and of results, and whether the residual is zero."""
    peers = state.communicator.peers
    compression = GradientCompression(table("auto"), {"matrix": torch.zeros(64, 48)})
    compression.kept.peers = peers
    assert compression._choice is not None
    compression.scale = lambda: scale
    left, total = torch.zeros(64, 48, dtype=torch.float64), 0.0
    for step, algorithm in enumerate(algorithms):
        compression._choice._by_bucket["matrix"] = algorithm
        drawn = torch.Generator().manual_seed(step)
        gradients = [torch.randn(64, 48, generator=drawn) for _ in range(peers.size)]
        mean = torch.stack(gradients).double().mean(0)
        own = gradients[peers.place] * scale
        compression.reduce(["matrix"], [own], peers)
        left += mean - own / scale
        total += float(mean.norm())
    residual = compression.kept.saved()["mean"]["residual"]["matrix"]
    return float(left.norm()) / total, not residual.any()


@pytest.mark.parametrize(("block", "numbers"), [(24, 5000), (1024, 700)])
def test_blocks_and_buckets_of_any_size_are_tried(ranks, block, numbers):
    for other_s in ranks(2).run(others_of_candidates, block, numbers):
        assert set(other_s) == {"none", "bf16", "int8"}
        assert 0 <= other_s["int8"] < 1e-3 > other_s["bf16"] >= 0


def others_of_candidates(state: Any, block: int, numbers: int) -> dict[str, float]:
    peers = state.communicator.peers
    compression = GradientCompression(table("auto", block=block), {"vector": torch.zeros(numbers)})
    compression.kept.peers = peers
    for _ in range(20):
        compression.reduce(["vector"], [torch.ones(numbers)], peers)
    assert compression._choice is not None
    return compression._choice._other_s


def test_every_choice_gives_the_mean(ranks):
    for error, bits in ranks(2).run(errors_of_choices):
        assert error["none"] < 1e-6 < error["bf16"] < 5e-3 and error["int8"] < 0.02
        assert bits


def errors_of_choices(state: Any) -> tuple[dict[str, float], bool]:
    peers = state.communicator.peers
    compression = GradientCompression(table("auto"), {"weight": torch.zeros(4096), "bias": torch.zeros(8)})
    compression.kept.peers = peers
    assert compression._choice is not None
    mean = (
        sum(torch.randn(4104, generator=torch.Generator().manual_seed(place)) for place in range(peers.size))
        / peers.size
    )
    errors, equal = {}, True
    for name in ("none", "bf16", "int8"):
        compression._choice._by_bucket["weight"] = name
        own = torch.randn(4104, generator=torch.Generator().manual_seed(peers.place))
        compression.reduce(["weight", "bias"], [own[:4096], own[4096:]], peers)
        errors[name] = float((own - mean).norm() / mean.norm())
        equal = equal and torch.allclose(own[4096:], mean[4096:])
    return errors, equal
