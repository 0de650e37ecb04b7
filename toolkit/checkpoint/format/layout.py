"""Names inside a `checkpoints` folder.

`step-00001000` is a committed checkpoint; a folder with a suffix is not, whatever it contains. Attempt A writes
`.part-A-N` in the process with token N; `.stale-A` was a part folder of the abandoned attempt A (the supervisor's claim
of the next attempt renames it, too); `move_aside` in `folder.commit` lists the other suffixes.
"""

import re
from glob import escape
from pathlib import Path
from secrets import randbits

from toolkit.checkpoint.errors import host_cannot_read

__all__ = ["INDEX", "MANIFEST", "aside_of", "committed_steps", "step_folder", "step_of"]

MANIFEST = "manifest.json"
INDEX = "index.h5"
_STEP = re.compile(r"step-(\d{8,})")
_ASIDE = re.compile(r"(step-\d{8,})\.([a-z]+)-(\d+)(?:-\d+)?")


def step_folder(directory: Path, step: int) -> Path:
    """The folder of a step's committed checkpoint: `directory/step-00001000`."""
    return directory / f"step-{step:08d}"


def part_folder(final: Path, attempt: int, token: int) -> Path:
    """The folder in which `attempt` writes a checkpoint before its commit as `final`; `token` identifies the process."""
    return final.with_name(f"{final.name}.part-{attempt}-{token}")


def parts_of(final: Path, attempt: int) -> list[Path]:
    """The folders in which processes of `attempt` write or wrote `final`."""
    return sorted(final.parent.glob(f"{escape(final.name)}.part-{attempt}-*"))


def new_token() -> int:
    """A random number that identifies a process."""
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
    """(committed name, reason, attempt) of a name such as `step-00001000.part-2-7`, None for any other."""
    match = _ASIDE.fullmatch(folder.name)
    return (match.group(1), match.group(2), int(match.group(3))) if match else None


def committed_steps(directory: Path) -> dict[int, Path]:
    """Committed checkpoints by step, oldest first ({} for a missing folder); OwnFailureError if not readable."""
    named = {step: path for path in entries_of(directory) if (step := step_of(path)) is not None}
    try:  # a user may have created a file or a dangling link of such a name
        return {step: path for step, path in sorted(named.items()) if path.is_dir()}
    except OSError as error:
        raise host_cannot_read(error, directory) from None


def entries_of(directory: Path) -> list[Path]:
    """The sorted entries of a `checkpoints` folder ([] if it is missing); OwnFailureError if it is not readable."""
    try:
        return sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise host_cannot_read(error, directory) from None
