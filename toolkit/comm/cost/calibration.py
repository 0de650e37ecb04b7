"""Measures what the links between the ranks of a group give: a pair alone, and all ranks at once.

All at once, every rank sends to the rank with the same place on the next node, or to the next one of its own node: what
the ranks of a node share, a link or processors, is in these times. A measurement is of several exchanges one after the
other, as in an algorithm's rounds, and of the slowest rank.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from toolkit.comm.cost.lines import Line, fit
from toolkit.comm.cost.prediction import LINKS, Links
from toolkit.comm.peers import Message, Peers
from toolkit.comm.reductions import fold

SIZES_BYTES = tuple(4**power * 1024 for power in range(1, 7))  # 4 KiB to 4 MiB of each rank
BUDGET_S = 5.0  # of each tier
_MOST_IN_A_ROW = 16  # about as many rounds as algorithms have: ranks that wait for one another settle into a rhythm
_LEAST_IN_A_ROW = 4
_IN_A_ROW_BYTES = 1024 * 1024  # in that many exchanges together, at most
_MOST_REPEATS = 7
_LEAST_REPEATS = 3
_FOLD_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class _Pattern:
    """Who sends to whom. `of_node` are the bytes that go over the busiest node's link, or about in it, for each sent."""

    to: tuple[int, ...]
    from_: tuple[int, ...]
    of_node: int


def calibrate(peers: Peers, budget_s: float = BUDGET_S) -> Links:
    """The model of the links between peers whose nodes are known. Collective.

    Args:
        budget_s: seconds for each tier, the network and the node; large sizes that do not fit into it are left out.
    """
    assert peers.nodes, "the nodes are known"
    node_number, node = next((number, node) for number, node in enumerate(peers.nodes) if peers.place in node)
    inside = node.index(peers.place)
    has_network = len(peers.nodes) > 1
    has_pairs = any(len(members) > 1 for members in peers.nodes)
    lines: dict[str, Line] = {}
    if has_network:
        everyone, pair = _across(peers, node_number, inside)
        lines["network"] = _line(peers, everyone, budget_s * 0.35)
        lines["network_spread"] = _line(peers, _spread(peers, node), budget_s * 0.2)
        lines["network_alone"] = _line(peers, pair, budget_s * 0.15)
    if has_pairs:
        right, left = node[(inside + 1) % len(node)], node[inside - 1]
        talks = len(node) > 1
        most = max(map(len, peers.nodes))
        everyone = _Pattern((right,) if talks else (), (left,) if talks else (), most)
        lines["node"] = _line(peers, everyone, budget_s * 0.45)
        lines["node_alone"] = _line(
            peers, _alone(peers, next(n for n in peers.nodes if len(n) > 1)[:2]), budget_s * 0.25
        )
    # A tier that is not there is never asked for.
    return Links(
        **{name: lines.get(name, _NO_TIME) for name in LINKS}, fold_s_per_byte=_fold_seconds(peers) / _FOLD_BYTES
    )


def _across(peers: Peers, node_number: int, inside: int) -> tuple[_Pattern, _Pattern]:
    """All ranks to the next node, and one pair of two nodes."""
    count = len(peers.nodes)
    following, before = peers.nodes[(node_number + 1) % count], peers.nodes[(node_number - 1) % count]
    to = following[inside : inside + 1]
    from_ = before[inside : inside + 1]
    most = max(
        min(len(one), len(other)) for one, other in zip(peers.nodes, (*peers.nodes[1:], peers.nodes[0]), strict=True)
    )
    return _Pattern(to, from_, most), _alone(peers, (peers.nodes[0][0], peers.nodes[1][0]))


def _spread(peers: Peers, node: tuple[int, ...]) -> _Pattern:
    """All ranks to all of other nodes: many connections share a link, and meet at the end of it."""
    others = tuple(place for place in range(peers.size) if place not in node)
    return _Pattern(others, others, max(len(one) * (peers.size - len(one)) for one in peers.nodes))


def _alone(peers: Peers, pair: tuple[int, ...]) -> _Pattern:
    """One sends to the other, and the other back: both ways of a link are in use, as in a ring."""
    if peers.place not in pair:
        return _Pattern((), (), 1)
    other = pair[1 - pair.index(peers.place)]
    return _Pattern((other,), (other,), 1)


def _line(peers: Peers, pattern: _Pattern, budget_s: float) -> Line:
    samples: dict[int, list[float]] = {}
    began = time.monotonic()
    for number, size in enumerate(SIZES_BYTES, 1):
        outgoing = torch.zeros(size, dtype=torch.uint8)
        sends: list[Message] = [(outgoing, place) for place in pattern.to]
        receives: list[Message] = [(torch.empty_like(outgoing), place) for place in pattern.from_]
        in_a_row = max(_LEAST_IN_A_ROW, min(_MOST_IN_A_ROW, _IN_A_ROW_BYTES // size))
        times: list[float] = []
        for _ in range(_MOST_REPEATS):
            times.append(_exchange_s(peers, sends, receives, in_a_row))
            spent = _largest(peers, time.monotonic() - began)
            # On a busy machine small messages are late, too: they must not use up what large ones need.
            share_s = budget_s * number / len(SIZES_BYTES)
            if len(times) >= _LEAST_REPEATS and spent + times[-1] * in_a_row > share_s:
                break
        samples[size * pattern.of_node] = times
        next_s = 4 * min(times) * _LEAST_IN_A_ROW * _LEAST_REPEATS
        if len(samples) > 1 and spent + next_s > budget_s:
            break
    return fit(samples)


def _fold_seconds(peers: Peers) -> float:
    """Adding up, by all ranks at once: they share processors and memory."""
    data, other = torch.zeros(_FOLD_BYTES // 4), torch.ones(_FOLD_BYTES // 4)
    times = []
    for _ in range(_MOST_REPEATS):
        dist.barrier(group=peers.group)
        start = time.perf_counter()
        fold(data, other, "sum")
        times.append(_largest(peers, time.perf_counter() - start))
    return min(times)


def _exchange_s(peers: Peers, sends: Sequence[Message], receives: Sequence[Message], in_a_row: int) -> float:
    """Seconds of one exchange of several, on the slowest rank.

    One more goes before: a link that rested may carry the first bytes faster than it goes on.
    """
    dist.barrier(group=peers.group)
    peers.exchange(sends, receives)
    start = time.perf_counter()
    for _ in range(in_a_row):
        peers.exchange(sends, receives)
    return _largest(peers, time.perf_counter() - start) / in_a_row


def _largest(peers: Peers, value: float) -> float:
    found = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=peers.group)
    return float(found)


_NO_TIME = fit({1: [1e-9], 2: [2e-9]})  # of a tier that this layout does not have
