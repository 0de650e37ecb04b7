"""The messages of each all-reduce algorithm, round by round, as input of the cost model; without torch.

A round is a set of concurrent messages; the next round starts when they have arrived. The rounds match the code in
`ring`, `tree`, `one_hop` and `hierarchical`. A place is the index of a rank among the peers, from 0.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

RankGroups = Sequence[Sequence[int]]  # for each node, the indices of its ranks
Message = tuple[int, int, float]  # sender, receiver, bytes

SEGMENT_BYTES = 2 * 1024 * 1024


@dataclass(frozen=True)
class Round:
    """Concurrent messages, repeated `repeats` times in sequence; each time the busiest rank sums `folded_bytes`.

    `overlaps` is true if a rank sums one piece while it receives the next.
    """

    messages: tuple[Message, ...]
    folded_bytes: float = 0.0
    repeats: int = 1
    overlaps: bool = False


@dataclass(frozen=True)
class Stages:
    """The rounds of each pipeline stage; the stages work concurrently on different segments of the data."""

    stages: tuple[tuple[Round, ...], ...]
    segments: int = 1


# Returns the stages for a number of bytes on these nodes.
Schedule = Callable[[float, RankGroups], Stages]


def ring(size_bytes: float, nodes: RankGroups) -> Stages:
    """Return the messages of a ring with one chunk per rank: first the chunks to sum, then the sums."""
    return _one(_ring_of(_places(nodes), size_bytes, overlaps=False))


def overlapped_ring(size_bytes: float, nodes: RankGroups) -> Stages:
    """Return the messages of a ring that sums a piece while it receives the next, as the backend does."""
    return _one(_ring_of(_places(nodes), size_bytes, overlaps=True))


def tree(size_bytes: float, nodes: RankGroups) -> Stages:
    """Return the messages of a binomial tree to place 0, and of the tree back."""
    places = _places(nodes)
    return _one((*_tree_up(places, size_bytes), *_tree_down(places, size_bytes)))


def direct(size_bytes: float, nodes: RankGroups) -> Stages:
    """Return messages from every place to every other: first the parts to sum, then the sums."""
    places = _places(nodes)
    part = size_bytes / len(places)
    messages = tuple((one, other, part) for one in places for other in places if one != other)
    return _one((Round(messages, folded_bytes=part * (len(places) - 1)), Round(messages)))


def leader(size_bytes: float, nodes: RankGroups) -> Stages:
    """Return the messages to the first place of each node, in a ring of these places, and in a tree back per node."""
    gathered = tuple((place, node[0], size_bytes) for node in nodes for place in node[1:])
    most = max(len(node) for node in nodes)
    down = [_tree_down(node, size_bytes) for node in nodes]
    back = tuple(
        Round(tuple(message for rounds in down if number < len(rounds) for message in rounds[number].messages))
        for number in range(max(map(len, down)))
    )
    first = (Round(gathered, folded_bytes=size_bytes * (most - 1)),) if gathered else ()
    return _one((*first, *_ring_of([node[0] for node in nodes], size_bytes, overlaps=True), *back))


def hierarchical(size_bytes: float, nodes: RankGroups) -> Stages:
    """Return a reduce-scatter in the node, rings across nodes and an all-gather in the node, in segments of 2 MiB."""
    local = len(nodes[0])
    segments = max(1, -(-int(size_bytes) // SEGMENT_BYTES))
    segment = size_bytes / segments
    part = segment / local
    inside = tuple((one, other, part) for node in nodes for one in node for other in node if one != other)
    rings = [_ring_of([node[index] for node in nodes], part, overlaps=True) for index in range(local)]
    across = tuple(
        Round(
            tuple(message for rounds in rings for message in rounds[number].messages),
            rings[0][number].folded_bytes,
            rings[0][number].repeats,
            overlaps=True,
        )
        for number in range(len(rings[0]))
    )
    stages = ((Round(inside, folded_bytes=segment),), across, (Round(inside),))
    return Stages(stages, segments)


def _one(rounds: tuple[Round, ...]) -> Stages:
    return Stages((rounds,))


def _places(nodes: RankGroups) -> list[int]:
    return sorted(place for node in nodes for place in node)


def _ring_of(places: Sequence[int], size_bytes: float, *, overlaps: bool) -> tuple[Round, ...]:
    count = len(places)
    if count < 2:
        return ()
    chunk = size_bytes / count
    messages = tuple((place, places[(index + 1) % count], chunk) for index, place in enumerate(places))
    return Round(messages, chunk, count - 1, overlaps), Round(messages, 0.0, count - 1, overlaps)


def _tree_up(places: Sequence[int], size_bytes: float) -> tuple[Round, ...]:
    rounds = []
    distance = 1
    while distance < len(places):
        pairs = range(0, len(places) - distance, 2 * distance)
        messages = tuple((places[index + distance], places[index], size_bytes) for index in pairs)
        rounds.append(Round(messages, folded_bytes=size_bytes))
        distance *= 2
    return tuple(rounds)


def _tree_down(places: Sequence[int], size_bytes: float) -> tuple[Round, ...]:
    """Return the rounds of `_tree_up` in reverse order, with each message reversed."""
    return tuple(
        Round(tuple((receiver, sender, size) for sender, receiver, size in up.messages))
        for up in reversed(_tree_up(places, size_bytes))
    )
