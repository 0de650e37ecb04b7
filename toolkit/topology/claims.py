"""Combine what several sources (NVML, /sys, nvidia-smi, ...) claim about a node into facts.

No source overrides another: if two sources contradict each other, the value is unknown, and the fact keeps both claims.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

from toolkit.topology.facts import CONTRADICTED, Claimed, Confidence, Fact, unknown

__all__ = ["About", "Answer", "Claims"]

# The subject of a claim: ("GPU", 0, "numa_node"), ("link", "GPU0", "GPU1"), ("sockets",).
About = tuple[Hashable, ...]


@dataclass
class Answer:
    """The claims of one source.

    `covers` lists prefixes of subjects that the source can report; None in a prefix matches any key. `reasons`
    explains missing claims: a reason applies to all subjects with its prefix, and the reason at () to all subjects.
    """

    source: str
    confidence: Confidence
    covers: tuple[About, ...]
    claims: dict[About, Any] = field(default_factory=dict)
    derived: set[About] = field(default_factory=set)
    reasons: dict[About, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def say(self, value: Any, *about: Hashable, derived: bool = False) -> None:
        """Claim a value unless it is None. A derived claim counts only if no other source claims a value."""
        if value is not None:
            self.claims[about] = value
            if derived:
                self.derived.add(about)

    def miss(self, reason: str, *about: Hashable) -> None:
        """Record why this source has no claim about a subject, or about any subject with this prefix."""
        self.reasons[about] = reason

    def reason(self, about: About) -> tuple[int, str] | None:
        """Return (length of the matching prefix, why there is no claim); None if no reason is recorded."""
        if not any(_has_prefix(about, prefix) for prefix in self.covers):
            return None
        for length in range(len(about), -1, -1):
            if about[:length] in self.reasons:
                return length, self.reasons[about[:length]]
        return None


def _has_prefix(about: About, prefix: About) -> bool:
    return len(about) >= len(prefix) and all(wanted in (None, key) for key, wanted in zip(about, prefix, strict=False))


class Claims:
    """The claims of all sources about one node."""

    def __init__(self, answers: list[Answer]) -> None:
        self.answers = answers

    def below(self, *about: Hashable, firm: bool = False) -> list[Any]:
        """Return the distinct keys after this prefix in all claims, for example the GPU numbers after "GPU".

        If `firm` is True, keys with only derived claims are omitted.
        """
        depth = len(about)
        return list(
            dict.fromkeys(
                subject[depth]
                for answer in self.answers
                for subject in answer.claims
                if len(subject) > depth and subject[:depth] == about and not (firm and subject in answer.derived)
            )
        )

    def fact(self, *about: Hashable) -> Fact[Any]:
        """Return the value on which the sources agree, or an unknown fact with the reason."""
        claiming = [answer for answer in self.answers if about in answer.claims]
        # A derived claim only fills a gap. It must not contradict a source that observed the value.
        claiming = [answer for answer in claiming if about not in answer.derived] or claiming[:1]
        if not claiming:
            return self._unclaimed(about)
        sources = ", ".join(answer.source for answer in claiming)
        values = [answer.claims[about] for answer in claiming]
        if all(value == values[0] for value in values):
            single: Confidence = "derived" if about in claiming[0].derived else claiming[0].confidence
            return Fact(values[0], sources, "confirmed" if len(claiming) > 1 else single)
        claims = tuple(Claimed(answer.claims[about], answer.source) for answer in claiming)
        return Fact(None, sources, "unknown", CONTRADICTED, claims)

    def facts(self, about: About, *names: str) -> Iterator[Fact[Any]]:
        """Yield the fact for each name below a subject."""
        return (self.fact(*about, name) for name in names)

    def _unclaimed(self, about: About) -> Fact[Any]:
        """Return an unknown fact with the reasons of the sources that cover the subject."""
        silent = [(answer.source, reason) for answer in self.answers if (reason := answer.reason(about))]
        # A reason for this subject explains more than a reason for a whole source, such as "not installed".
        silent = [(source, reason) for source, reason in silent if reason[0]] or silent
        return unknown(
            ", ".join(dict.fromkeys(source for source, _ in silent)) or "none",
            "; ".join(dict.fromkeys(reason for _, (_, reason) in silent)) or "no source reports it",
        )
