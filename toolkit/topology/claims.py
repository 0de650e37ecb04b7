"""The claims of each source about a node, before they become facts, and the reasons for missing claims.

No source outvotes another: if two contradict each other, the value is unknown, and both claims are kept.
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

    `covers` lists the prefixes of the subjects that the source reports; None matches any key. `reasons` explains
    missing claims: the reason at a prefix applies to all subjects below it, and the one at () to the whole source.
    """

    source: str
    confidence: Confidence
    covers: tuple[About, ...]
    claims: dict[About, Any] = field(default_factory=dict)
    derived: set[About] = field(default_factory=set)
    reasons: dict[About, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def say(self, value: Any, *about: Hashable, derived: bool = False) -> None:
        """Claim a value; None claims nothing. A derived claim counts only if no other source claims a value."""
        if value is not None:
            self.claims[about] = value
            if derived:
                self.derived.add(about)

    def miss(self, reason: str, *about: Hashable) -> None:
        """Record why there is no claim about this subject, or about any subject below it."""
        self.reasons[about] = reason

    def reason(self, about: About) -> tuple[int, str] | None:
        """(length of the matching prefix, why there is no claim); None if this source does not cover the subject."""
        if not any(_has_prefix(about, prefix) for prefix in self.covers):
            return None
        for length in range(len(about), -1, -1):
            if about[:length] in self.reasons:
                return length, self.reasons[about[:length]]
        return None


def _has_prefix(about: About, prefix: About) -> bool:
    return len(about) >= len(prefix) and all(wanted in (None, key) for key, wanted in zip(about, prefix, strict=False))


class Claims:
    """The answers of all sources of a node."""

    def __init__(self, answers: list[Answer]) -> None:
        self.answers = answers

    def below(self, *about: Hashable, firm: bool = False) -> list[Any]:
        """The distinct keys that follow this prefix in any claim: the GPU numbers below "GPU".

        `firm` omits keys that have derived claims only.
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
        """The value on which the sources agree, or the reason why it is unknown."""
        claiming = [answer for answer in self.answers if about in answer.claims]
        # A derived claim fills a gap; it never contradicts a source that observed the value.
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
        """The fact of each name below a subject."""
        return (self.fact(*about, name) for name in names)

    def _unclaimed(self, about: About) -> Fact[Any]:
        """The unknown fact, with the reason of each source that covers the subject."""
        silent = [(answer.source, reason) for answer in self.answers if (reason := answer.reason(about))]
        # A reason for this very subject explains more than the absence of another source.
        silent = [(source, reason) for source, reason in silent if reason[0]] or silent
        return unknown(
            ", ".join(dict.fromkeys(source for source, _ in silent)) or "none",
            "; ".join(dict.fromkeys(reason for _, (_, reason) in silent)) or "no source reports it",
        )
