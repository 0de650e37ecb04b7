"""`toolkit topo`: the hardware with sources, and the groups of a job on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from toolkit.cli.options import JOB, mesh_options, request_of
from toolkit.cli.topo_check import check

if TYPE_CHECKING:
    from toolkit.config.resolved import ResolvedJob
    from toolkit.topology.facts import Topology
    from toolkit.topology.tiers import Tiers
    from toolkit.topology.traffic import Traffic


@click.group()
def topo() -> None:
    """Show hardware facts, and place the process groups of a job on them.

    \b
    toolkit topo show
    """


topo.add_command(check)


@topo.command()
@click.argument("job", type=JOB)
@mesh_options
@click.option("--machine", metavar="NAME", help="Kind of the nodes: dgx-a100, dgx-1, gb200 or pcie-8.")
@click.option("--leaves", metavar="N,N", help="Number of nodes below each leaf switch [all below one].")
@click.option("--facts", metavar="FILE", help="Output of `topo show --json` from each node; - is stdin.")
@click.option(
    "--model", metavar="SHAPE", help="Shape of a transformer, such as 70e9,layers=80,width=8192,context=4096."
)
@click.option("--bytes", "payloads", multiple=True, metavar="DIM=BYTES", help="Bytes that a rank exchanges per step.")
@click.option("--explain", is_flag=True, help="Explain the traffic on each network level, and the order of ranks.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; docs/topology.md lists the keys.")
def groups(
    job: str,
    settings: tuple[str, ...],
    machine: str | None,
    leaves: str | None,
    facts: str | None,
    model: str | None,
    payloads: tuple[str, ...],
    explain: bool,
    as_json: bool,
    **shape: Any,
) -> None:
    """Show which links the process groups of JOB use, as launched and as placed.

    \b
    toolkit topo groups train_lm.toml --machine dgx-a100 -N 8 --leaves 4,4 --explain
    """
    from toolkit.cli.topo_traffic import job_step, read_model, traffic_of_job
    from toolkit.config.layout_checks import refuse_components
    from toolkit.config.request import resolve
    from toolkit.topology.groups_shown import groups_as_json
    from toolkit.topology.placement import as_launched, place

    resolved = resolve(request_of(job, shape, settings=settings), None)
    refuse_components(resolved, "groups require nodes of the same shape", "use a job without [[component]]")
    tiers = _tiers(resolved, machine, leaves, facts)
    if resolved.job.min_nodes != resolved.job.max_nodes:
        said = f"the maximum of {resolved.job.nodes}; -N {resolved.job.min_nodes} shows the minimum"
        click.echo(f"nodes: {resolved.job.max_nodes}, {said}", err=True)
    sizes = resolved.parallel.sizes(tiers.size)
    shape_of_model = read_model(model) if model is not None else None
    traffic = traffic_of_job(resolved, sizes, shape_of_model, payloads)
    before, after = as_launched(tiers, sizes, traffic), place(tiers, sizes, traffic)
    if as_json:
        click.echo(json.dumps(groups_as_json(tiers, before, after, traffic), indent=1))
        return
    _print_groups(tiers, before, after)
    if resolved.parallel.placement == "launched":
        click.echo('the job keeps the rank placement of the launcher: parallel.placement = "launched"')
    if explain:
        if model is not None:
            step = job_step(resolved, sizes)
            click.echo(f"micro-batches per step: {step.micro_batches} of {step.micro_batch} samples [train.batch]")
        _explain(tiers, after, traffic)


def _tiers(resolved: ResolvedJob, machine: str | None, leaves: str | None, facts: str | None) -> Tiers:
    from toolkit.errors import ToolkitError
    from toolkit.topology.tiers_found import tiers_of_topology

    if facts and (machine or leaves):
        said = "--machine" if machine else "--leaves"
        raise ToolkitError(f"cannot be combined with --facts {facts}", where=said, fix=f"omit {said}, or --facts")
    topology = _topology_of_facts(resolved, facts) if facts else _topology_of_machine(resolved, machine, leaves)
    notes: list[str] = []
    tiers = tiers_of_topology(topology, resolved.job.ranks_per_node, notes)
    for line in (*topology.conflicts, *notes):
        click.echo(f"unknown: {line}", err=True)
    return tiers


def _topology_of_machine(resolved: ResolvedJob, machine: str | None, leaves: str | None) -> Topology:
    from toolkit.cli.topo_facts import MOST_NODES, leaves_of, machine_of, too_many_nodes
    from toolkit.errors import ToolkitError
    from toolkit.topology.machine_facts import topology_of_machine

    kind, nodes = machine_of(machine), resolved.job.max_nodes
    if nodes > MOST_NODES:
        raise too_many_nodes(resolved.origin("job.nodes").place("job.nodes"), str(nodes))
    below = leaves_of(leaves) if leaves else [nodes]
    if sum(below) != nodes:
        raise ToolkitError(
            f"{leaves} adds up to {sum(below)} nodes, but the job has {nodes}",
            where="--leaves",
            fix=f"pass numbers that add up to {nodes}, or -N {sum(below)}",
        )
    topology = topology_of_machine(kind, below)
    gpus = len(topology.nodes[0].hardware.gpus)
    if resolved.job.ranks_per_node > gpus:
        raise ToolkitError(
            f"{resolved.job.ranks_per_node} ranks per node, but a {kind} has {gpus} GPUs",
            where=resolved.origin("job.ranks_per_node").place("job.ranks_per_node"),
            fix=f"pass --ntasks-per-node {gpus} or less",
        )
    return topology


def _topology_of_facts(resolved: ResolvedJob, facts: str) -> Topology:
    from toolkit.cli.topo_facts import read_facts
    from toolkit.errors import ToolkitError

    topology = read_facts(facts)
    if len(topology.nodes) != resolved.job.max_nodes:
        raise ToolkitError(
            f"the file describes {len(topology.nodes)} nodes, but the job has {resolved.job.max_nodes}",
            where=facts,
            fix=f"pass -N {len(topology.nodes)}, or a file with the output from {resolved.job.max_nodes} nodes",
        )
    return topology


def _print_groups(tiers: Tiers, before: Any, after: Any) -> None:
    from rich.table import Table

    from toolkit.cli.ckpt_print import print_out
    from toolkit.topology.groups_shown import groups_as_rows

    table = Table(box=None, pad_edge=False)
    for title in ("DIMENSION", "GROUPS", "AS LAUNCHED", "MS", "PLACED", "MS"):
        table.add_column(title, justify="right" if title == "MS" else "left")
    for row in groups_as_rows(tiers, before, after):
        table.add_row(*row)
    print_out(table)
    placed = f"{after.seconds * 1e3:.1f} ms packed {', '.join(after.packed)}" if after.packed else "no order is better"
    click.echo(f"communication per step: {before.seconds * 1e3:.1f} ms as launched, {placed}")
    for line in after.compromises:
        click.echo(f"compromise: {line}")


def _explain(tiers: Tiers, after: Any, traffic: dict[str, Traffic]) -> None:
    for name in after.costs:
        of = traffic[name]
        click.echo(f"{name}: {of.exchange} of {of.payload_bytes / 1e9:.3g} GB/rank in {of.calls} calls [{of.source}]")
    for level in tiers.levels:
        link = level.link
        click.echo(
            f"{level.name}: {int(level.group_of.max()) + 1} groups, {link.latency_s * 1e6:g} us, "
            f"{link.bytes_per_s / 1e9:g} GB/s per rank [{link.source}]"
        )
    click.echo(f"order of ranks: {_ranges(after.mesh.ravel().tolist())}")


def _ranges(ranks: list[int]) -> str:
    """Format ranks in order, with ranges for equal steps: 0-7, 16-30:2."""
    from toolkit.topology.names import short_ranges

    return ", ".join(short_ranges(ranks))


@topo.command()
@click.option("--facts", metavar="FILE", help="Show the nodes described in FILE instead of this node; - is stdin.")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON; docs/topology.md lists the keys.")
def show(facts: str | None, as_json: bool) -> None:
    """Show this node's facts, each with its source; unknown ones with the reason.

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
        from toolkit.cli.ckpt_print import print_out
        from toolkit.topology.show import tree_of

        for tree in tree_of(topology):
            print_out(tree)
    for node in topology.nodes:
        for warning in node.warnings:
            click.echo(f"warning: {node.host.value}: {warning}" if facts else f"warning: {warning}", err=True)


@topo.command()
@click.option("--facts", metavar="FILE", help="Output of `topo show --json` from each node; - is stdin.")
@click.option("--machine", metavar="NAME", help="Kind of the nodes: dgx-a100, dgx-1, gb200 or pcie-8.")
@click.option("--leaves", metavar="N,N", help="Nodes of --machine below each leaf switch [1].")
@click.option("--input", "matrix", metavar="FILE", help="Output of `nvidia-smi topo -m`; - is stdin.")
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path), help="Output image file: .svg, .png or .pdf."
)
def plot(facts: str | None, machine: str | None, leaves: str | None, matrix: str | None, output: Path) -> None:
    """Draw nodes with their GPUs, NICs and links, and the leaf switches above them; by default this node.

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
        raise ToolkitError("a picture shows only one input", where=" and ".join(given), fix="omit all but one")
    if leaves and not machine:
        raise ToolkitError("requires --machine", where="--leaves", fix="add --machine NAME")
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
