"""Options of sbatch for one submission alone: -o, -e and -d."""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.config.values import no_line
from toolkit.errors import ToolkitError

__all__ = ["check_sbatch_options"]


def check_sbatch_options(options: Sequence[str], *, for_sbatch: bool) -> Sequence[str]:
    """Return options that follow the job's own, so that for sbatch they override those.

    Raises:
        ToolkitError: an option cannot be a line of the script, or no sbatch will read it.
    """
    for option in options:
        if reason := no_line(option):
            raise ToolkitError(reason, where=option, fix="remove it")
        if not for_sbatch:
            raise ToolkitError(
                "is for sbatch, and no sbatch starts this run",
                where=option,
                fix="leave it out, or `toolkit submit` to a cluster",
            )
    return options
