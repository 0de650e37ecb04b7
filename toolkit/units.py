"""Format and parse durations and byte counts."""

import re

__all__ = [
    "format_bytes", "format_bytes_in", "format_duration", "parse_bytes", "parse_duration", "round_duration",
    "shorten_duration",
]  # fmt: skip

_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86400
_BINARY = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(s|m|min|h|d)", re.ASCII)
_BYTES = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?) ?(?:([KMGT])(i)?)?B?", re.IGNORECASE | re.ASCII)


def format_duration(seconds: float) -> str:
    """Format a duration with up to two units, rounded down: `8.2 s`, `12 s`, `3 min 20 s`, `4 h 5 min`, `2 d 3 h`."""
    for size, name, small, small_name in (
        (_DAY_S, "d", _HOUR_S, "h"), (_HOUR_S, "h", _MINUTE_S, "min"), (_MINUTE_S, "min", 1, "s"),
    ):  # fmt: skip
        if seconds >= size:
            rest = int(seconds % size // small)
            return f"{int(seconds // size)} {name}" + (f" {rest} {small_name}" if rest else "")
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def round_duration(seconds: float) -> str:
    """Format a duration in minutes from 90 s on, in hours from 2 days on: `40 s`, `12 min`, `3 h 20 min`, `2 d 4 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / _MINUTE_S)
    if minutes < 90:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    return f"{hours // 24} d {hours % 24} h"


def shorten_duration(seconds: float) -> str:
    """Format a duration with one unit and two significant digits: `0.35 s`, `4.2 min`, `1.6 h`."""
    for unit, size in (("d", _DAY_S), ("h", _HOUR_S), ("min", _MINUTE_S)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.2g} {unit}" if seconds < 10 * size else f"{seconds / size:.0f} {unit}"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"


def format_bytes(count: float) -> str:
    """Format a byte count in the largest binary unit that does not exceed it: `512 B`, `64 KiB`, `1.5 MiB`."""
    for unit, size in _BINARY.items():
        if count >= size:
            return f"{count / size:g} {unit}"
    return f"{count:g} B"


def format_bytes_in(count: float, unit: str, *, digits: int) -> str:
    """Format a byte count in KiB, MiB or GiB, with a fixed number of decimals: `0.25 GiB`, `1,200 MiB`."""
    return f"{count / _BINARY[unit]:,.{digits}f} {unit}"


def parse_bytes(text: str, *, binary: bool = False) -> int | None:
    """Parse a byte count such as `5GB` (10^9), `2GiB` (2^30), `64K` or `8`; return None for any other form.

    With `binary`, K, M, G and T without an `i` are powers of 1024, too.
    """
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        return None
    number, power, is_binary = match.groups()
    if not (number.isdigit() or power):
        return None
    size = (1024 if binary or is_binary else 1000) ** " KMGT".index((power or " ").upper())
    return int(number) * size if number.isdigit() else int(float(number) * size)


def parse_duration(text: str) -> float | None:
    """Parse a duration such as `30s`, `10m`, `1.5h` or `2d` in seconds; return None for any other form."""
    match = _DURATION.fullmatch(text.strip())
    sizes = {"s": 1, "h": _HOUR_S, "d": _DAY_S}
    return float(match[1]) * sizes.get(match[2], _MINUTE_S) if match else None
