"""`toolkit topo show`: what the hardware of this node is, and who says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree

    from toolkit.topology.facts import Topology
    from toolkit.topology.show import Branch


@click.command()
@click.option("--facts", metavar="FILE", help="Nodes that told their facts before, instead of this one; - is stdin.")
@click.option("--json", "as_json", is_flag=True, help="One object on one line; docs/topology.md has the keys.")
def show(facts: str | None, as_json: bool) -> None:
    """Show this node's facts, each with its source; what is unknown says why.

    \b
    toolkit topo show --json > $(hostname).json
    """
    import socket

    from toolkit.cli.topo_facts import read_facts
    from toolkit.topology.facts import Fact
    from toolkit.topology.probe import probe_node
    from toolkit.topology.topology_json import topology_of_node, write_topology

    if facts is None:
        topology = topology_of_node(probe_node(Fact(socket.gethostname(), "gethostname", "direct")))
    else:
        topology = read_facts(facts)
    if as_json:
        click.echo(write_topology(topology))
    else:
        _print_trees(topology)
    for node in topology.nodes:
        for warning in node.warnings:
            click.echo(f"warning: {node.host.value}: {warning}" if facts else f"warning: {warning}", err=True)


def _print_trees(topology: Topology) -> None:
    from rich.tree import Tree

    from toolkit.cli.ckpt_print import print_out
    from toolkit.topology.show import tree_of

    for branch in tree_of(topology):
        tree = Tree(_text(branch))
        _add(tree, branch)
        print_out(tree)


def _add(tree: Tree, branch: Branch) -> None:
    for below in branch.below:
        _add(tree.add(_text(below)), below)


def _text(branch: Branch) -> Text:
    from rich.text import Text

    from toolkit.terminal.talk import plain

    text = Text(plain(branch.name), "bold")
    unknown = branch.text.startswith("unknown")
    return text.append(f" {plain(branch.text)}" if branch.text else "", "not bold yellow" if unknown else "not bold")
