"""Read grid files, which contain the values of the tasks of a sweep as TOML, CSV or JSON lines."""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from toolkit.config.document import Document, Flag, leaves, read_document
from toolkit.errors import NotFoundError, ToolkitError
from toolkit.rundir.files import json_reason
from toolkit.submission.sweep.rows import Row, check_key, check_keys, product, read_value, refuse_twice

__all__ = ["read_grid"]

FORMS = "a TOML (.toml), CSV (.csv) or JSON lines (.jsonl) file"
_ROWS = "task"  # the name of the tables `[[task]]` in a TOML file


def read_grid(path: Path) -> list[Row]:
    """Return the rows of a grid file.

    A TOML file has lists, whose combinations are the tasks, or one `[[task]]` per task. A CSV file has the keys in
    its first line, and an empty cell keeps the value of the job. A JSON lines file has one object per task.

    Raises:
        ToolkitError: the file, a key or a value is invalid; the error names the line.
        NotFoundError: the file does not exist.
    """
    readers = {".toml": _read_toml, ".csv": _read_csv, ".jsonl": _read_json_lines}
    if path.suffix not in readers:
        raise ToolkitError(
            f"expected a grid file, got the suffix {path.suffix!r}", where=f"--grid {path}", fix=f"pass {FORMS}"
        )
    rows = readers[path.suffix](path)
    if not rows:
        raise ToolkitError("expected at least one task, got none", where=str(path), fix="add the values of a task")
    return rows


def _read_toml(path: Path) -> list[Row]:
    document = read_document(path)
    tasks = document.values.get(_ROWS)
    if tasks is None:
        return _product_of(document)
    if set(document.values) != {_ROWS} or not isinstance(tasks, list):
        raise ToolkitError(
            "expected only [[task]] tables or only lists, got both", where=document.place((_ROWS,)),
            fix="write either a [[task]] for each task, or lists whose combinations are the tasks",
        )  # fmt: skip
    return [_row_of(task, f"{path}, [[task]] {number}") for number, task in enumerate(tasks)]


def _product_of(document: Document) -> list[Row]:
    factors = []
    for key_path, values in leaves(document.values):
        key, where = ".".join(key_path), document.place(key_path)
        check_key(key, where=f"{where}:{key}")
        if not isinstance(values, list) or not values:
            raise ToolkitError(
                f"expected a list of values, got {values!r}",
                where=f"{where}:{key}",
                fix=f"write {key_path[-1]} = [V1, V2]",
            )
        refuse_twice(values, where=f"{where}:{key}")
        factors.append([{key: Flag(value, where)} for value in values])
    check_keys([key for factor in factors for key in factor[0]], where=str(document.path))
    return product(factors, where=str(document.path)) if factors else []


def _row_of(values: Any, where: str) -> Row:
    """Return the values of one task; the keys of an inner table become dotted keys."""
    if not isinstance(values, dict) or not values:
        raise ToolkitError("task without values", where=where, fix='write "table.key" and its value, or omit the task')
    named: list[tuple[str, Any]] = []
    for name, value in values.items():
        if "." in name:  # a dotted key such as "train.lr", as in JSON and CSV
            named.append((name, value))
        else:
            named += [(".".join(path), inner) for path, inner in leaves({name: value})]
    for key, _ in named:
        if "." not in key:
            raise ToolkitError(f"expected table.key, got {key!r}", where=where, fix=f"write train.{key} or args.{key}")
        if not all(key.split(".")):
            raise ToolkitError(
                f"expected table.key, got {key!r}", where=where, fix="write a table and a key, such as train.lr"
            )
        check_key(key, where=f"{where}:{key}")
    check_keys([key for key, _ in named], where=where)
    return {key: Flag(value, where) for key, value in named}


def _read_csv(path: Path) -> list[Row]:
    lines = csv.reader(io.StringIO(_text_of(path), newline=""), strict=True)
    try:
        return list(_csv_rows(lines, path))
    except csv.Error as error:
        raise ToolkitError(
            f"not valid CSV: {error}", where=f"{path}:{lines.line_num}", fix="close the quotes on that line"
        ) from error


def _csv_rows(lines: Any, path: Path) -> Iterator[Row]:
    keys: Sequence[str] = [name.strip() for name in next(lines, [])]
    for key in keys:
        if "." not in key or not all(key.split(".")):
            raise ToolkitError(
                f"expected table.key, got {key!r}",
                where=f"{path}:1",
                fix="write a key above each column, such as train.lr",
            )
        check_key(key, where=f"{path}:1:{key}")
    check_keys(keys, where=f"{path}:1")
    for cells in lines:
        if not cells:
            continue
        where = f"{path}:{lines.line_num}"
        if len(cells) != len(keys):
            raise ToolkitError(
                f"expected {len(keys)} cells, one per key in the first line, got {len(cells)}", where=where,
                fix='write a cell for each key; quote a cell that contains a comma: "[1,2]"',
            )  # fmt: skip
        given = {key: cell.strip() for key, cell in zip(keys, cells, strict=True) if cell.strip()}
        yield {key: Flag(read_value(key, cell, where=where), where) for key, cell in given.items()}


def _read_json_lines(path: Path) -> list[Row]:
    rows = []
    for number, line in enumerate(_text_of(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line, object_pairs_hook=_once)
        except (ValueError, RecursionError) as error:
            raise ToolkitError(
                f"not valid JSON: {json_reason(error)}", where=f"{path}:{number}", fix="correct that line"
            ) from error
        rows.append(_row_of(values, f"{path}:{number}"))
    return rows


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dictionary; refuse duplicate keys, of which json silently keeps the last."""
    names = [name for name, _ in pairs]
    if len(names) > len(found := dict(pairs)):
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return found


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise NotFoundError("no such file", where=str(path), fix=f"pass {FORMS}") from error
    except OSError as error:
        raise ToolkitError(f"cannot be read: {error.strerror}", where=str(path), fix="pass a readable file") from error
    except UnicodeDecodeError as error:
        raise ToolkitError("expected UTF-8", where=str(path), fix="save the file as UTF-8") from error
