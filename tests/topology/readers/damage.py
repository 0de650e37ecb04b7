"""Damage of a printed text, and the one rule that every reader keeps: a fact is the undamaged one, or unknown and named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

GARBLED = "\ufffd"  # what a byte that is not UTF-8 becomes


def cut(text: str) -> Iterator[str]:
    """The text up to somewhere within a line."""
    for at in range(1, len(text), 11):
        if text[at - 1] != "\n" and text[at] != "\n":
            yield text[:at]


def garbled(text: str) -> Iterator[str]:
    for at in range(0, len(text), 5):
        if not text[at].isspace():
            yield text[:at] + GARBLED + text[at + 1 :]


def lines_dropped(text: str) -> Iterator[str]:
    lines = text.splitlines(keepends=True)
    for at in range(len(lines)):
        yield "".join(lines[:at] + lines[at + 1 :])


def lines_doubled(text: str) -> Iterator[str]:
    lines = text.splitlines(keepends=True)
    for at in range(len(lines)):
        yield "".join([*lines[: at + 1], *lines[at:]])


def lines_joined(text: str) -> Iterator[str]:
    lines = text.splitlines(keepends=True)
    for at in range(len(lines) - 1):
        yield "".join([*lines[:at], lines[at].rstrip("\n"), *lines[at + 1 :]])


def leaves(value: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Every known fact of an answer by the keys that lead to it; a list of plain values is one fact."""
    if isinstance(value, Mapping):
        found: dict[tuple[str, ...], Any] = {path: None} if path else {}
        for key, entry in value.items():
            found |= leaves(entry, (*path, str(key)))
    elif isinstance(value, list | tuple) and any(isinstance(entry, Mapping | list | tuple | None) for entry in value):
        found = {}
        for number, entry in enumerate(value):
            found |= leaves(entry, (*path, str(number)))
    else:
        found = {path: value}
    return {place: fact for place, fact in found.items() if fact is not None}


def wrong_facts(whole: Mapping[str, Any], damaged: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    """The facts of a damaged text that are not those of the undamaged one."""
    right = leaves(whole)
    # A list whose entries are all unknown is empty.
    lists = {place[:depth] for place in right for depth in range(1, len(place))}
    return {
        place: fact
        for place, fact in leaves(damaged).items()
        if right.get(place) != fact and not (fact == [] and place in lists)
    }


def has_lost_facts(whole: Mapping[str, Any], damaged: Mapping[str, Any]) -> bool:
    return bool(leaves(whole).keys() - leaves(damaged).keys())
