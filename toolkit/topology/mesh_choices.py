"""Meshes that do fill the ranks, nearest to one that does not: what an error offers as its fix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations
from math import isqrt, log, prod

Sizes = Mapping[str, int]


def nearest_meshes(ranks: int, asked: Sizes, allowed: Callable[[Sizes], bool]) -> list[dict[str, int]]:
    """The mesh that changes the fewest dimensions, and those the least; `replicate` takes what the others leave.

    Where one dimension is changed, a second mesh has the nearest size on its other side, if there is one.

    Args:
        ranks: that the mesh has to fill.
        asked: ranks of each dimension, and of `ep`.
        allowed: whether a mesh that fills them may be; that of one rank in each dimension but `replicate` may.
    """
    names = [name for name, size in asked.items() if size > 1 and name != "replicate"]
    for count in range(len(names) + 1):
        found = [
            mesh for changed in combinations(names, count) for mesh in _meshes(ranks, asked, changed) if allowed(mesh)
        ]
        if found:
            break
    first, *others = sorted(found, key=lambda mesh: _distance(mesh, asked, names))
    moved = [name for name in names if first[name] != asked[name]]
    if len(moved) != 1:
        return [first]
    (name,) = moved
    less = first[name] < asked[name]
    beyond = (mesh for mesh in others if mesh[name] != asked[name] and (mesh[name] < asked[name]) != less)
    return [first, *list(beyond)[:1]]


def spelled(mesh: Sizes, asked: Sizes) -> str:
    """What to set to come from one mesh to another: "tp = 4 and replicate = 2"."""
    changed = [name for name in mesh if name != "replicate" and mesh[name] != asked[name]]
    if mesh["replicate"] != asked["replicate"]:
        changed.append("replicate")
    return " and ".join(f"{name} = {mesh[name]}" for name in changed)


def _distance(mesh: Sizes, asked: Sizes, names: Sequence[str]) -> float:
    return sum(abs(log(mesh[name] / asked[name])) for name in names)


def _meshes(ranks: int, asked: Sizes, changed: Sequence[str]) -> Iterator[dict[str, int]]:
    """Meshes of so many ranks in which these dimensions have any size, the others but `replicate` that asked for."""
    kept = {name: size for name, size in asked.items() if name not in changed and name != "replicate"}
    used = prod(size for name, size in kept.items() if name != "ep")
    if ranks % used == 0:
        free = [name for name in changed if name != "ep"]
        for found in _split(ranks // used, free):
            mesh = {**kept, **found}
            for ep in _divisors(mesh["shard"] * mesh["cp"]) if "ep" in changed else (asked["ep"],):
                if mesh["shard"] * mesh["cp"] % ep == 0:
                    yield {name: {**mesh, "ep": ep}[name] for name in asked}


def _split(ranks: int, names: Sequence[str]) -> Iterator[dict[str, int]]:
    """Every way to give ranks to these dimensions, and what is left to `replicate`."""
    if not names:
        yield {"replicate": ranks}
        return
    for size in _divisors(ranks):
        for rest in _split(ranks // size, names[1:]):
            yield {names[0]: size, **rest}


@cache
def _divisors(number: int) -> tuple[int, ...]:
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))
