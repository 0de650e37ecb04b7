"""The tables that squeue, sacct and sinfo print, whatever columns and delimiter they were asked for.

A table is delimited (`--parsable`, `-o "%i|%T"`, a delimiter of several letters) or has columns of fixed width. A row
that does not fit its header keeps its line and loses its cells: nothing is read from a column that cannot be told.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from toolkit.errors import CheckFailedError
from toolkit.slurm.fixed_width import cut_rows
from toolkit.slurm.table_damage import beside_header, cut_end, printed_twice, second_headers

DELIMITERS = ("|#", "\x1f", "\x1e", "|", "\t", ";", "^", "!", "~", ",")
ONE_WORD = re.compile(r"\S+")
COUNT = re.compile(r"[0-9.]+[KMG]?(-[0-9.]+[KMG]?)?", re.ASCII)
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_():/%.+* -]*")
_NO_NAME = re.compile(r"[^A-Za-z0-9_():/%.+* -]+")
# What stands around a table: the time above the long forms, the name of a cluster, and before it the prompt at which the
# command was given.
_TIME = re.compile(
    r"(Mon|Tue|Wed|Thu|Fri|Sat|Sun) [A-Z][a-z]{2} [ 0-9]\d \d\d:\d\d:\d\d( [A-Z]{3,4})? \d{4}\s*", re.ASCII
)
_CLUSTER = re.compile(r"CLUSTER: \S+\s*")  # above the table of each one, with -M
_PROMPT = re.compile(r"\S*[$#%>] .*")
_UNTOLD = "its columns cannot be told apart; nothing is read from it"


@dataclass(frozen=True)
class Row:
    """One record: the line where it begins, from 1, and its cells by column; None where they cannot be told apart."""

    line: int
    cells: tuple[str, ...] | None


@dataclass(frozen=True)
class Table:
    """A table as it was printed.

    `columns` are the names of the header without blanks around them, None where no header was printed. `uneven` are
    the lines whose number of delimiters is not the header's, counted from 0.
    """

    columns: tuple[str, ...] | None
    rows: tuple[Row, ...]
    lines: int
    uneven: tuple[int, ...]
    warnings: tuple[str, ...]

    def cell(self, row: Row, *names: str) -> str | None:
        """The cell under the first of some column names that was printed; of two columns of a name, the first."""
        if self.columns is None or row.cells is None:
            return None
        name = next((name for name in names if name in self.columns), None)
        return None if name is None else row.cells[self.columns.index(name)]

    def has_slipped(self, row: Row, forms: Mapping[str, re.Pattern[str]]) -> bool:
        """Whether a cell has not the form of its column, so that the cells of the row are not its own."""
        cells = ((self.cell(row, name), form) for name, form in forms.items())
        return any(cell and not form.fullmatch(cell) for cell, form in cells)


def lines_of(text: str) -> list[str]:
    """Lines as a terminal shows them: `str.splitlines` would also break at separators that stand in names."""
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return lines[:-1] if lines[-1] == "" else lines


def read_table(
    text: str,
    known: Collection[str],
    command: str,
    *,
    unique: Collection[str],
    several_lines: bool = False,
    key: re.Pattern[str] | None = None,
) -> Table:
    """Read a table whose header holds at least one of the `known` column names, as Slurm writes them.

    `several_lines`: a field may hold line ends, so that a record may be printed on several lines. `key`: what each row
    begins with, by which rows without a header are known. `unique`: no two rows are alike where one of these columns is
    printed.

    Raises:
        CheckFailedError: no line of it looks like a table.
    """
    table, header = _found(text, known, command, several_lines=several_lines, key=key)
    lines = lines_of(text)
    warnings = [*table.warnings, *second_headers(lines, header, _is_heading)] if header else [*table.warnings]
    if table.columns is None or set(unique) & {name.upper() for name in table.columns}:
        warnings += printed_twice(lines, [row.line for row in table.rows])
    return replace(table, warnings=(*sorted(warnings, key=_line_of), *cut_end(text)))


def _line_of(warning: str) -> int:
    return int(warning.removeprefix("line ").partition(":")[0])


def _found(
    text: str, known: Collection[str], command: str, *, several_lines: bool, key: re.Pattern[str] | None
) -> tuple[Table, str]:
    """The table and its header, "" where none is printed."""
    lines = lines_of(text)
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise CheckFailedError(f"nothing that {command} prints: the text is empty", where="line 1")
    for place, (number, line) in enumerate(numbered):
        delimiter = _delimiter(line, known)
        if delimiter is not None or _is_header(line.split(), known):
            before = [entry for entry in numbered[:place] if not _is_heading(entry[1])]
            strange = [entry for entry in before if not _PROMPT.fullmatch(entry[1])]
            warnings = [f"line {at}: not part of the table: {said[:60]!r}" for at, said in strange]
            body = list(enumerate(lines[number:], number + 1)) if several_lines else numbered[place + 1 :]
            body = [entry for entry in body if not _is_heading(entry[1])]
            if delimiter is None:
                return _fixed(line, body, len(lines), warnings, key), line
            body = [entry for entry in body if entry[1].strip() != line.strip()]
            return _delimited(line, delimiter, body, len(lines), warnings, join=several_lines), line
    return _without_header(numbered, len(lines), command, key), ""


def chosen(
    table: Table,
    row: Row,
    columns: Mapping[str, Sequence[str]],
    forms: Mapping[str, re.Pattern[str]],
    warnings: list[str],
) -> dict[str, str | None]:
    """The cells of a row under `columns`, which names them by key: all None, and a warning, where the row has slipped."""
    if table.has_slipped(row, forms):
        warnings.append(f"line {row.line}: {_UNTOLD}")
        row = Row(row.line, None)
    return {key: table.cell(row, *names) for key, names in columns.items()}


def _is_heading(line: str) -> bool:
    return bool(_TIME.fullmatch(line) or _CLUSTER.fullmatch(line))


def _is_header(cells: Sequence[str], known: Collection[str]) -> bool:
    return any(cell in known for cell in cells) and all(_NAME.fullmatch(cell) for cell in cells)


def _delimiter(line: str, known: Collection[str]) -> str | None:
    """What divides the names of a header line; None where it is no delimited header."""
    of_its_own = set(_NO_NAME.findall(line))  # `--delimiter=@@`, `-o "%i||%T"`
    for mark in (*of_its_own, *DELIMITERS) if len(of_its_own) == 1 else DELIMITERS:
        if mark in line and _is_header(_split(line, mark), known):
            return mark
    return None


def _split(line: str, mark: str) -> list[str]:
    """The names of a header; `--parsable` also ends each line with the delimiter."""
    cells = [cell.strip() for cell in line.split(mark)]
    return cells[:-1] if len(cells) > 1 and cells[-1] == "" else cells


def _delimited(
    header: str, mark: str, body: list[tuple[int, str]], lines: int, warnings: list[str], *, join: bool
) -> Table:
    columns, fields = tuple(_split(header, mark)), header.count(mark) + 1
    uneven: list[int] = []
    rows: list[Row] = []
    while body:
        number, text = body[0]
        if not text.strip():
            body = body[1:]
            continue
        used = _lines_of_record(body, mark, fields) if join else 1
        text = "\n".join(line for _, line in body[:used])
        if used > 1 or text.count(mark) + 1 != fields:
            uneven += [at - 1 for at, _ in body[:used]]
        cells = tuple(cell.strip() for cell in text.split(mark)) if text.count(mark) + 1 == fields else None
        if cells is None:
            count = text.count(mark) + 1
            warnings.append(f"line {number}: {count} fields under {fields} columns; nothing is read from it")
        rows.append(Row(number, cells and cells[: len(columns)]))
        body = body[used:]
    return Table(columns, tuple(rows), lines, tuple(uneven), tuple(warnings))


def _lines_of_record(body: list[tuple[int, str]], mark: str, fields: int) -> int:
    """On how many lines the first record stands: a line end in a field continues it, a line that was cut does not."""
    marks = body[0][1].count(mark)
    for used, (_, line) in enumerate(body[1:], 2):
        if marks + 1 >= fields or line.count(mark) + 1 >= fields:
            break  # whole already, or the next line is whole by itself
        marks += line.count(mark)
        if marks + 1 == fields:
            return used
    return 1


def _fixed(
    header: str, body: list[tuple[int, str]], lines: int, warnings: list[str], key: re.Pattern[str] | None
) -> Table:
    rows: list[Row] = []
    for line, section in _sections(header, body):
        cut = cut_rows(line, [text for _, text in section], key=key)
        rows += [Row(number, cells) for (number, _), cells in zip(section, cut, strict=True) if cells != ()]
        whole = zip(section, cut, strict=True)
        warnings += beside_header(line, [(number, text, cells) for (number, text), cells in whole if cells])
    rows.sort(key=lambda row: row.line)
    warnings += [f"line {row.line}: {_UNTOLD}" for row in rows if row.cells is None]
    return Table(tuple(header.split()), tuple(rows), lines, (), tuple(warnings))


def _sections(header: str, body: list[tuple[int, str]]) -> list[tuple[str, list[tuple[int, str]]]]:
    """The rows below each header; one that is printed again, for another cluster, may have other widths."""
    sections: dict[str, list[tuple[int, str]]] = {header.rstrip(): []}
    names = header.split()
    here = sections[header.rstrip()]
    for number, text in body:
        if text.split() == names:
            here = sections.setdefault(text.rstrip(), [])
        else:
            here.append((number, text))
    return list(sections.items())


def _without_header(numbered: list[tuple[int, str]], lines: int, command: str, key: re.Pattern[str] | None) -> Table:
    """Rows of which nobody can say what their columns mean; a job's own words are not taken for one."""
    first = numbered[0][1]
    mark = next((mark for mark in DELIMITERS if first.count(mark) >= 2), None)
    widths = {len(text.split(mark)) for _, text in numbered}
    keyed = key is not None and all(key.fullmatch(text.split()[0]) for _, text in numbered)
    if not keyed and (mark is None or len(widths) > 1):
        raise CheckFailedError(f"not what {command} prints: {first[:60]!r}", where=f"line {numbered[0][0]}")
    warning = f"line {numbered[0][0]}: no header, so that no column's meaning is known"
    return Table(None, tuple(Row(number, None) for number, _ in numbered), lines, (), (warning,))
