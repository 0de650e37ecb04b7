"""The supervisor's messages in the job's log, which is its stdout."""

from toolkit.rundir.files import is_unwritable
from toolkit.terminal.talk import plain


def say(text: str) -> None:
    """Print one line to the job's log."""
    try:
        print(plain(f"toolkit: {text}"), flush=True)  # noqa: T201
    except OSError as error:
        if not is_unwritable(error):  # a full disk must not end the job just because it cannot be logged
            raise
