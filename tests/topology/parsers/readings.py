"""Samples of other commands' outputs, real ones where the collection is at hand and our own, and the CLI's reading of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rules import VALID
from text_mutations import Mutation

from toolkit.cli.parse import KINDS, reader_of
from toolkit.errors import CheckFailedError

CORPUS = Path(__file__).parents[4] / "shared" / "corpus"
OWN = Path(__file__).parent / "samples"


@dataclass(frozen=True)
class Sample:
    """One text. `record` is the sidecar of a real one."""

    kind: str
    name: str
    text: str
    record: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        return f"{self.kind}-{self.name}"


@dataclass(frozen=True)
class Reading:
    """What the CLI answers; `answer` is None where the text was refused."""

    answer: dict[str, Any] | None
    warnings: tuple[str, ...]


def text_of(path: Path) -> str:
    return path.read_bytes().decode("utf-8-sig", errors="replace")  # as the CLI does


def real_samples(kind: str) -> list[Sample]:
    found = []
    for sidecar in sorted((CORPUS / kind).glob("*.json")):
        record = json.loads(sidecar.read_text())
        found.append(Sample(kind, sidecar.stem, text_of(sidecar.parent / record["file"]), record))
    return found


def own_samples(kind: str) -> list[Sample]:
    """`samples/KIND.txt`, `samples/KIND.2.txt` and so on."""
    paths = sorted({*OWN.glob(f"{kind}.[tx][xm][tl]"), *OWN.glob(f"{kind}.*.[tx][xm][tl]")})
    return [Sample(kind, f"own-{path.name.removeprefix(kind + '.')}", text_of(path)) for path in paths]


def samples(kind: str) -> list[Sample]:
    return real_samples(kind) + own_samples(kind)


def every_sample() -> list[Sample]:
    return [sample for kind in KINDS for sample in samples(kind)]


def read(kind: str, text: str) -> Reading:
    """As `toolkit parse` reads; another error than a refusal goes on."""
    reader, keys = reader_of(kind)
    try:
        facts, warnings = reader(text)
    except CheckFailedError as error:
        assert error.where.startswith("line "), error
        return Reading(None, (f"{error.where}: {error.message}",))
    assert isinstance(warnings, tuple)
    answer = {key: facts[key] for key in keys}
    assert json.loads(json.dumps(answer)) == answer, "the answer is not what JSON holds"
    return Reading(answer, warnings)


def is_structural(sample: Sample, whole: Reading, mutation: Mutation, now: Reading) -> bool:
    """Whether a reader must notice: the answer is another one, or a rule of every format is broken.

    No accident is structural that leaves a text that the command might have printed: only blanks differ, a value became
    another one of the same form, or `rules.VALID` finds it valid. Rules of every format: a text does not end
    within a line, and a line that says something does not stand there twice.
    """
    if mutation.same_text(sample.text) or mutation.same_form:
        return False
    if any(is_valid(mutation.text, sample.text) for is_valid in VALID.get(sample.kind, ())):
        return False
    if now.answer != whole.answer or mutation.mid_line:
        return True
    return mutation.name == "line duplicated" and _says_something(sample, whole, mutation.touched[0])


def _says_something(sample: Sample, whole: Reading, line: int) -> bool:
    lines = sample.text.split("\n")
    return read(sample.kind, "\n".join(lines[:line] + lines[line + 1 :])).answer != whole.answer
