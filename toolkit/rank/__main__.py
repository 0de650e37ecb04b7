"""`python -P -m toolkit.rank`: the program that a launcher starts for each rank."""

import os
import sys
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.rank.guard import guard, rank_by_launcher
from toolkit.rundir.layout import RunDirectory
from toolkit.terminal.talk import say


def _body(rank: int) -> int:
    from toolkit.rank.entry import run_rank

    return run_rank(os.environ, rank)


def main() -> int:
    """Start one rank under its guard; return the exit code."""
    try:
        attempt = RunDirectory(Path(os.environ["TOOLKIT_RUN_DIR"])).attempt(int(os.environ["TOOLKIT_ATTEMPT"]))
        rank = rank_by_launcher(os.environ)
    except (ToolkitError, KeyError) as error:
        say(f"cannot start a rank: {error}")
        return 125
    return guard(attempt, rank, lambda: _body(rank), foreign=os.environ.get("TOOLKIT_FOREIGN") == "1")


if __name__ == "__main__":
    sys.exit(main())
