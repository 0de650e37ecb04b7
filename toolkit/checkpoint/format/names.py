"""Tensor names as HDF5 link names and back.

HDF5 splits paths at "/" and reads "." as "this group"; control characters and lone surrogates make files
that other tools cannot list. These characters, and "%" itself, are percent-encoded as UTF-8 bytes.
"""

from __future__ import annotations

import re

_EMPTY = "%"
_ESCAPED_CHARACTER = re.compile("[/%\x00-\x1f\x7f\ud800-\udfff]")
_ESCAPED_BYTES = re.compile("(?:%[0-9A-F]{2})+")


def escape(name: str) -> str:
    """The HDF5 link name of a tensor's name: "a/b" becomes "a%2Fb". `unescape` is its exact inverse."""
    if not name:
        return _EMPTY
    if set(name) == {"."}:
        return name.replace(".", "%2E")
    return _ESCAPED_CHARACTER.sub(lambda match: _percent(match.group()), name)


def unescape(link: str) -> str:
    """The tensor's name of an HDF5 link name that `escape` made."""
    if link == _EMPTY:
        return ""
    return _ESCAPED_BYTES.sub(lambda match: _plain(match.group()), link)


def _percent(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode("utf-8", "surrogatepass"))


def _plain(escaped: str) -> str:
    return bytes.fromhex(escaped.replace("%", "")).decode("utf-8", "surrogatepass")
