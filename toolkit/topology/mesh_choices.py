"""Find the valid meshes that are closest to an invalid one, for the fix of an error."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations
from math import isqrt, log, prod

__all__ = ["nearest_meshes", "settings_of"]

Sizes = Mapping[str, int]


def nearest_meshes(ranks: int, requested: Sizes, is_allowed: Callable[[Sizes], bool]) -> list[dict[str, int]]:
    """Return the valid mesh with the fewest and smallest changes; its `replicate` follows from the other dimensions.

    If only one dimension of that mesh differs, the result also contains the nearest valid mesh in which it changes in
    the other direction, if there is one.

    Args:
        ranks: number of ranks that the mesh must use.
        requested: size of each dimension, and `ep`.
        is_allowed: whether a mesh of this many ranks is valid; it must accept a mesh with only `replicate` above 1.
    """
    names = [name for name, size in requested.items() if size > 1 and name != "replicate"]
    for count in range(len(names) + 1):
        meshes = [
            mesh
            for changed in combinations(names, count)
            for mesh in _meshes(ranks, requested, changed)
            if is_allowed(mesh)
        ]
        if meshes:
            break
    first, *others = sorted(meshes, key=lambda mesh: _distance(mesh, requested, names))
    changed_names = [name for name in names if first[name] != requested[name]]
    if len(changed_names) != 1:
        return [first]
    (name,) = changed_names
    is_less = first[name] < requested[name]
    opposite = (mesh for mesh in others if mesh[name] != requested[name] and (mesh[name] < requested[name]) != is_less)
    return [first, *list(opposite)[:1]]


def settings_of(mesh: Sizes, requested: Sizes) -> str:
    """Return the settings that differ from the requested mesh, such as "tp = 4 and replicate = 2"."""
    changed = [name for name in mesh if name != "replicate" and mesh[name] != requested[name]]
    if mesh["replicate"] != requested["replicate"]:
        changed.append("replicate")
    return " and ".join(f"{name} = {mesh[name]}" for name in changed)


def _distance(mesh: Sizes, requested: Sizes, names: Sequence[str]) -> float:
    return sum(abs(log(mesh[name] / requested[name])) for name in names)


def _meshes(ranks: int, requested: Sizes, changed: Sequence[str]) -> Iterator[dict[str, int]]:
    """Yield every mesh of `ranks` ranks that differs from the requested one only in `changed` and `replicate`."""
    kept = {name: size for name, size in requested.items() if name not in changed and name != "replicate"}
    used = prod(size for name, size in kept.items() if name != "ep")
    if ranks % used == 0:
        free = [name for name in changed if name != "ep"]
        for sizes in _split(ranks // used, free):
            mesh = {**kept, **sizes}
            for ep in _divisors(mesh["shard"] * mesh["cp"]) if "ep" in changed else (requested["ep"],):
                if mesh["shard"] * mesh["cp"] % ep == 0:
                    yield {name: {**mesh, "ep": ep}[name] for name in requested}


def _split(ranks: int, names: Sequence[str]) -> Iterator[dict[str, int]]:
    """Yield every factorization of `ranks` into these dimensions and `replicate`."""
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
