"""Parse and format durations exactly as Slurm does: "90:00" is ninety minutes.

Slurm accepts the formats in sbatch(1), --time, and also "days-", which the manual does not mention.
"""

import re
from functools import lru_cache

__all__ = ["FORMS", "format_slurm_time", "meant_as_hours", "parse_slurm_time", "printed_limit_s"]

FORMS = '"MM", "MM:SS", "HH:MM:SS", "D-HH", "D-HH:MM", "D-HH:MM:SS" or "UNLIMITED"'
UNLIMITED = frozenset({"UNLIMITED", "INFINITE", "-1"})

_MINUTES = re.compile(r"[0-9]+")
_MINUTES_AND_SECONDS = re.compile(r"[0-9]+:[0-9]+")
_WITH_DAYS = re.compile(r"([0-9]+)-(?:([0-9]+)(?::([0-9]+)(?::([0-9]+))?)?)?")
_WITHOUT_DAYS = re.compile(r"([0-9]+)(?::([0-9]+))?(?::([0-9]+))?")


@lru_cache(maxsize=256)  # the checks of all tasks of a sweep parse the same few strings
def parse_slurm_time(text: str) -> int | None:
    """Return the duration `text` in seconds, None for no limit; raise ValueError if Slurm would reject its format.

    Fields may exceed their unit ("00:90:00" is 90 minutes). Slurm rounds the limit of a job up to whole minutes.
    """
    if text.upper() in UNLIMITED:
        return None
    if match := _WITH_DAYS.fullmatch(text):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return days * 86400 + hours * 3600 + minutes * 60 + seconds
    if match := _WITHOUT_DAYS.fullmatch(text):
        first, second, third = match.groups()
        if third is not None:
            return int(first) * 3600 + int(second) * 60 + int(third)
        return int(first) * 60 + int(second or 0)
    raise ValueError(f"{text!r} is not a valid Slurm time")


def printed_limit_s(text: str) -> int | None:
    """Return a limit or remaining time that Slurm prints, in seconds; None for UNLIMITED, NONE, INVALID or ""."""
    try:
        return parse_slurm_time(text)
    except ValueError:
        return None


def meant_as_hours(text: str) -> str:
    """Return a time in minutes rewritten as hours: "1:30:00" for "1:30", "24:00:00" for "24"; "" for other formats."""
    return f"{text}:00" if _MINUTES_AND_SECONDS.fullmatch(text) else f"{text}:00:00" if _MINUTES.fullmatch(text) else ""


def format_slurm_time(seconds: int | None) -> str:
    """Return seconds as Slurm prints a limit: "D-HH:MM:SS", "UNLIMITED" for None; ValueError if negative."""
    if seconds is None:
        return "UNLIMITED"
    if seconds < 0:
        raise ValueError(f"a time cannot be negative: {seconds} s")
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}-{hour:02}:{minute:02}:{second:02}"
