"""The automatic choice: compressed where a link is slow, dense where it is fast, the same on all ranks, without a flutter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compression_cases import table

from toolkit.comm.compression.automatic import chosen
from toolkit.comm.compression.reducer import GradientCompression

LATENCY_S = 0.002


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


def on_a_link(state: Any, megabytes_per_s: list[float]) -> list[str]:
    """The choice after each 50 steps over a link of these rates; rank 1 always arrives late."""
    peers = state.communicator.peers
    numbers = 1 << 18
    compression = GradientCompression(table("auto"), {"weight": torch.zeros(numbers)})
    compression.kept.peers = peers
    choice = compression._choice
    assert choice is not None
    choice._latency_s = lambda peers: LATENCY_S  # type: ignore[method-assign]
    found = []
    for rate in megabytes_per_s:
        for step in range(50):
            compression.reduce(["weight"], [torch.ones(numbers) * peers.place], peers)
            # Sent by each of two ranks, with a latency; the time to encode is far below.
            sent = {"none": 4, "bf16": 2, "int8": 1 + 4 / 64}[choice.algorithm] * numbers
            choice._wire_s[-1] = (
                (1 if choice.algorithm == "none" else 3) * LATENCY_S
                + sent / (rate * 1e6)
                + 0.005 * (step % 7 == 0) * (1 - peers.place)
            )
            choice._exchange_s[-1] = choice._wire_s[-1] + (0.0 if choice.algorithm == "none" else 1e-9 * numbers)
        found.append(choice.algorithm)
    return found


def test_the_choice_follows_the_link_and_changes_twice(ranks):
    found = ranks(2).run(on_a_link, [100_000.0, 5.0, 5.0, 100_000.0, 100_000.0, 100_000.0])
    assert found[0] == found[1], "ranks agree"
    assert found[0] == ["none", "none", "int8", "int8", "none", "none"], (
        "a decision uses the steps since the one before"
    )


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
        compression._choice.algorithm = name
        own = torch.randn(4104, generator=torch.Generator().manual_seed(peers.place))
        compression.reduce(["weight", "bias"], [own[:4096], own[4096:]], peers)
        errors[name] = float((own - mean).norm() / mean.norm())
        equal = equal and torch.allclose(own[4096:], mean[4096:])
    return errors, equal
