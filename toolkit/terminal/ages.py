"""Parse ages such as `30m`, `12h`, `7d` or `2w`, and times given as an age or a date in local time."""

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import click

__all__ = ["Age", "Moment", "read_age", "read_moment"]

_AGE = re.compile(r"(\d{1,6})([smhdw])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def read_age(text: str) -> timedelta | None:
    """Parse an age such as `7d`; return None for any other form."""
    match = _AGE.fullmatch(text)
    return timedelta(**{_UNITS[match[2]]: int(match[1])}) if match else None


def read_moment(text: str) -> datetime | None:
    """Parse an age or an ISO date as a time in UTC; return None for any other form."""
    age = read_age(text)
    try:
        return datetime.now(UTC) - age if age is not None else datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):
        return None


class Age(click.ParamType[timedelta]):
    """A duration such as `30d`."""

    name = "age"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        if isinstance(value, timedelta):
            return value
        age = read_age(str(value))
        if age is None:
            self.fail(f"expected an age such as 30m, 12h, 7d or 2w, got {value!r}", param, ctx)
        return age


class Moment(click.ParamType[datetime]):
    """A time in the past, in UTC."""

    name = "moment"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        if isinstance(value, datetime):
            return value
        moment = read_moment(str(value))
        if moment is None:
            self.fail(f"expected an age (30m, 12h, 7d) or a date (2026-11-20), got {value!r}", param, ctx)
        return moment
