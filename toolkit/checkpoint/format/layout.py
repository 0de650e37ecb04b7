"""Names inside a `checkpoints` folder.

`step-00001000` is a committed checkpoint; the same name with a suffix is none, whatever it holds:
`.part-A-N` is being written by attempt A, in a process that drew the number N; `.bad-A` was found damaged by attempt A; `.stale-A` was a part of
attempt A, which was given up on (the supervisor's claim of the next attempt gives this name, too); `set_aside`
in `folder.commit` lists the other words.
"""

from __future__ import annotations

import re
from glob import escape
from pathlib import Path
from secrets import randbits

from toolkit.checkpoint.errors import host_cannot_read

MANIFEST = "manifest.json"
INDEX = "index.h5"
_STEP = re.compile(r"step-(\d{8,})")
_ASIDE = re.compile(r"(step-\d{8,})\.([a-z]+)-(\d+)(?:-\d+)?")


def step_folder(directory: Path, step: int) -> Path:
    """Where the committed checkpoint of a step stands: `directory/step-00001000`."""
    return directory / f"step-{step:08d}"


def part_folder(final: Path, attempt: int, token: int) -> Path:
    """Where `attempt` writes a checkpoint before it is committed as `final`; `token` is its process's alone."""
    return final.with_name(f"{final.name}.part-{attempt}-{token}")


def parts_of(final: Path, attempt: int) -> list[Path]:
    """The folders in which processes of `attempt` write `final`, or did."""
    return sorted(final.parent.glob(f"{escape(final.name)}.part-{attempt}-*"))


def new_token() -> int:
    """A number that no other process has."""
    return randbits(32)


def shard_name(rank: int, world_size: int) -> str:
    """The file of one rank: `shard-00003-of-00008.h5`."""
    return f"shard-{rank:05d}-of-{world_size:05d}.h5"


def digest_name(shard: str) -> str:
    """The file with the block digests of a shard file."""
    return f"{shard.removesuffix('.h5')}.digest"


def step_of(folder: Path) -> int | None:
    """The step of a committed checkpoint's folder name, None for any other name."""
    match = _STEP.fullmatch(folder.name)
    return int(match.group(1)) if match else None


def aside_of(folder: Path) -> tuple[str, str, int] | None:
    """(committed name, word, attempt) of a name such as `step-00001000.part-2-7`, None for any other."""
    match = _ASIDE.fullmatch(folder.name)
    return (match.group(1), match.group(2), int(match.group(3))) if match else None


def committed_steps(directory: Path) -> dict[int, Path]:
    """Committed checkpoints by step, oldest first. A missing folder holds none.

    Raises:
        OwnFailureError: this host cannot read the folder.
    """
    named = {step: path for path in entries_of(directory) if (step := step_of(path)) is not None}
    try:  # what people put there under such a name may be a file, or a link to nowhere
        return {step: path for step, path in sorted(named.items()) if path.is_dir()}
    except OSError as error:
        raise host_cannot_read(error, directory) from None


def entries_of(directory: Path) -> list[Path]:
    """What stands in a `checkpoints` folder, by name; nothing where it is missing.

    Raises:
        OwnFailureError: this host cannot read it.
    """
    try:
        return sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise host_cannot_read(error, directory) from None
