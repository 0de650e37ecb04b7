"""Lines of a command's output that say something; a last one that may be cut is left out."""

from __future__ import annotations

from toolkit.topology.parsers.lines import Line, lines_of

__all__ = ["Line", "read_lines"]


def read_lines(text: str) -> tuple[list[Line], list[str]]:
    """The lines that are not blank, without what stands behind them, and warnings.

    A last line without a line end may be cut anywhere, in a number, too: it is named and left out.
    """
    lines, warnings = lines_of(text)
    whole = lines[:-1] if warnings else lines
    return [Line(line.number, line.text.rstrip()) for line in whole if line.text.strip()], list(warnings)
