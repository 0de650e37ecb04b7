"""Selects the part of a checkpoint to export or import: all keys, or those below a prefix, which is removed."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Protocol, TypeVar

from toolkit.checkpoint.convert.nesting import Path, joined
from toolkit.checkpoint.format.manifest import Manifest
from toolkit.errors import NotFoundError

__all__ = ["ExportRequest", "Selection", "select"]

_PREFIXES_SHOWN = 20
Item = TypeVar("Item")


class Placed(Protocol):
    """A tensor or value record with a path in the nested state."""

    @property
    def path(self) -> Path: ...


@dataclass(frozen=True)
class Chosen:
    """A selected tensor or value: `key` is its name in the checkpoint, `name` and `path` are those in the result."""

    key: str
    name: str
    path: Path


@dataclass(frozen=True)
class Selection:
    """The selected tensors and values, and the prefix that was removed from their keys ("" for none)."""

    prefix: str
    tensors: tuple[Chosen, ...]
    values: tuple[Chosen, ...]


@dataclass(frozen=True)
class ExportRequest:
    """What to export and where; `before_reading` is called after all checks, before the first tensor is read."""

    folder: FilePath
    manifest: Manifest
    selection: Selection
    destination: FilePath
    replace: bool = False
    before_reading: Callable[[], None] = lambda: None


def select(manifest: Manifest, prefix: str, *, where: str) -> Selection:
    """Select the records below `prefix`, the first parts of a key (all for ""). Raises NotFoundError if none."""
    refuse_unknown_prefix(prefix, [*manifest.tensors, *manifest.objects], where=where)
    return Selection(prefix, tuple(below(prefix, manifest.tensors)), tuple(below(prefix, manifest.objects)))


def below(prefix: str, records: Mapping[str, Placed]) -> Iterator[Chosen]:
    """Yield the records whose keys are below `prefix`; all records for ""."""
    for key, record in records.items():
        if not prefix:
            yield Chosen(key, key, tuple(record.path))
        elif key.startswith(f"{prefix}."):
            yield Chosen(key, key.removeprefix(f"{prefix}."), _path_below(prefix, record.path))


def refuse_unknown_prefix(prefix: str, keys: Collection[str], *, where: str) -> None:
    """Raise a NotFoundError if no key is below `prefix`; the fix lists valid prefixes, such as "model"."""
    if not keys:
        raise NotFoundError("contains no tensors or values", where=where, fix="pass another source")
    if not prefix or any(key.startswith(f"{prefix}.") for key in keys):
        return
    known = sorted({key.partition(".")[0] for key in keys if "." in key})
    fix = f"choose one of: {', '.join(known[:_PREFIXES_SHOWN])}" if known else "omit --only: no key contains a dot"
    raise NotFoundError(f"contains no keys below {prefix!r}", where=where, fix=fix)


def _path_below(prefix: str, path: Path) -> Path:
    """Return the rest of a path below `prefix`, which may end within a part that contains dots."""
    for count in range(1, len(path) + 1):
        head = joined(path[:count])
        if head == prefix:
            return path[count:]
        if head.startswith(f"{prefix}."):
            return (head.removeprefix(f"{prefix}."), *path[count:])
    return path


def in_groups(items: Sequence[Item], size_of: Callable[[Item], int], most_bytes: int) -> list[list[Item]]:
    """Split the items, in order, into groups of at most `most_bytes`; a larger item forms its own group."""
    groups: list[list[Item]] = [[]]
    filled = 0
    for item in items:
        if groups[-1] and filled + size_of(item) > most_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(item)
        filled += size_of(item)
    return groups
