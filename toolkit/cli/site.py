"""`toolkit site`: which sites are known, what one says, which one this machine is, and which nodes are left out."""

from __future__ import annotations

import json
from pathlib import Path

import click

from toolkit.cli.options import json_option, runs_option, site_runs


@click.group()
def site() -> None:
    """Which cluster is this: list, show, detect, bad-nodes."""


@site.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def list_command(as_json: bool) -> None:
    """List every site with a file: name, scheduler, how far it was checked, its documentation.

    A wrong file is named on stderr, and the exit code is 1.
    """
    from toolkit.errors import CHECK_FAILED
    from toolkit.site.load import list_sites

    sites, wrong = list_sites()
    rows = [{"name": one.name, "kind": one.scheduler.kind, "checked": one.checked, "docs": one.docs} for one in sites]
    if as_json:
        click.echo(json.dumps(rows))
    else:
        widths = {key: max(len(row[key]) for row in rows) for key in ("name", "kind", "checked")}
        for row in rows:
            columns = [f"{row[key]:<{width}}" for key, width in widths.items()]
            click.echo("  ".join([*columns, row["docs"]]).rstrip())
    for error in wrong:
        click.echo(f"toolkit: {error}", err=True)
    if wrong:
        raise click.exceptions.Exit(CHECK_FAILED)


@site.command()
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print the site as JSON.")
def show(name: str, as_json: bool) -> None:
    """Show the site NAME, or the site file at that path, with what it extends merged in."""
    from toolkit.cli.config import print_values
    from toolkit.site.load import load_site

    loaded = load_site(name)
    if as_json:
        click.echo(loaded.model_dump_json(by_alias=True))
    else:
        print_values(loaded.values(), loaded.origins, with_origin=True)


@site.command()
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def detect(as_json: bool) -> None:
    """Say which site this machine is, and by what it was known."""
    from toolkit.site.detect import detect_site

    found = detect_site()
    if as_json:
        click.echo(json.dumps({"site": found.site.name, "reason": found.reason}))
    else:
        click.echo(f"{found.site.name}: {found.reason}")


@site.command("bad-nodes")
@runs_option
@click.option("--clear", "node", metavar="NODE", help="Forget this node, so that jobs may run on it again.")
@json_option
def bad_nodes_command(runs: Path | None, node: str | None, as_json: bool) -> None:
    """List the nodes that submissions leave out: they failed a check or a run within the last day.

    \b
    toolkit site bad-nodes
    toolkit site bad-nodes --clear node3
    """
    from dataclasses import asdict

    from toolkit.batch.bad_nodes import describe
    from toolkit.errors import NotFoundError
    from toolkit.rundir.bad_nodes import bad_nodes, forget_bad_node, sites_with_bad_nodes

    folder = site_runs(runs)
    sites = sites_with_bad_nodes(folder)
    if node is not None:
        forgotten = [forget_bad_node(folder, name, node) for name in sites]
        if not any(forgotten):
            raise NotFoundError(
                f"{node} is not left out", where=str(folder), fix="`toolkit site bad-nodes` lists those that are"
            )
        return
    found = [(name, bad) for name in sites for bad in bad_nodes(folder, name)]
    if as_json:
        click.echo(json.dumps([{"site": name, **asdict(bad)} for name, bad in found]))
    else:
        for name, bad in found:
            click.echo(f"{name}: {describe(bad)}")
