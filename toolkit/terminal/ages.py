"""Ages such as `30m`, `12h`, `7d` or `2w`, and times as an age or a date in local time."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

__all__ = ["read_age", "read_moment"]

_AGE = re.compile(r"(\d{1,6})([smhdw])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def read_age(text: str) -> timedelta | None:
    """Return an age such as `7d`; None if the text has another form."""
    match = _AGE.fullmatch(text)
    return timedelta(**{_UNITS[match[2]]: int(match[1])}) if match else None


def read_moment(text: str) -> datetime | None:
    """Return a time in UTC, given as an age or an ISO date; None if the text is neither."""
    age = read_age(text)
    try:
        return datetime.now(UTC) - age if age is not None else datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):
        return None
