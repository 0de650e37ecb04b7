"""Read `nvidia-smi --query-gpu=... --format=csv`: one row for each GPU, one column for each field that was asked for.

Nothing is quoted there: cells are divided by ", ". Damage shows in the number of cells, and in cells that are unlike
what their field holds or unlike the same cell of other rows.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from toolkit.errors import CheckFailedError
from toolkit.topology.parsers.gpu_names import odd_names
from toolkit.topology.parsers.lines import Line, lines_of
from toolkit.topology.parsers.query_fields import FIELDS, fits, form_of, like_a_field, nearest_field

KEYS = {
    "columns": 'the header\'s fields, as printed, with their unit ("memory.total [MiB]"); null without a header',
    "gpu_count": "how many rows are printed; of a repeated query (-l) how many GPUs they name",
    "rows": "each of them, its cells as printed; null where the row has not as many cells as the header; a cell that "
    "is cut, or cannot be what its field holds, is null",
}
_SEPARATOR = re.compile(r", ?")
_FAILURE = re.compile(
    r"NVIDIA-SMI has failed|Failed to initialize NVML|Unable to determine the device handle|Field \".*\" is not"
)
_NO_DEVICES = re.compile(r"No devices were found\.?", re.IGNORECASE)
_OF_A_GPU = re.compile(r"(?:NVIDIA|Tesla|GeForce|Quadro|TITAN|GRID) |[AHL][0-9]{1,4}-|[0-9.]+ (?:MiB|W|MHz)$")
_WHOLE = ("uuid", "bus id")  # forms that no cut of theirs has
_IDENTITIES = ("index", "uuid", "gpu_uuid", "pci.bus_id", "gpu_bus_id", "serial", "gpu_serial", "minor_number")
_NOT_TOLD = re.compile(
    r"\[?(?:N/A|Not Supported|Unknown Error|GPU requires reset|Insufficient Permissions|GPU is lost)\]?|ERR!"
)
_FORMS = tuple(
    re.compile(form)
    for form in (
        r"-?[0-9]+",
        r"-?[0-9]+\.[0-9]+",
        r"-?[0-9.]+ [A-Za-z%/]+",
        r"[0-9]+(?:\.[0-9]+)+",
        r"0x[0-9A-Fa-f]+",
        r"P[0-9]+",
        r"Enabled|Disabled|Active|Not Active|Yes|No|Default|Exclusive_Process|Prohibited|None|Completed",
    )
)


@dataclass(frozen=True)
class QueryTable:
    """`columns` as printed, None without a header; `rows[i]` None where the row's cells cannot be told apart."""

    columns: tuple[str, ...] | None
    rows: tuple[tuple[str | None, ...] | None, ...]
    gpu_count: int


def parse_nvidia_smi_query(text: str) -> tuple[QueryTable, tuple[str, ...]]:
    """Read the whole output, also with nounits and noheader: (table, warnings that name the damaged lines).

    Raises:
        CheckFailedError: it is no table of this command.
    """
    lines, warnings = lines_of(text)
    said = list(warnings)
    printed = [line for line in lines if line.text.strip()]
    if printed and all(_NO_DEVICES.fullmatch(line.text.strip()) for line in printed):
        return QueryTable(None, (), 0), warnings
    place = next((i for i, line in enumerate(printed) if _is_header(line.text)), None)
    if place is None:
        return _without_header(printed, said)
    columns = tuple(_SEPARATOR.split(printed[place].text.strip()))
    said += [f"line {line.number}: before the header: {line.text.strip()[:60]!r}" for line in printed[:place]]
    said += [f"line {printed[place].number}: {problem}" for problem in _problems_of(columns)]
    body = printed[place + 1 :]
    if any(", " in line.text for line in printed[place:]):
        said += [
            f"line {line.number}: a comma without a blank" for line in printed[place:] if re.search(",(?! )", line.text)
        ]
    if not body:
        said.append(f"line {printed[place].number}: a header without rows")
    rows: list[tuple[Line, list[str | None] | None]] = []
    for line in body:
        if line.text.strip() == printed[place].text.strip():
            said.append(f"line {line.number}: the header a second time")
            continue
        cells = _SEPARATOR.split(line.text.strip())
        if len(cells) != len(columns):
            said.append(f"line {line.number}: {len(cells)} cells under {len(columns)} columns")
            rows.append((line, None))
        else:
            rows.append((line, list(cells)))
    if warnings and rows and (last := rows[-1][1]) and not _whole_at_the_end(columns[-1], last[-1] or ""):
        last[-1] = None
    _check_cells(columns, rows, said)
    count = _count(columns, rows, said)
    return QueryTable(columns, tuple(None if cells is None else tuple(cells) for _, cells in rows), count), tuple(said)


