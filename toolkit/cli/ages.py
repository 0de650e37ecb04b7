"""Option types: an age such as `30m`, `12h`, `7d` or `2w`, and a time as an age or a date in local time."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import click

from toolkit.terminal.ages import read_age, read_moment


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
