"""Tokenizers that tests name as `tokens_of_words:...`; other processes import them."""

from __future__ import annotations

import os


def lengths(text: str) -> list[int]:
    return [len(word) for word in text.split()]


def large(text: str) -> list[int]:
    return [70_000]


def negative(text: str) -> list[int]:
    return [-1]


def nested(text: str) -> list[list[int]]:
    return [[1, 2]]


def failing(text: str) -> list[int]:
    raise KeyError("no such word")


def nothing(text: str) -> list[int]:
    return []


def dying(text: str) -> list[int]:
    os._exit(3)


number = 3
