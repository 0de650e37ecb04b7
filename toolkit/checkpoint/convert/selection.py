"""The part of a checkpoint to export or import: all keys, or the keys below a prefix, which is removed from them."""

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
    """A tensor or a value that knows its path in the nested state."""

    @property
    def path(self) -> Path: ...


@dataclass(frozen=True)
class Chosen:
    """A tensor or a value: `key` is its name in the checkpoint, `name` its name in the result."""

    key: str
    name: str
    path: Path


@dataclass(frozen=True)
class Selection:
    """The tensors and values to export, and the prefix that was removed from their keys ("" for none)."""

    prefix: str
    tensors: tuple[Chosen, ...]
    values: tuple[Chosen, ...]


@dataclass(frozen=True)
class ExportRequest:
    """What to export, and where to; `before_reading` is called after all checks, before the first tensor is read."""

    folder: FilePath
    manifest: Manifest
    selection: Selection
    destination: FilePath
    replace: bool = False
    before_reading: Callable[[], None] = lambda: None


def select(manifest: Manifest, prefix: str, *, where: str) -> Selection:
    """The records below `prefix`, a key's first parts joined with dots; all for "". NotFoundError if there are none."""
    refuse_unknown_prefix(prefix, [*manifest.tensors, *manifest.objects], where=where)
    return Selection(prefix, tuple(below(prefix, manifest.tensors)), tuple(below(prefix, manifest.objects)))


def below(prefix: str, records: Mapping[str, Placed]) -> Iterator[Chosen]:
    """The records whose keys are below `prefix`; all records for ""."""
    for key, record in records.items():
        if not prefix:
            yield Chosen(key, key, tuple(record.path))
        elif key.startswith(f"{prefix}."):
            yield Chosen(key, key.removeprefix(f"{prefix}."), _path_below(prefix, record.path))


def refuse_unknown_prefix(prefix: str, keys: Collection[str], *, where: str) -> None:
    """Raise a NotFoundError for a prefix without keys below it; names the first parts of keys, such as "model"."""
    if not keys:
        raise NotFoundError("contains no tensors or values", where=where, fix="name another one")
    if not prefix or any(key.startswith(f"{prefix}.") for key in keys):
        return
    known = sorted({key.partition(".")[0] for key in keys if "." in key})
    fix = f"choose one of: {', '.join(known[:_PREFIXES_SHOWN])}" if known else "omit --only: its keys have one part"
    raise NotFoundError(f"contains no keys below {prefix!r}", where=where, fix=fix)


def _path_below(prefix: str, path: Path) -> Path:
    """The rest of a path whose first parts, joined with dots, start with `prefix` and a dot."""
    for count in range(1, len(path) + 1):
        head = joined(path[:count])
        if head == prefix:
            return path[count:]
        if head.startswith(f"{prefix}."):
            return (head.removeprefix(f"{prefix}."), *path[count:])
    return path


def in_groups(items: Sequence[Item], size_of: Callable[[Item], int], most_bytes: int) -> list[list[Item]]:
    """The items in their order, in groups of at most `most_bytes`; a larger item is a group of its own."""
    groups: list[list[Item]] = [[]]
    filled = 0
    for item in items:
        if groups[-1] and filled + size_of(item) > most_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(item)
        filled += size_of(item)
    return groups
