"""Lines of a command's output that say something; a last one that may be cut is left out."""

from __future__ import annotations

from toolkit.topology.parsers.lines import Line, lines_of

__all__ = ["Line", "read_lines", "read_lines_with_hosts"]


def read_lines(text: str) -> tuple[list[Line], list[str]]:
    """The lines that are not blank, without what stands behind them, and warnings.

    A last line without a line end may be cut anywhere, in a number, too: it is named and left out.
    """
    lines, warnings = lines_of(text)
    whole = lines[:-1] if warnings else lines
    return [Line(line.number, line.text.rstrip()) for line in whole if line.text.strip()], list(warnings)


def read_lines_with_hosts(text: str) -> tuple[list[Line], list[str]]:
    """As `read_lines`, but what stands before every line is kept: a log says there which process wrote it."""
    pieces = text.split("\n")
    last, warnings = lines_of(pieces[-1])
    lines = [
        Line(number, " ".join(line.text for line in lines_of(piece)[0]).rstrip())
        for number, piece in enumerate(pieces[:-1], 1)
    ]
    cut = [warning.replace("line 1:", f"line {len(pieces)}:", 1) for warning in warnings if last]
    return [line for line in lines if line.text.strip()], cut
