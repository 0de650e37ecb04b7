"""The processors of NUMA nodes that are listed one by one.

A processor is in one node only, and the lists ascend: a number that a line wrap cut in two is seen by that, and put
together again where there is one way to do so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise

from toolkit.topology.parsers.cpu_lists import LARGEST_CPU, cpu_list
from toolkit.topology.parsers.host_lines import Line


def read_node_processors(
    written: Mapping[int, tuple[Line, str]], warnings: list[str]
) -> dict[int, tuple[int, ...] | None]:
    """The processors of each node, None where its list is damaged or shares one with another."""
    read: dict[int, tuple[int, ...] | None] = {}
    plain = {node: _ascending(value.split()) for node, (_, value) in written.items()}
    for node, (line, value) in written.items():
        others = {cpu for other, cpus in plain.items() if other != node for cpu in cpus or ()}
        read[node] = plain[node]
        if plain[node] is None or others & set(plain[node] or ()):
            read[node], said = _joined(value.split(), others)
            warnings.append(f"line {line.number}: the processors of node {node} {said}")
    for node, cpus in plain.items():
        if any(set(cpus or ()) & set(theirs or ()) for other, theirs in plain.items() if other != node):
            read[node] = None
    found = sorted(cpu for cpus in read.values() for cpu in cpus or ())
    at = next(iter(written.values()))[0].number if written else 1
    if found and None not in read.values() and len(found) != found[-1] + 1:
        gaps = cpu_list(set(range(found[-1] + 1)) - set(found))
        warnings.append(f"line {at}: processors {gaps} are in no node: offline, or lost")
    sizes = {len(cpus) for cpus in read.values() if cpus}
    if len(sizes) > 1:
        warnings.append(f"line {at}: nodes differ in their number of processors: {sorted(sizes)}")
    return read


def _ascending(words: Sequence[str]) -> tuple[int, ...] | None:
    if not all(re.fullmatch("0|[1-9][0-9]{0,5}", word) for word in words):
        return None
    numbers = tuple(int(word) for word in words)
    fits = all(low < high for low, high in pairwise(numbers))
    return numbers if fits and (not numbers or numbers[-1] <= LARGEST_CPU) else None


def _joined(words: list[str], others: set[int]) -> tuple[tuple[int, ...] | None, str]:
    """The list with one number put together that a line wrap cut in two, where there is one way: (list, what is said)."""
    ways = []
    for place in range(len(words) - 1):
        whole = words[place] + words[place + 1]
        cpus = _ascending([*words[:place], whole, *words[place + 2 :]])
        rest = {int(word) for word in words[:place] + words[place + 2 :] if word.isdecimal()}
        if cpus is not None and not others & set(cpus) and int(whole) <= max(others | rest, default=0) + 1:
            ways.append((cpus, f"have a number cut in two, read as {whole}"))
    return ways[0] if len(ways) == 1 else (None, "do not ascend or are another's, too; none is believed")
