"""`toolkit config`: what a job resolves to, where each value came from, and the files' schemas."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from toolkit.config.origins import Origin


@click.group()
def config() -> None:
    """Show the resolved configuration and its schema."""


@config.command()
@click.argument("job", required=False)
@click.option("--site", help="Site name or file.  [default: TOOLKIT_SITE, else detected]")
@click.option("--set", "settings", multiple=True, metavar="TABLE.KEY=VALUE", help="Set one value; may be repeated.")
@click.option("--origin", is_flag=True, help="Say where each value came from.")
@click.option("--json", "as_json", is_flag=True, help="Print the resolved job as JSON.")
def show(job: str | None, site: str | None, settings: tuple[str, ...], origin: bool, as_json: bool) -> None:
    """Show every value of JOB on a site; without JOB, what the site itself says."""
    from toolkit.config.layers import resolve_job
    from toolkit.config.shipped import find_job
    from toolkit.site.detect import choose_site

    chosen = choose_site(site).site
    if job is None:
        if settings:
            raise click.UsageError("--set needs a JOB")
        if as_json:
            click.echo(chosen.model_dump_json(by_alias=True))
        else:
            print_values(chosen.values(), chosen.origins, with_origin=origin)
        return
    resolved = resolve_job(find_job(job), site=chosen, environ=os.environ, settings=settings)
    if as_json:
        click.echo(resolved.to_json())
    else:
        print_values(resolved.values(), resolved.origins, with_origin=origin)


def print_values(values: Iterable[tuple[str, Any]], origins: Mapping[str, Origin], *, with_origin: bool) -> None:
    """Print one line a key, in columns, so that `grep` and `diff` work on it."""
    from toolkit.config.origins import Origin
    from toolkit.config.resolved import as_json

    rows = [(key, as_json(value)) for key, value in values]
    key_width = max(len(key) for key, _ in rows)
    value_width = min(40, max(len(value) for _, value in rows))
    for key, value in rows:
        line = f"{key:<{key_width}} = {value}"
        if with_origin:
            came_from = origins.get(key, Origin("built-in"))
            line = f"{key:<{key_width}} = {value:<{value_width}}  {came_from.layer:<11} {came_from.detail}"
        click.echo(line.rstrip())


@config.command()
@click.argument("kind", type=click.Choice(["job", "site"]))
def schema(kind: str) -> None:
    """Print the JSON schema of a job or site file."""
    from toolkit.config.schema import schema_text

    click.echo(schema_text(kind), nl=False)
