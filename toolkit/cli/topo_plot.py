"""`toolkit topo plot`: a picture of nodes, their GPUs, NICs and links, and of the leaves above them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from toolkit.topology.facts import Topology


@click.command()
@click.option("--facts", metavar="FILE", help="What `topo show --json` printed on each node; - is stdin.")
@click.option("--machine", metavar="NAME", help="Kind of the nodes: dgx-a100, dgx-1, gb200 or pcie-8.")
@click.option("--leaves", metavar="N,N", help="Nodes of --machine below each leaf switch [1].")
@click.option("--input", "matrix", metavar="FILE", help="What `nvidia-smi topo -m` printed; - is stdin.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The picture: .svg, .png or .pdf.")
def plot(facts: str | None, machine: str | None, leaves: str | None, matrix: str | None, output: Path) -> None:
    """Draw nodes with their GPUs, NICs and links, and the leaves above them; this node, when nothing else is given.

    \b
    toolkit topo plot --machine dgx-a100 --leaves 4,4 -o cluster.svg
    """
    from toolkit.errors import ToolkitError
    from toolkit.observe.pictures.formats import check_picture
    from toolkit.observe.pictures.topology import save_picture
    from toolkit.observe.pictures.topology_drawing import draw

    check_picture(output)
    given = [name for name, value in (("--facts", facts), ("--machine", machine), ("--input", matrix)) if value]
    if len(given) > 1:
        raise ToolkitError("expected one input to draw", where=" and ".join(given), fix="omit all but one")
    if leaves and not machine:
        raise ToolkitError("says nothing without a machine", where="--leaves", fix="give --machine, too")
    topology, title = _what(facts, machine, leaves, matrix)
    save_picture(draw(topology, title), output)
    click.echo(str(output))


def _what(facts: str | None, machine: str | None, leaves: str | None, matrix: str | None) -> tuple[Topology, str]:
    import socket

    from toolkit.cli.topo_facts import leaves_of, machine_of, matrix_topology, read_facts
    from toolkit.topology.facts import Fact
    from toolkit.topology.machine_facts import topology_of_machine
    from toolkit.topology.probe import probe_node
    from toolkit.topology.topology_json import topology_of_node

    if machine:
        below = leaves_of(leaves) if leaves else [1]
        words = f"{machine}: {sum(below)} nodes below {len(below)} {'leaves' if len(below) > 1 else 'leaf'}"
        return topology_of_machine(machine_of(machine), below), words if sum(below) > 1 else machine
    if facts:
        topology = read_facts(facts)
        return topology, facts if len(topology.nodes) == 1 else f"{facts}: {len(topology.nodes)} nodes"
    if matrix:
        return matrix_topology(matrix), matrix
    host = socket.gethostname()
    return topology_of_node(probe_node(Fact(host, "gethostname", "direct"))), host
