"""The part of a checkpoint that is exported: all of it, or what lies below a prefix, which is taken off."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from toolkit.checkpoint.convert.nesting import Path, joined
from toolkit.checkpoint.format.manifest import Manifest
from toolkit.errors import NotFoundError

_PREFIXES_SHOWN = 20


class Placed(Protocol):
    """A tensor or a value that knows its place in the nested state."""

    @property
    def path(self) -> Path: ...


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
    refuse_unknown_prefix(prefix, [*manifest.tensors, *manifest.objects], where=where)
    return Selection(prefix, tuple(below(prefix, manifest.tensors)), tuple(below(prefix, manifest.objects)))


def below(prefix: str, records: Mapping[str, Placed]) -> Iterator[Chosen]:
    """Those of `records` whose keys lie below `prefix`; all of them for ""."""
    for key, record in records.items():
        if not prefix:
            yield Chosen(key, key, tuple(record.path))
        elif key.startswith(f"{prefix}."):
            yield Chosen(key, key.removeprefix(f"{prefix}."), _path_below(prefix, record.path))


def refuse_unknown_prefix(prefix: str, keys: Collection[str], *, where: str) -> None:
    """Refuse a prefix below which no key lies.

    Raises:
        NotFoundError: the first parts of keys that have more than one, such as "model", are named.
    """
    if not keys:
        raise NotFoundError("holds nothing", where=where, fix="name another one")
    if not prefix or any(key.startswith(f"{prefix}.") for key in keys):
        return
    known = sorted({key.partition(".")[0] for key in keys if "." in key})
    fix = (
        f"choose one of: {', '.join(known[:_PREFIXES_SHOWN])}" if known else "leave --only out: its keys have one part"
    )
    raise NotFoundError(f"holds nothing below {prefix!r}", where=where, fix=fix)


def _path_below(prefix: str, path: Path) -> Path:
    """The rest of a path whose first parts, joined with dots, begin with `prefix` and a dot."""
    for count in range(1, len(path) + 1):
        head = joined(path[:count])
        if head == prefix:
            return path[count:]
        if head.startswith(f"{prefix}."):
            return (head.removeprefix(f"{prefix}."), *path[count:])
    return path
