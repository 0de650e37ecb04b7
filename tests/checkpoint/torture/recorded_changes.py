"""What a process changed in a folder, out of its recorded system calls: bytes of files, names in folders, and syncs.

Files and folders are known by number from here on, as a file system knows them: a name is an entry of a folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from system_calls import Call, calls_in
from traced_ranks import CHANGING

# File positions follow from these, and which descriptor is which.
CALLS = (*CHANGING, "read", "lseek", "close", "dup", "?dup2", "dup3", "fcntl")
OPTIONS = ("-ttt", "-T", "-xx", "-s", "100000000")
ROOT = 0
_QUOTED = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')


@dataclass(frozen=True)
class Change:
    """One change, done at `end`."""

    end: float


@dataclass(frozen=True)
class Written(Change):
    file: int
    offset: int
    data: bytes


@dataclass(frozen=True)
class Resized(Change):
    file: int
    size: int


@dataclass(frozen=True)
class Entered(Change):
    """A name that begins to stand for `number`: a "file" or "folder" that is `new`, or one that `leaves` another name."""

    number: int
    folder: int
    name: str
    new: str = ""
    leaves: tuple[int, str] | None = None


@dataclass(frozen=True)
class Removed(Change):
    number: int
    folder: int
    name: str


@dataclass(frozen=True)
class Synced(Change):
    """fsync of one file's bytes or one folder's names: all that was done before `start`."""

    number: int
    start: float
    path: str


@dataclass(frozen=True)
class Told(Change):
    """What a rank said on stderr as a line of JSON: a save that began or returned."""

    what: dict[str, Any]


@dataclass
class Tree:
    """Folders by number, each its entries; files by number, each its bytes."""

    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    files: dict[int, bytearray] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path) -> Tree:
        """What stands on the disk."""
        tree = cls()
        numbers = {path: ROOT}
        for place in sorted(path.rglob("*")):
            number = numbers[place] = len(numbers)
            tree.folders[numbers[place.parent]][place.name] = number
            if place.is_dir():
                tree.folders[number] = {}
            else:
                tree.files[number] = bytearray(place.read_bytes())
        return tree

    def fresh_number(self) -> int:
        return max(*self.folders, *self.files, ROOT) + 1

    def copy(self) -> Tree:
        return Tree(
            {number: dict(entries) for number, entries in self.folders.items()},
            {number: content[:] for number, content in self.files.items()},
        )

    def write_to(self, path: Path) -> None:
        """Make the tree on a disk."""
        path.mkdir()
        self._write(ROOT, path)

    def _write(self, folder: int, path: Path) -> None:
        for name, number in self.folders[folder].items():
            if number in self.folders:
                (path / name).mkdir()
                self._write(number, path / name)
            else:
                (path / name).write_bytes(self.files[number])

    def contents(self, folder: int = ROOT, prefix: str = "") -> dict[str, bytes | None]:
        """Every path with its bytes, None for a folder."""
        found: dict[str, bytes | None] = {}
        for name, number in self.folders[folder].items():
            found[prefix + name] = None if number in self.folders else bytes(self.files[number])
            if number in self.folders:
                found |= self.contents(number, f"{prefix}{name}/")
        return found


def changes_of(logs: list[Path], root: Path, before: Tree) -> list[Change]:
    """The changes that the processes of all logs made below `root`, in the order in which they were done."""
    calls = sorted(
        ((call, number) for number, log in enumerate(logs) for call in calls_in(log)), key=lambda item: item[0].end
    )
    reader = _Reader(root, before)
    return [change for call, process in calls for change in reader.changes(call, process)]


@dataclass
class _Open:
    """An open file or folder and its position."""

    number: int
    path: str
    at: int = 0
    append: bool = False


class _Reader:
    """Follows names and descriptors of the processes, call by call."""

    def __init__(self, root: Path, before: Tree) -> None:
        self._root = str(root)
        self._live = before.copy()
        self._open: dict[tuple[int, int], _Open] = {}

    def changes(self, call: Call, process: int) -> Iterator[Change]:
        if call.result < 0:
            return
        words = call.arguments.split(", ")
        texts = [bytes.fromhex(text.replace("\\x", "")) for text in _QUOTED.findall(call.arguments)]
        follow = getattr(self, f"_{call.name}", None)
        if follow is not None:
            yield from follow(call, process, words, texts)
        elif words[0].isdigit() and (process, int(words[0])) in self._open and call.name != "fchmod":
            raise AssertionError(f"{call.name} cannot be replayed")

    def _found(self, process: int, folder: str, text: bytes) -> tuple[int, str, str] | None:
        """The folder's number, the name in it and the whole path; None outside of the root."""
        path = text.decode()
        if folder.isdigit() and not path.startswith("/"):
            if (process, int(folder)) not in self._open:
                return None
            path = f"{self._open[process, int(folder)].path}/{path}"
        if not path.startswith(f"{self._root}/"):
            return None
        *parents, name = [part for part in path.removeprefix(f"{self._root}/").split("/") if part]
        number = ROOT
        for part in parents:
            number = self._live.folders[number][part]
        return number, name, path

    def _opened(self, call: Call, process: int, folder: str, flags: str, text: bytes) -> Iterator[Change]:
        if text.decode().rstrip("/") == self._root:
            self._open[process, call.result] = _Open(ROOT, self._root)
            return
        found = self._found(process, folder, text)
        if found is None:
            self._open.pop((process, call.result), None)
            return
        parent, name, path = found
        entries = self._live.folders[parent]
        if name not in entries:
            assert "O_CREAT" in flags, path
            number = self._live.fresh_number()
            self._live.files[number] = bytearray()
            entries[name] = number
            yield Entered(call.end, number, parent, name, new="file")
        elif "O_TRUNC" in flags:
            self._live.files[entries[name]] = bytearray()
            yield Resized(call.end, entries[name], 0)
        self._open[process, call.result] = _Open(entries[name], path, append="O_APPEND" in flags)

    def _openat(self, call: Call, process: int, words: list[str], texts: list[bytes]) -> Iterator[Change]:
        yield from self._opened(call, process, words[0], words[2], texts[0])

    def _close(self, call: Call, process: int, words: list[str], texts: list[bytes]) -> Iterator[Change]:
        self._open.pop((process, int(words[0])), None)
        return iter(())

    def _copied(self, call: Call, process: int, words: list[str], texts: list[bytes]) -> Iterator[Change]:
        if (found := self._open.get((process, int(words[0])))) is not None:
            self._open[process, call.result] = found
        return iter(())

    _dup = _dup2 = _dup3 = _copied

    def _fcntl(self, call: Call, process: int, words: list[str], texts: list[bytes]) -> Iterator[Change]:
        return self._copied(call, process, words, texts) if words[1].startswith("F_DUPFD") else iter(())

    def _lseek(self, call: Call, process: int, words: list[str], texts: list[bytes]) -> Iterator[Change]:
        if (found := self._open.get((process, int(words[0])))) is not None:
            found.at = call.result
        return iter(())

    def _read(self, call: Call, process: int, words: list[str], texts: list[bytes]) -> Iterator[Change]:
        if (found := self._open.get((process, int(words[0])))) is not None:
            found.at += call.result
        return iter(())

    def _write(self, call: Call, process: int, words: list[str], texts: list[bytes]) -> Iterator[Change]:
        data = b"".join(texts)[: call.result]
        found = self._open.get((process, int(words[0])))
        if found is not None:
            at = len(self._live.files[found.number]) if found.append else found.at
            found.at = at + len(data)
            yield self._put(call, found, at, data)
        elif words[0] == "2" and data.startswith(b"{"):
            yield Told(call.end, json.loads(data))

    _writev = _write

    def _pwrite64(
        self, call: Call, process: int, words: list[str], texts: list[bytes], behind: int = 0
    ) -> Iterator[Change]:
        if (found := self._open.get((process, int(words[0])))) is not None:
            yield self._put(call, found, int(words[-1 - behind]), b"".join(texts)[: call.result])

    _pwritev = _pwrite64

    def _pwritev2(self, call: Call, process: int, words: list[str], texts: list[bytes]) -> Iterator[Change]:
        return self._pwrite64(call, process, words, texts, behind=1)  # its flags

    def _put(self, call: Call, found: _Open, offset: int, data: bytes) -> Change:
        put(self._live.files[found.number], offset, data)
        return Written(call.end, found.number, offset, data)

    def _ftruncate(self, call: Call, process: int, words: list[str], texts: list[bytes]) -> Iterator[Change]:
        if (found := self._open.get((process, int(words[0])))) is not None:
            resize(self._live.files[found.number], int(words[1]))
            yield Resized(call.end, found.number, int(words[1]))

    def _fallocate(self, call: Call, process: int, words: list[str], texts: list[bytes]) -> Iterator[Change]:
        if (found := self._open.get((process, int(words[0])))) is not None and words[1] == "0":
            size = max(len(self._live.files[found.number]), int(words[2]) + int(words[3]))
            resize(self._live.files[found.number], size)
            yield Resized(call.end, found.number, size)

    def _fsync(self, call: Call, process: int, words: list[str], texts: list[bytes]) -> Iterator[Change]:
        if (found := self._open.get((process, int(words[0])))) is not None:
            yield Synced(call.end, found.number, call.start, found.path)

    _fdatasync = _fsync

    def _sync_file_range(self, call: Call, process: int, words: list[str], texts: list[bytes]) -> Iterator[Change]:
        return iter(())  # promises nothing that outlives a power cut

    def _mkdir(self, call: Call, process: int, words: list[str], texts: list[bytes]) -> Iterator[Change]:
        if (found := self._found(process, "", texts[0])) is not None:
            number = self._live.fresh_number()
            self._live.folders[number] = {}
            self._live.folders[found[0]][found[1]] = number
            yield Entered(call.end, number, found[0], found[1], new="folder")

    def _rename(self, call: Call, process: int, words: list[str], texts: list[bytes]) -> Iterator[Change]:
        one, other = (self._found(process, "", text) for text in texts)
        if one is not None and other is not None:
            number = self._live.folders[one[0]].pop(one[1])
            self._live.folders[other[0]][other[1]] = number
            yield Entered(call.end, number, other[0], other[1], leaves=(one[0], one[1]))

    def _remove(self, call: Call, process: int, folder: str, text: bytes) -> Iterator[Change]:
        if (found := self._found(process, folder, text)) is not None:
            yield Removed(call.end, self._live.folders[found[0]].pop(found[1]), found[0], found[1])

    def _unlink(self, call: Call, process: int, words: list[str], texts: list[bytes]) -> Iterator[Change]:
        return self._remove(call, process, "", texts[0])

    _rmdir = _unlink

    def _unlinkat(self, call: Call, process: int, words: list[str], texts: list[bytes]) -> Iterator[Change]:
        return self._remove(call, process, words[0], texts[0])


def put(content: bytearray, offset: int, data: bytes) -> None:
    """Write into a file's bytes; a hole before them is of zeros."""
    if offset > len(content):
        content.extend(bytes(offset - len(content)))
    content[offset : offset + len(data)] = data


def resize(content: bytearray, size: int) -> None:
    """Cut a file's bytes, or lengthen them with zeros."""
    del content[size:]
    content.extend(bytes(size - len(content)))
