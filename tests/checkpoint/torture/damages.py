"""Ways in which a checkpoint's files are damaged: each changes one newest checkpoint, and says which files tell of it."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from toolkit.checkpoint.format.layout import INDEX, MANIFEST

PAGE = 4096


@dataclass(frozen=True)
class Patient:
    """A checkpoint to be damaged, the one before it, and one of another run; all of the same shapes."""

    folder: Path
    older: Path
    stranger: Path
    choose: random.Random

    def file(self, *, but: tuple[str, ...] = ()) -> Path:
        """One of the files that the checkpoint cannot do without."""
        return self.choose.choice([path for path in sorted(self.folder.iterdir()) if path.name not in (INDEX, *but)])

    def shard(self) -> Path:
        return self.choose.choice(sorted(set(self.folder.glob("*.h5")) - {self.folder / INDEX}))


def rewrite(path: Path, content: bytes) -> list[str]:
    """Give a file other bytes. It may share its old ones with a copy, which keeps them."""
    assert not path.exists() or path.read_bytes() != content
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    return [path.name]


def bit_flip(patient: Patient) -> list[str]:
    path = patient.file()
    return rewrite(path, flipped(path.read_bytes(), patient.choose))


def flipped(content: bytes, choose: random.Random) -> bytes:
    changed = bytearray(content)
    bit = choose.randrange(8 * len(changed))
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def truncated(patient: Patient) -> list[str]:
    content = (path := patient.file()).read_bytes()
    return rewrite(path, content[: patient.choose.choice([len(content) - 1, patient.choose.randrange(len(content))])])


def emptied(patient: Patient) -> list[str]:
    return rewrite(patient.file(), b"")


def extended(patient: Patient) -> list[str]:
    path, count = patient.file(), patient.choose.randint(1, 2 * PAGE)
    return rewrite(path, path.read_bytes() + patient.choose.choice([bytes(count), patient.choose.randbytes(count)]))


def deleted(patient: Patient) -> list[str]:
    (path := patient.file()).unlink()
    return [path.name]


def page_zeroed(patient: Patient) -> list[str]:
    path = patient.file()
    content = path.read_bytes()
    pages = [at for at in range(0, len(content), PAGE) if any(content[at : at + PAGE])]
    at = patient.choose.choice(pages)
    zeroed = bytes(len(content[at : at + PAGE]))
    return rewrite(path, content[:at] + zeroed + content[at + PAGE :])


def pages_exchanged(patient: Patient) -> list[str]:
    path = patient.shard()
    content = path.read_bytes()
    pages = [content[at : at + PAGE] for at in range(0, len(content), PAGE)]
    one = patient.choose.randrange(len(pages))
    other = patient.choose.choice([number for number, page in enumerate(pages) if page != pages[one]])
    pages[one], pages[other] = pages[other], pages[one]
    return rewrite(path, b"".join(pages))


def byte_lost(patient: Patient) -> list[str]:
    """One byte gone and one appended: all behind it has moved, and the size is right."""
    path = patient.file()
    content = path.read_bytes()
    at = patient.choose.randrange(len(content))
    moved = content[:at] + content[at + 1 :] + b"\x00"
    return rewrite(path, moved if moved != content else content + b"\x00")


def of_another_step(patient: Patient) -> list[str]:
    path = patient.file(but=(MANIFEST,))
    return rewrite(path, (patient.older / path.name).read_bytes())


def of_a_stranger(patient: Patient) -> list[str]:
    path = patient.file(but=(MANIFEST,))
    other = (patient.stranger / path.name).read_bytes()
    assert len(other) == path.stat().st_size
    return rewrite(path, other)


def ranks_exchanged(patient: Patient) -> list[str]:
    """The files of two ranks under each other's names."""
    suffix = patient.choose.choice([".h5", ".digest"])
    files = [path for path in sorted(patient.folder.glob(f"*{suffix}")) if path.name != INDEX]
    if len(files) < 2:
        return of_a_stranger(patient)
    one, other = files[:2]
    contents = one.read_bytes(), other.read_bytes()
    return rewrite(one, contents[1]) + rewrite(other, contents[0])


def digests_rewritten(patient: Patient) -> list[str]:
    """A shard file that is not the saved one, with digests that fit it: the manifest alone can tell."""
    shard = patient.shard()
    other = patient.choose.choice([patient.older, patient.stranger])
    names = [path.name for path in sorted(patient.folder.glob(f"{shard.stem}.*"))]
    for name in names:
        rewrite(patient.folder / name, (other / name).read_bytes())
    return names


def torn(patient: Patient) -> list[str]:
    """The front of a file as it should be, and its rest of the step before."""
    path = patient.shard()
    content, older = path.read_bytes(), (patient.older / path.name).read_bytes()
    places = [at for at in range(PAGE, len(content), PAGE) if content[at:] != older[at : len(content)]]
    at = patient.choose.choice(places)
    return rewrite(path, content[:at] + older[at : len(content)])


def manifest_of_another(patient: Patient) -> list[str]:
    other = patient.choose.choice([patient.older, patient.stranger])
    rewrite(patient.folder / MANIFEST, (other / MANIFEST).read_bytes())
    return [path.name for path in patient.folder.iterdir()]  # it is whole: the files are those that do not fit


DAMAGES: dict[str, Callable[[Patient], list[str]]] = {
    "bit flipped": bit_flip,
    "truncated": truncated,
    "emptied": emptied,
    "extended": extended,
    "deleted": deleted,
    "4 KiB zeroed": page_zeroed,
    "pages exchanged": pages_exchanged,
    "a byte lost": byte_lost,
    "file of another step": of_another_step,
    "file of another run": of_a_stranger,
    "files of two ranks exchanged": ranks_exchanged,
    "shard and digests of another checkpoint": digests_rewritten,
    "torn between two steps": torn,
    "manifest of another checkpoint": manifest_of_another,
}


def index_damaged(patient: Patient) -> None:
    """The index is derived: it may be gone, cut or wrong."""
    path = patient.folder / INDEX
    content = path.read_bytes()
    kind = patient.choose.choice(["flip", "cut", "gone"])
    path.unlink()
    if kind == "flip":
        path.write_bytes(flipped(content, patient.choose))
    elif kind == "cut":
        path.write_bytes(content[: patient.choose.randrange(len(content))])


def linked_copy(source: Path, target: Path) -> None:
    """A copy of a folder of checkpoints whose files share their bytes with the original's until they are rewritten."""
    shutil.copytree(source, target, copy_function=lambda one, other: Path(other).hardlink_to(one))