def answer_nvidia_smi_query(text: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The facts of an output: (values of `KEYS`, warnings that name the damaged lines).

    Raises:
        CheckFailedError: it is no table of this command.
    """
    table, warnings = parse_nvidia_smi_query(text)
    return {
        "columns": None if table.columns is None else list(table.columns),
        "gpu_count": table.gpu_count,
        "rows": [None if row is None else list(row) for row in table.rows],
    }, warnings


def _is_header(text: str) -> bool:
    cells = _SEPARATOR.split(text.strip())
    fields = [cell for cell in cells if like_a_field(cell)]
    return any(cell.split(" [")[0] in FIELDS for cell in cells) and len(fields) * 2 > len(cells)


def _problems_of(columns: tuple[str, ...]) -> list[str]:
    found = []
    for column in columns:
        name = column.split(" [")[0]
        if not like_a_field(column):
            found.append(f"{column[:60]!r} is no name of a field")
        elif name not in FIELDS and (near := nearest_field(name)):
            found.append(f"{name[:60]!r} is no field that is known, and may be a damaged {near!r}")
        elif FIELDS.get(name) and " [" in column and column != f"{name} [{FIELDS[name]}]":
            found.append(f"{column[:60]!r}: {name} is told in {FIELDS[name]}")
    return [*found, *(f"{name[:60]!r} stands there twice" for name, times in Counter(columns).items() if times > 1)]


def _without_header(printed: list[Line], said: list[str]) -> tuple[QueryTable, tuple[str, ...]]:
    """Rows alone, as `noheader` prints them."""
    cells = [_SEPARATOR.split(line.text.strip()) for line in printed]
    shown = printed[0] if printed else Line(1, "")
    every = [cell for row in cells for cell in row]
    known = any(_OF_A_GPU.match(cell) or form_of(cell) in _WHOLE for cell in every) or all(map(str.isdigit, every))
    if not every or not known or any(_FAILURE.match(line.text.strip()) for line in printed):
        raise CheckFailedError(
            f"no header of fields, and no row of a GPU: {shown.text.strip()[:60]!r}", where=f"line {shown.number}"
        )
    said.append(f"line {shown.number}: no header, so that nobody can tell what the columns are")
    width = Counter(len(row) for row in cells).most_common(1)[0][0]
    for line, row in zip(printed, cells, strict=True):
        if len(row) != width:
            said.append(f"line {line.number}: {len(row)} cells, other rows have {width}")
    rows = tuple(tuple(row) if len(row) == width else None for row in cells)
    return QueryTable(None, rows, len(rows)), tuple(said)


def _whole_at_the_end(column: str, cell: str) -> bool:
    """Whether a cell that nothing follows is known to be whole: a unit ends it, or it has its field's full length."""
    unit = re.fullmatch(r".* \[(.+)\]", column)
    return bool(_NOT_TOLD.fullmatch(cell) or (unit and cell.endswith(f" {unit[1]}")) or form_of(cell) in _WHOLE)


def _check_cells(columns: tuple[str, ...], rows: list[tuple[Line, list[str | None] | None]], said: list[str]) -> None:
    """Cells that cannot be what their field holds lose their value; those unlike the other rows' are named."""
    for place, column in enumerate(columns):
        name = column.split(" [")[0]
        cells = [(line, row, row[place] or "") for line, row in rows if row is not None and row[place] is not None]
        told = [(line, row, cell) for line, row, cell in cells if not _NOT_TOLD.fullmatch(cell)]
        unit = re.fullmatch(r".* \[(.+)\]", column)
        with_units = Counter(bool(unit and cell.endswith(f" {unit[1]}")) for *_, cell in told)
        for line, row, cell in told:
            wrong = not cell or not fits(name, cell)
            lacks_unit = unit and with_units[True] and not cell.endswith(f" {unit[1]}")
            if wrong or lacks_unit or (unit and not re.match(r"-?[0-9]+(?:\.[0-9]+)?(?: |$)", cell)):
                said.append(f"line {line.number}: {cell[:60]!r} cannot be {column}")
                row[place] = None
        forms = Counter(_form(cell) for *_, cell in told)
        usual, times = forms.most_common(1)[0] if forms else (None, 0)
        said += [
            f"line {line.number}: {cell[:60]!r} is unlike the other rows' {column}"
            for line, _, cell in told
            if _form(cell) != usual and times > 1
        ]
        if name in ("name", "gpu_name"):
            odd = odd_names(cell for *_, cell in told)
            said += [f"line {line.number}: {odd[cell]}" for line, _, cell in told if cell in odd]
        elif name in ("driver_version", "count"):
            values = Counter(cell for *_, cell in told)
            usual_value = values.most_common(1)[0][0] if values else ""
            said += [
                f"line {line.number}: {column} {cell[:60]!r}, other rows say {usual_value[:60]!r}"
                for line, _, cell in told
                if cell != usual_value
            ]


def _form(cell: str) -> int:
    return next((number for number, form in enumerate(_FORMS) if form.fullmatch(cell)), len(_FORMS))


def _count(columns: tuple[str, ...], rows: list[tuple[Line, list[str | None] | None]], said: list[str]) -> int:
    """How many GPUs the rows name: a GPU that two rows name is one."""
    places = [place for place, column in enumerate(columns) if column in _IDENTITIES]
    again: set[int] = set()
    for place in places:
        first: dict[str, int] = {}
        for line, row in rows:
            cell = row[place] if row else None
            if cell is None or _NOT_TOLD.fullmatch(cell):
                continue
            if cell in first:
                said.append(
                    f"line {line.number}: {columns[place]} {cell[:60]!r} a second time, also in line {first[cell]}"
                )
                again.add(line.number)
            first.setdefault(cell, line.number)
    indices = [int(row[columns.index("index")] or -1) for _, row in rows if row and "index" in columns and
               re.fullmatch("[0-9]{1,4}", row[columns.index("index")] or "")]  # fmt: skip
    if indices and indices[0]:
        said.append(f"line {rows[0][0].number}: the index begins at {indices[0]}: -i was given, or rows are lost")
    if indices != sorted(indices) or any(b - a > 1 for a, b in pairwise(indices)):
        said.append(f"line {rows[0][0].number}: the index runs {indices[:20]}, not one by one")
    if "count" in columns:
        counts = {row[columns.index("count")] for _, row in rows if row}
        if (
            len(counts) == 1
            and (told := counts.pop())
            and re.fullmatch("[0-9]{1,4}", told)
            and int(told) != len(rows) - len(again)
        ):
            said.append(f"line {rows[0][0].number}: {told} GPUs by the column count, {len(rows) - len(again)} rows")
    return len(rows) - len(again)
