"""Names of GPUs that lost letters or words: the whole name stands beside them, or NVIDIA's is not the first word."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

MOST_MODELS = 64  # no machine has more, and every name is held against every other


def odd_names(names: Iterable[str]) -> dict[str, str]:
    """What is wrong with those names that a damage explains better than another model does, by name."""
    counts = Counter(names)
    if len(counts) > MOST_MODELS:
        return {}
    found: dict[str, str] = {}
    branded = any(name.startswith("NVIDIA ") for name in counts)
    for name in counts:
        words = name.split()
        if branded and not name.startswith("NVIDIA "):
            found[name] = f"{name[:60]!r} does not begin with NVIDIA, as the other names do"
            continue
        if "NVIDIA" in words[1:] or words == ["NVIDIA"]:
            found[name] = f"{name[:60]!r} is not how a GPU is named"
        elif whole := shortened_of(name, counts):
            found[name] = f"{name[:60]!r} may be a damaged {whole[:60]!r}"
    return found


def shortened_of(word: str, counts: Counter[str]) -> str | None:
    """A longer and as frequent word that becomes `word` when letters are taken from it, or its words exchanged.

    "NVIDIA H10" beside "NVIDIA H100"; but not "NVIDIA H200", which no loss of letters makes.
    """
    for other, times in counts.items():
        if other == word or times < counts[word] or not word:
            continue
        if (len(other) > len(word) and _is_left_of(word, other)) or sorted(other.split()) == sorted(word.split()):
            return other
    return None


def _is_left_of(word: str, other: str) -> bool:
    letters = iter(other)
    return all(letter in letters for letter in word)
