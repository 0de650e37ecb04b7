"""`toolkit topo`: what the hardware of this node is, and who says so."""

from __future__ import annotations

import click


@click.group()
def topo() -> None:
    """Show what the hardware is."""


@topo.command()
@click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON.")
def show(as_json: bool) -> None:
    """Show this node's facts, each with its source; what is unknown says why."""
    import socket

    from toolkit.topology.facts import Fact
    from toolkit.topology.probe import probe_node
    from toolkit.topology.show import facts_as_json, facts_as_lines

    facts = probe_node(Fact(socket.gethostname(), "gethostname"))
    click.echo(facts_as_json(facts) if as_json else "\n".join(facts_as_lines(facts)))
    for warning in facts.warnings:
        click.echo(f"warning: {warning}", err=True)
