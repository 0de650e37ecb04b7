"""`toolkit config`: the resolved values of a job with their origins, and the schemas of job and site files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import click

from toolkit.cli.options import JOB, SITE, print_command_option, request_of
from toolkit.terminal.talk import say

if TYPE_CHECKING:
    from toolkit.config.document import Origin


@click.group()
def config() -> None:
    """Show the resolved configuration and its schema.

    \b
    toolkit config show train_lm --site local
    """


@config.command()
@click.argument("job", type=JOB, required=False)
@click.option("--site", type=SITE, help="Site name or file.  [default: TOOLKIT_SITE, else detected]")
@click.option("--set", "settings", multiple=True, metavar="TABLE.KEY=VALUE", help="Set one value; may be repeated.")
@click.option("--origin", is_flag=True, help="Print the origin of each value.")
@click.option("--json", "as_json", is_flag=True, help="Print the resolved job as JSON.")
@print_command_option
def show(job: str | None, site: str | None, settings: tuple[str, ...], origin: bool, as_json: bool) -> None:
    """Show every value of JOB on a site; without JOB, the values of the site.

    \b
    toolkit config show train_lm --origin
    """
    from toolkit.config.resolved import shown_job, shown_tables
    from toolkit.site.load import choose_site
    from toolkit.site.partitions import resolve_on

    chosen = choose_site(site).site
    if job is None:
        if settings:
            raise click.UsageError("--set requires JOB")
        if as_json:
            click.echo(json.dumps(shown_tables(chosen.model_dump(mode="json", by_alias=True))))
        else:
            print_values(chosen.values(), chosen.origins, with_origin=origin)
        return
    resolved = resolve_on(request_of(job, {}, settings=settings), chosen, say)
    if as_json:
        click.echo(json.dumps(shown_job(resolved)))
    else:
        print_values(resolved.values(), resolved.origins, with_origin=origin)


def print_values(values: Iterable[tuple[str, Any]], origins: Mapping[str, Origin], *, with_origin: bool) -> None:
    """Print one line per key, in columns, for `grep` and `diff`."""
    from toolkit.config.document import Origin
    from toolkit.config.resolved import as_json, shown, shown_origin

    rows = [(key, as_json(shown(key, value))) for key, value in values]
    key_width = max(len(key) for key, _ in rows)
    value_width = min(40, max(len(value) for _, value in rows))
    for key, value in rows:
        line = f"{key:<{key_width}} = {value}"
        if with_origin:
            came_from = shown_origin(key, origins.get(key, Origin("built-in")))
            line = f"{key:<{key_width}} = {value:<{value_width}}  {came_from.layer:<11} {came_from.detail}"
        click.echo(line.rstrip())


@config.command()
@click.argument("kind", type=click.Choice(["job", "site"]))
def schema(kind: str) -> None:
    """Print the JSON schema of a job or site file.

    \b
    toolkit config schema job > job.schema.json
    """
    from toolkit.config.reference import schema_text

    click.echo(schema_text(kind), nl=False)
