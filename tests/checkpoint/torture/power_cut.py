"""What may stand on a disk after a power cut, by what the file system has promised until then and no more.

- fsync of a file brings the bytes and the size that it had when the call began; not the file's name.
- fsync of a folder brings the names in it, not what they stand for.
- Of all that no fsync has covered, any part may be there: each write whole, in pages or not at all, each name new or old.
- A rename is one change: the old name, or the new one. A later rename of the same folder carries the earlier ones.
- The way `ordered names` is that of a journal: names come in the order of their changes, all that precede an fsync with it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from recorded_changes import Change, Entered, Removed, Resized, Synced, Tree, Written, put, resize

PAGE = 4096
# Of an unsynced change to be there, name or page of bytes.
_CHANCE = {"nothing unsynced": 0.0, "all unsynced": 1.0, "any unsynced": 0.5, "ordered names": 0.5}
WAYS = tuple(_CHANCE)


@dataclass(frozen=True)
class PowerCut:
    """The disk as it was before, and every change since."""

    before: Tree
    changes: list[Change]

    def disk(self, done: int, way: str, choose: random.Random) -> Tree:
        """A disk that may be found where the power went when `done` of the changes were done."""
        happened = self.changes[:done]
        synced: dict[int, float] = {}
        for change in happened:
            if isinstance(change, Synced):
                synced[change.number] = max(change.start, synced.get(change.number, 0.0))
        journalled = self._journalled(happened, choose) if way == "ordered names" else 0
        tree = self.before.copy()
        for place, change in enumerate(happened):
            certain = way == "all unsynced" or any(change.end <= synced.get(by, -1.0) for by in _synced_by(change))
            if isinstance(change, (Written, Resized)):
                _change_bytes(tree.files[change.file], change, 1.0 if certain else _CHANCE[way], choose)
                continue
            if isinstance(change, Entered) and change.new:
                _make(tree, change)
            if isinstance(change, (Entered, Removed)):
                kept = place < journalled if way == "ordered names" else choose.random() < _CHANCE[way]
                if certain or kept:
                    _change_names(tree, change)
        return tree

    def _journalled(self, happened: list[Change], choose: random.Random) -> int:
        """How many changes the journal has brought: all before the last sync, and some after it."""
        least = max((place for place, change in enumerate(happened) if isinstance(change, Synced)), default=0)
        return choose.randint(least, len(happened))


def _synced_by(change: Change) -> tuple[int, ...]:
    """Whose fsync brings a change to the disk."""
    if isinstance(change, (Written, Resized)):
        return (change.file,)
    if isinstance(change, Entered):
        return (change.folder, *([change.leaves[0]] if change.leaves else []))
    return (change.folder,) if isinstance(change, Removed) else ()


def _make(tree: Tree, change: Entered) -> None:
    """Something new, which no name need stand for yet."""
    if change.new == "folder":
        tree.folders[change.number] = {}
    else:
        tree.files[change.number] = bytearray()


def _change_names(tree: Tree, change: Entered | Removed) -> None:
    for entries in tree.folders.values():
        for name in [name for name, number in entries.items() if number == change.number]:
            del entries[name]
    if isinstance(change, Entered):
        tree.folders[change.folder][change.name] = change.number


def _change_bytes(content: bytearray, change: Written | Resized, chance: float, choose: random.Random) -> None:
    """Each page of a write comes or not. Behind one that did not come the file may be as long as it was to be."""
    if isinstance(change, Resized):
        if choose.random() < chance:
            resize(content, change.size)
        return
    for start in range(0, len(change.data), PAGE):
        data = change.data[start : start + PAGE]
        if choose.random() < chance:
            put(content, change.offset + start, data)
        elif choose.random() < chance / 2 and change.offset + start + len(data) > len(content):
            resize(content, change.offset + start + len(data))
