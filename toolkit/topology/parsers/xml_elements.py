"""Read XML of which nothing is trusted: no entities, nothing from outside, no file that fills the memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn
from xml.parsers import expat

from toolkit.errors import CheckFailedError

LARGEST_LETTERS = 64 * 2**20  # the XML of a host with thousands of processors has a few
LARGEST_DEPTH = 256


@dataclass(frozen=True)
class Element:
    """One element; `parent` is the place of the one around it among all of them, None for the root."""

    line: int
    name: str
    attributes: Mapping[str, str]
    parent: int | None


@dataclass(frozen=True)
class Document:
    """Elements in their order. `whole` is False where the text is no well-formed XML: its end is then not read."""

    elements: tuple[Element, ...]
    whole: bool


def read_xml(text: str, kind: str, doctypes: Mapping[str, str], warnings: list[str]) -> Document:
    """The elements of a text; where it is damaged, those before the place, which is added to the warnings.

    `doctypes` are the names of a DOCTYPE that may stand there, and how its address begins. None is ever fetched.

    Raises:
        CheckFailedError: it declares entities or another DOCTYPE, or is far too large or deep.
    """
    if len(text) > LARGEST_LETTERS:
        raise CheckFailedError(f"{len(text)} letters are far more than {kind} has", where="line 1")
    parser = expat.ParserCreate("utf-8")  # whatever its first line says: it is decoded already
    elements: list[Element] = []
    open_places: list[int] = []

    def refuse(what: str) -> CheckFailedError:
        return CheckFailedError(f"it {what}, which {kind} never does", where=f"line {parser.CurrentLineNumber}")

    def doctype(name: str, system: str | None, public: str | None, inside: int) -> None:
        begin = doctypes.get(name)
        if begin is None or public or inside or not (system or "").startswith(begin):
            raise refuse("has a DOCTYPE of its own")

    def start(name: str, attributes: dict[str, str]) -> None:
        if len(open_places) >= LARGEST_DEPTH:
            raise refuse(f"nests more than {LARGEST_DEPTH} elements")
        parent = open_places[-1] if open_places else None
        open_places.append(len(elements))
        elements.append(Element(parser.CurrentLineNumber, name, attributes, parent))

    def refuse_entity(*_: Any) -> NoReturn:
        raise refuse("declares or names an entity")

    parser.StartDoctypeDeclHandler = doctype
    parser.EntityDeclHandler = refuse_entity
    parser.SkippedEntityHandler = refuse_entity
    parser.ExternalEntityRefHandler = refuse_entity
    parser.StartElementHandler = start
    parser.EndElementHandler = lambda name: open_places.pop()
    whole = True
    try:
        parser.Parse(text.encode("utf-8", errors="replace"), True)
    except expat.ExpatError as error:
        whole = False
        warnings.append(f"line {error.lineno}: no well-formed XML: {expat.ErrorString(error.code)}")
    _name_joined_lines(text, warnings)
    return Document(tuple(elements), whole)


def _name_joined_lines(text: str, warnings: list[str]) -> None:
    """Name lines with two tags where nearly all have one, as the programs write them: something joined them."""
    tags = {number: line.count("<") for number, line in enumerate(text.split("\n"), 1) if "<" in line}
    several = [number for number, count in tags.items() if count > 1]
    if len(several) <= max(1, len(tags) // 10):
        warnings.extend(f"line {number}: {tags[number]} tags, where each other line has one" for number in several)
