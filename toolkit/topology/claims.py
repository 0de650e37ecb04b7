"""What sources say of a node, before anybody decides what is known: claims, and the reasons why there are none.

No source outvotes another: where two contradict each other nothing is known, and both claims are kept.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from toolkit.topology.facts import CONTRADICTED, Claimed, Confidence, Fact, unknown

# What a claim is about: ("GPU", 0, "numa_node"), ("link", "GPU0", "GPU1"), ("sockets",).
About = tuple[Hashable, ...]


@dataclass
class Answer:
    """What one source says.

    `tells` are the things that it speaks of, by the words they begin with, None for any word. `reasons` tell why it says nothing of a thing,
    or of all things that begin with the same words; that of no words is for all that it tells.
    """

    source: str
    confidence: Confidence
    tells: tuple[About, ...]
    claims: dict[About, Any] = field(default_factory=dict)
    derived: set[About] = field(default_factory=set)
    reasons: dict[About, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def say(self, value: Any, *about: Hashable, derived: bool = False) -> None:
        """Claim a value; None claims nothing. What is derived counts where no other source speaks."""
        if value is not None:
            self.claims[about] = value
            if derived:
                self.derived.add(about)

    def miss(self, reason: str, *about: Hashable) -> None:
        """Tell why there is no claim of this, or of anything below it."""
        self.reasons[about] = reason

    def reason(self, about: About) -> tuple[int, str] | None:
        """(of how many words, why nothing is claimed); None where this source does not speak of such things."""
        if not any(_begins(about, begin) for begin in self.tells):
            return None
        for words in range(len(about), -1, -1):
            if about[:words] in self.reasons:
                return words, self.reasons[about[:words]]
        return None


def _begins(about: About, begin: About) -> bool:
    return len(about) >= len(begin) and all(wanted in (None, word) for word, wanted in zip(about, begin, strict=False))


class Claims:
    """The answers of all sources of a node."""

    def __init__(self, answers: list[Answer]) -> None:
        self.answers = answers

    def below(self, *about: Hashable, firm: bool = False) -> list[Any]:
        """What stands behind these words in any claim, once each: the GPUs' numbers below "GPU".

        `firm` leaves out what is derived alone.
        """
        depth = len(about)
        return list(
            dict.fromkeys(
                place[depth]
                for answer in self.answers
                for place in answer.claims
                if len(place) > depth and place[:depth] == about and not (firm and place in answer.derived)
            )
        )

    def fact(self, *about: Hashable) -> Fact[Any]:
        """What is known: a value that nobody contradicts, or why there is none."""
        said = [answer for answer in self.answers if about in answer.claims]
        # What is only worked out from other facts speaks where nobody knows, and against nobody.
        said = [answer for answer in said if about not in answer.derived] or said[:1]
        if not said:
            return self._silence(about)
        sources = ", ".join(answer.source for answer in said)
        values = [answer.claims[about] for answer in said]
        if all(value == values[0] for value in values):
            sure: Confidence = "derived" if about in said[0].derived else said[0].confidence
            return Fact(values[0], sources, "confirmed" if len(said) > 1 else sure)
        claims = tuple(Claimed(answer.claims[about], answer.source) for answer in said)
        return Fact(None, sources, "unknown", CONTRADICTED, claims)

    def _silence(self, about: About) -> Fact[Any]:
        """Why nobody tells it. What a source says of this very thing tells more than that another one is not there."""
        silent = [(answer.source, reason) for answer in self.answers if (reason := answer.reason(about))]
        silent = [(source, reason) for source, reason in silent if reason[0]] or silent
        return unknown(
            ", ".join(dict.fromkeys(source for source, _ in silent)) or "nobody",
            "; ".join(dict.fromkeys(reason for _, (_, reason) in silent)) or "no source tells it",
        )
