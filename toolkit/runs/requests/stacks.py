"""Request the stacks of a running run, and group the ranks that have the same one."""

import re
import time

from toolkit.errors import CheckFailedError
from toolkit.rundir.attempt_records import StartRecord
from toolkit.rundir.layout import AttemptDirectory, RunDirectory
from toolkit.runs.requests.control import ask_for

__all__ = ["request_stacks", "stacks_by_ranks"]

_REPLY_S = 30.0


def request_stacks(run: RunDirectory) -> AttemptDirectory:
    """Make the supervisor collect the stacks of all ranks, and wait for them; return the attempt.

    Raises:
        CheckFailedError: the run is not running, is an array or a batch script, or its supervisor does not respond.
    """
    ask_for(run, "stacks")
    asked, deadline = run.control / "stacks", time.monotonic() + _REPLY_S
    while asked.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    attempt = run.last_attempt()
    if attempt is None or asked.exists():
        asked.unlink(missing_ok=True)
        raise CheckFailedError(
            f"the supervisor of run {run.run_id} did not collect stacks within {_REPLY_S:.0f} s", where=str(asked),
            fix="name a task of an array; check the log of the job with `toolkit logs`",
        )  # fmt: skip
    return attempt


def stacks_by_ranks(attempt: AttemptDirectory) -> dict[str, list[int]]:
    """Return the ranks by their stacks, innermost frame last, or by the reason why there is none."""
    found: dict[str, list[int]] = {}
    begun = StartRecord.read(attempt)
    for rank in range(begun.ranks if begun else 0):
        try:
            text = attempt.stack_file(rank).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            text = (
                "has exited"
                if attempt.done_marker(rank).exists()
                else "no response: the signal did not reach its node, or its guard hangs"
            )
        main = re.split(r"^(?:Current thread|Thread) 0x.*\n", text, flags=re.MULTILINE)[-1]  # printed last
        found.setdefault("\n".join(reversed(main.rstrip().splitlines())), []).append(rank)
    return found
