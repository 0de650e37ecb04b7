"""Selects tensors by patterns, sorts them in natural order, and shows them as a tree with similar layers grouped."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from toolkit.checkpoint.format.manifest import TensorRecord
from toolkit.errors import NotFoundError

__all__ = ["Branch", "groups", "matches", "refuse_unknown", "tree_of"]

_NUMBER = re.compile(r"(\d+)")


def matches(key: str, patterns: Sequence[str]) -> bool:
    """Return True if a key matches a glob (`*.weight`) or prefix (`model.blocks`), or if there are no patterns."""
    return not patterns or any(
        key == pattern or key.startswith(f"{pattern}.") or fnmatchcase(key, pattern) for pattern in patterns
    )


def refuse_unknown(patterns: Sequence[str], keys: Collection[str]) -> None:
    """Raise a NotFoundError for the first pattern without matches, because it is probably a typo."""
    for pattern in patterns:
        if not any(matches(key, [pattern]) for key in keys):
            known = ", ".join(sorted({key.partition(".")[0] for key in keys}))
            raise NotFoundError(f"no key matches {pattern!r}", where="--only", fix=f"begin with one of: {known}")


def in_order(key: str) -> list[tuple[int, int, str]]:
    """Return a sort key for natural order, in which numbers within keys compare as numbers."""
    parts = _NUMBER.split(key)
    return [(1, int(part), "") if index % 2 and len(part) < 20 else (0, 0, part) for index, part in enumerate(parts)]


_NUMBERED = re.compile(r"(.*?)([0-9]{1,18})", re.DOTALL)
_MOST_PARTS = 64  # the depth limit of the tree, beyond which the rest of a key is one part


@dataclass
class Branch:
    """A node of the key tree: the tensor with exactly this key, if any, and the branches below it."""

    key: str
    record: TensorRecord | None = None
    below: dict[str, Branch] = field(default_factory=dict)
    tensors: int = 0
    size_bytes: int = 0


def tree_of(tensors: Collection[tuple[str, TensorRecord]]) -> Branch:
    """Build the tree and return its root; each branch contains the number and size of the tensors below it."""
    root = Branch("")
    for key, record in sorted(tensors, key=lambda item: in_order(item[0])):
        branch = root
        path = [root]
        for part in key.split(".", _MOST_PARTS):
            branch = branch.below.setdefault(part, Branch(key))
            path.append(branch)
        branch.record = record
        for passed in path:
            passed.tensors += 1
            passed.size_bytes += record.size_bytes
    return root


def groups(branch: Branch, *, alike: bool) -> Iterator[tuple[str, list[Branch]]]:
    """Yield (label, branches) below a branch; an only child is merged into the label: "attention.weight".

    With `alike`, consecutive numbered branches with equal tensors form one group: "[0-31]", "rank-[00000-00007]".
    """
    run: list[str] = []
    shapes = {name: _signature(below) for name, below in branch.below.items()} if alike else {}
    for name in branch.below:
        if run and not (alike and _follows(run[-1], name) and shapes[run[-1]] == shapes[name]):
            yield _group(branch, run)
            run = []
        run.append(name)
    if run:
        yield _group(branch, run)


def _follows(one: str, other: str) -> bool:
    before, after = _NUMBERED.fullmatch(one), _NUMBERED.fullmatch(other)
    return before is not None and after is not None and before[1] == after[1] and int(after[2]) == int(before[2]) + 1


def _group(branch: Branch, names: list[str]) -> tuple[str, list[Branch]]:
    members = [branch.below[name] for name in names]
    label = names[0]
    if len(names) > 1 and (first := _NUMBERED.fullmatch(names[0])) is not None:
        label = f"{first[1]}[{first[2]}-{names[-1].removeprefix(first[1])}]"
    while members[0].record is None and len(members[0].below) == 1:
        (part,) = members[0].below
        label = f"{label}.{part}"
        members = [member.below[part] for member in members]
    return label, members


def _signature(branch: Branch) -> tuple[object, ...]:
    """Return the types, shapes and piece counts of all tensors at and below a branch, by name."""
    record = branch.record
    own = None if record is None else (record.dtype, record.shape, len(record.pieces))
    return own, tuple((name, _signature(below)) for name, below in branch.below.items())
