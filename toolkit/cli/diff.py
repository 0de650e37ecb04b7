"""`toolkit diff`: compare two runs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from toolkit.cli.options import RUN, json_option, print_command_option, runs_option
from toolkit.runs.named_runs import find

if TYPE_CHECKING:
    from toolkit.runs.compare import Comparison, Row

_LONGEST = 60  # maximum characters of a value in a line; --json prints it in full


@click.command()
@click.argument("a", type=RUN)
@click.argument("b", type=RUN)
@runs_option
@json_option
@print_command_option
@click.option("--code", "with_code", is_flag=True, help="Print only the differing lines of code, as `diff -u` does.")
def diff(a: str, b: str, runs: Path | None, as_json: bool, with_code: bool) -> None:
    """Compare the runs A and B: configuration, code, versions and results.

    \b
    toolkit diff 20261120-142233-9f3a last
    toolkit diff last_3 last_4
    """
    from toolkit.runs.compare import changed_lines, compare_runs, job_of
    from toolkit.terminal.talk import clean

    one, other = find(a, runs), find(b, runs)
    if with_code:
        lines = list(changed_lines(job_of(one), job_of(other)))
        for line in lines:
            click.echo(clean(line))
        if not lines:
            click.echo("the code is the same", err=True)
        return
    found = compare_runs(one, other)
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=1))
    else:
        for line in _lines(found):
            click.echo(clean(line))


def _lines(found: Comparison) -> Iterable[str]:
    yield f"a: {found.a}"
    yield f"b: {found.b}"
    sections = {
        "configuration": found.configuration, "code": found.code, "versions": found.versions, "result": found.result,
    }  # fmt: skip
    for name, rows in sections.items():
        yield f"\n{name}: the same" if not rows else f"\n{name}"
        table = [(row.key, *_sides(row, is_file=name == "code")) for row in rows]
        widths = [max((len(line[column]) for line in table), default=0) for column in (0, 1)]
        for key, was, is_now in table:
            yield f"  {key:<{widths[0]}}  {was:<{widths[1]}}  {is_now}".rstrip()


def _sides(row: Row, *, is_file: bool) -> tuple[str, str]:
    cells = []
    for value, origin in ((row.a, row.origin_a), (row.b, row.origin_b)):
        text = "-" if value is None else _text(value)
        text = text[:12] if is_file else text  # of a digest or commit, the start is enough
        text = text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
        cells.append(f"{text} ({origin})" if origin else text)
    return cells[0], cells[1]


def _text(value: Any) -> str:
    from toolkit.config.resolved import as_json

    return value if isinstance(value, str) else as_json(value)
