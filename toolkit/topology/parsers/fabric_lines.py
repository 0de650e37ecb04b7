"""The lines of an output of a fabric command, without what terminals, logs and mails put around them.

What stands before each line is told by the lines that only the command prints: a name and a colon alone may be a part of
the text here (0000:1a:00.0 of `ibdev2netdev -v`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from toolkit.errors import CheckFailedError

_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]")
# The prompt at which the command was given.
_PROMPT = re.compile(r"(\[[^\]]*\]|[\w.@:~/-]+)?[$#%>] \S.*")


@dataclass(frozen=True)
class Line:
    """One line that is not blank; `cut` is the last one when no line end stands behind it."""

    number: int
    text: str
    cut: bool


def read_lines(
    text: str, evidence: re.Pattern[str], command: str, warnings: list[str], *, prompts: bool = True
) -> list[Line]:
    """The lines with something on them, without blanks around them.

    `evidence` matches lines that only this command prints. What stands before such a line on most lines (a host's name,
    a time, the mark of a quotation) is taken off; digits may differ. `prompts`: lines that look like one are dropped.

    Raises:
        CheckFailedError: no line is the command's.
    """
    raw = _ESCAPE.sub("", text).replace("\r\n", "\n").replace("\r", "\n" if "\n" not in text else "").split("\n")
    numbered = [(number, line.strip()) for number, line in enumerate(raw, 1) if line.strip()]
    if not numbered:
        raise CheckFailedError(f"nothing that {command} prints: the text is empty", where="line 1")
    numbered = _without_prefix(numbered, evidence)
    if not any(evidence.match(line) for _, line in numbered):
        raise CheckFailedError(f"not what {command} prints: {numbered[0][1][:60]!r}", where=f"line {numbered[0][0]}")
    if raw[-1]:
        warnings.append(f"line {len(raw)}: has no line end, so that it may be cut: {raw[-1].strip()[-60:]!r}")
    return [
        Line(number, line, number == len(raw))
        for number, line in numbered
        if line and not (prompts and _PROMPT.fullmatch(line))
    ]


def strange(line: Line, of: str) -> str:
    """The warning for a line that is nothing of the format."""
    return f"line {line.number}: not part of {of}: {line.text[:60]!r}"


def _without_prefix(numbered: list[tuple[int, str]], evidence: re.Pattern[str]) -> list[tuple[int, str]]:
    found = next((match for _, line in numbered if (match := evidence.search(line))), None)
    said = found.string[: found.start()].rstrip() if found else ""
    if not said:
        return numbered
    prefix = re.compile(re.sub(r"[0-9]+", "[0-9]+", re.escape(said)))
    if 2 * sum(bool(prefix.match(line)) for _, line in numbered) <= len(numbered):
        return numbered  # it stands before one line by chance
    return [
        (number, prefix.sub("", line, count=1).strip() if prefix.match(line) else line) for number, line in numbered
    ]
