"""Option types: an age such as `30m`, `12h`, `7d` or `2w`, and a time as an age or a date in local time."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import click

_AGE = re.compile(r"(\d{1,6})([smhdw])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


class Age(click.ParamType[timedelta]):
    """A duration such as `30d`."""

    name = "age"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        if isinstance(value, timedelta):
            return value
        age = _age(str(value))
        if age is None:
            self.fail(f"expected an age such as 30m, 12h, 7d or 2w, got {value!r}", param, ctx)
        return age


class Moment(click.ParamType[datetime]):
    """A time in the past, in UTC."""

    name = "moment"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        if isinstance(value, datetime):
            return value
        age = _age(str(value))
        try:
            if age is not None:
                return datetime.now(UTC) - age
            return datetime.fromisoformat(str(value)).astimezone(UTC)
        except (ValueError, OverflowError):
            self.fail(f"expected an age (30m, 12h, 7d) or a date (2026-11-20), got {value!r}", param, ctx)


def _age(text: str) -> timedelta | None:
    match = _AGE.fullmatch(text)
    return timedelta(**{_UNITS[match[2]]: int(match[1])}) if match else None
