"""The part of a checkpoint that is exported: all of it, or what lies below a prefix, which is taken off."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.checkpoint.format.manifest import Manifest
from toolkit.errors import NotFoundError

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Chosen:
    """A tensor or a value as it will be called: `key` is its name in the checkpoint."""

    key: str
    name: str
    path: Path


@dataclass(frozen=True)
class Selection:
    """What is exported, and the prefix that was taken off ("" for none)."""

    prefix: str
    tensors: tuple[Chosen, ...]
    values: tuple[Chosen, ...]


def select(manifest: Manifest, prefix: str, *, where: str) -> Selection:
    """What lies below `prefix`, a key's first parts joined with dots; everything for "".

    Raises:
        NotFoundError: nothing does; the prefixes that the checkpoint has are named.
    """
    tensors = tuple(_below(prefix, manifest.tensors))
    values = tuple(_below(prefix, manifest.objects))
    if not tensors and not values:
        known = ", ".join(first_parts(manifest)) or "none"
        raise NotFoundError(f"holds nothing below {prefix!r}", where=where, fix=f"choose one of: {known}")
    return Selection(prefix, tensors, values)


def first_parts(manifest: Manifest) -> list[str]:
    """The first parts of all keys that have more than one: "model", "optimizer"."""
    return sorted({key.partition(".")[0] for key in (*manifest.tensors, *manifest.objects) if "." in key})


def _below(prefix: str, records: Mapping[str, Any]) -> Iterable[Chosen]:
    for key, record in records.items():
        if not prefix:
            yield Chosen(key, key, tuple(record.path))
        elif key.startswith(f"{prefix}."):
            yield Chosen(key, key.removeprefix(f"{prefix}."), path_below(prefix, record.path))


def path_below(prefix: str, path: Path) -> Path:
    """The rest of a path whose first parts, joined with dots, begin with `prefix` and a dot."""
    for count in range(1, len(path) + 1):
        head = ".".join(map(str, path[:count]))
        if head == prefix:
            return path[count:]
        if head.startswith(f"{prefix}."):
            return (head.removeprefix(f"{prefix}."), *path[count:])
    return path
