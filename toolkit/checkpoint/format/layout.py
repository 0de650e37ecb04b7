"""Names of the files and folders in a `checkpoints` folder.

`step-00001000` is a committed checkpoint. A folder with a suffix is not committed, regardless of its contents: a
process of attempt A with token N writes to the *part folder* `step-00001000.part-A-N` and renames it to commit.
`.stale-A` was a part folder of the abandoned attempt A, renamed by a later attempt or its supervisor. `move_aside` in
`folder.commit` lists the other suffixes.
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
    """Return the folder of the committed checkpoint of a step: `directory/step-00001000`."""
    return directory / f"step-{step:08d}"


def part_folder(final: Path, attempt: int, token: int) -> Path:
    """Return the folder in which the process `token` of `attempt` writes a checkpoint before its commit as `final`."""
    return final.with_name(f"{final.name}.part-{attempt}-{token}")


def parts_of(final: Path, attempt: int) -> list[Path]:
    """Return the part folders in which processes of `attempt` have written to commit as `final`."""
    return sorted(final.parent.glob(f"{escape(final.name)}.part-{attempt}-*"))


def new_token() -> int:
    """Return a random number that identifies a process."""
    return randbits(32)


def shard_name(rank: int, world_size: int) -> str:
    """Return the name of the shard file of a rank or node: `shard-00003-of-00008.h5`."""
    return f"shard-{rank:05d}-of-{world_size:05d}.h5"


def folder_of_rank(path: Path, rank: int) -> Path:
    """Return the folder of the checkpoint of one rank in `path`, if the ranks of a job saved without collectives."""
    return path / f"rank-{rank:05d}"


def digest_name(shard: str) -> str:
    """Return the name of the file with the block digests of a shard file."""
    return f"{shard.removesuffix('.h5')}.digest"


def step_of(folder: Path) -> int | None:
    """Return the step in the folder name of a committed checkpoint, or None for any other name."""
    match = _STEP.fullmatch(folder.name)
    return int(match.group(1)) if match else None


def aside_of(folder: Path) -> tuple[str, str, int] | None:
    """Return (committed name, reason, attempt) from a name such as `step-00001000.part-2-7`, or None for any other."""
    match = _ASIDE.fullmatch(folder.name)
    return (match.group(1), match.group(2), int(match.group(3))) if match else None


def committed_steps(directory: Path) -> dict[int, Path]:
    """List checkpoints by step, lowest first ({} for a missing folder). Raises OwnFailureError if it is unreadable."""
    named = {step: path for path in entries_of(directory) if (step := step_of(path)) is not None}
    try:  # a user may have created a file or a dangling link with such a name
        return {step: path for step, path in sorted(named.items()) if path.is_dir()}
    except OSError as error:
        raise host_cannot_read(error, directory) from None


def entries_of(directory: Path) -> list[Path]:
    """List the sorted entries of a folder ([] if it is missing). Raises OwnFailureError if it is unreadable."""
    try:
        return sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise host_cannot_read(error, directory) from None
