"""`toolkit devcluster`: a real Slurm cluster on this machine."""

import json
import os
import sys
import time
from pathlib import Path

import click

from toolkit.devcluster.layout import DEFAULT_NAME, ClusterSpec, Layout, make_layout


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--name",
    default=DEFAULT_NAME,
    show_default=True,
    help="Name of the cluster; clusters with different names are independent.",
)
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    help="Folder of the cluster [default: $TOOLKIT_DEVCLUSTER, else ~/.toolkit/NAME].",
)
@click.pass_context
def devcluster(ctx: click.Context, name: str, folder: Path | None) -> None:
    """Run a real Slurm cluster on this machine; every node has its own network, host name, PIDs and /tmp.

    \b
    toolkit devcluster up --nodes 2
    """
    ctx.obj = make_layout(name, folder)


@devcluster.command()
@click.option("--nodes", default=4, show_default=True, help="Number of nodes.")
@click.option("--gpus", default=4, show_default=True, help="Simulated GPUs of each node.")
@click.option("--link", default="", metavar="RATE", help="Bandwidth of each node's link, such as 200mbit.")
@click.option("--accounting", is_flag=True, help="Start slurmdbd with a private MariaDB, so that sacct works.")
@click.option(
    "--accounting-of", default="", metavar="NAME", help="Use the slurmdbd of the cluster NAME, for commands with -M."
)
@click.option(
    "--option", "options", multiple=True, metavar="KEY=VALUE", help="Additional line for slurm.conf; may be repeated."
)
@click.option(
    "--slurm", default="", metavar="VERSION", help="Slurm release: 22.05, 24.11 or 26.05 [default: this machine's]."
)
@click.pass_obj
def up(
    layout: Layout, nodes: int, gpus: int, link: str, accounting: bool, accounting_of: str, options: tuple[str, ...],
    slurm: str,
) -> None:  # fmt: skip
    """Start the cluster; if it is up, restart its daemons that exited.

    \b
    eval "$(toolkit devcluster up --nodes 2 --gpus 4)"
    """
    from toolkit.devcluster import cluster

    begin = time.monotonic()
    kept = accounting or bool(accounting_of)
    spec = ClusterSpec(nodes, gpus, link, kept, subnet="", options=options, accounting_of=accounting_of, slurm=slurm)
    started = cluster.up(layout, spec)
    seconds = time.monotonic() - begin
    click.echo(f"{layout.name} is up ({seconds:.1f} s)" if started else f"{layout.name} is up already", err=True)
    click.echo(f"export SLURM_CONF={layout.slurm_conf}")
    if programs := layout.read_spec().programs:
        click.echo(f"export PATH={programs}:$PATH")


@devcluster.command()
@click.option("--keep-logs", is_flag=True, help="Keep FOLDER/logs.")
@click.pass_obj
def down(layout: Layout, keep_logs: bool) -> None:
    """Stop all processes and jobs of the cluster, and remove its network links and its folder.

    \b
    toolkit devcluster down
    """
    from toolkit.devcluster import cluster

    cluster.down(layout, keep_logs=keep_logs)
    click.echo(f"{layout.name} is down", err=True)


@devcluster.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def status(layout: Layout, as_json: bool) -> None:
    """Show nodes, daemons and the path of slurm.conf; the exit code is 1 if a daemon is not running.

    \b
    toolkit devcluster status
    """
    from toolkit.devcluster import cluster

    found = cluster.status(layout)
    if as_json:
        click.echo(
            json.dumps(
                {
                    "name": found.name,
                    "folder": str(found.folder),
                    "slurm_conf": str(found.slurm_conf),
                    "nodes": dict(found.nodes),
                    "daemons": dict(found.daemons),
                }
            )
        )
    else:
        click.echo(f"{found.name}: SLURM_CONF={found.slurm_conf}")
        for node, state in found.nodes.items():
            click.echo(f"  {node:<16} {state}")
        for daemon, is_running in found.daemons.items():
            click.echo(f"  {daemon:<16} {'runs' if is_running else 'DEAD'}")
    if not all(found.daemons.values()):
        sys.exit(1)


@devcluster.command("exec", context_settings={"ignore_unknown_options": True})
@click.argument("node")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_obj
def exec_(layout: Layout, node: str, command: tuple[str, ...]) -> None:
    """Run COMMAND inside NODE and return its exit code.

    \b
    toolkit devcluster exec node1 -- hostname
    """
    from toolkit.devcluster import cluster

    argv = cluster.command_in_node(layout, node, command)
    os.execvpe(argv[0], argv, {**os.environ, "SLURM_CONF": str(layout.slurm_conf)})


@devcluster.command()
@click.argument("node")
@click.argument("rate")
@click.pass_obj
def shape(layout: Layout, node: str, rate: str) -> None:
    """Limit the link of NODE, or of all nodes, to RATE such as 200mbit; none removes the limit.

    \b
    toolkit devcluster shape all 200mbit
    """
    from toolkit.devcluster import cluster

    cluster.shape(layout, node, rate)
    nodes = "all nodes" if node == "all" else node
    limit = "no limit" if rate == "none" else f"a limit of {rate} in each direction"
    click.echo(f"{nodes}: {limit}", err=True)


@devcluster.command()
@click.argument("node")
@click.option("--slurmd", is_flag=True, help="Only kill its slurmd; jobs on the node keep running.")
@click.pass_obj
def fail(layout: Layout, node: str, slurmd: bool) -> None:
    """Disconnect NODE from the network; Slurm marks it down within about 30 s.

    \b
    toolkit devcluster fail node2
    """
    from toolkit.devcluster import cluster

    if slurmd:
        cluster.kill_slurmd(layout, node)
    else:
        cluster.fail(layout, node)
    what = "no longer runs slurmd" if slurmd else "is disconnected"
    click.echo(f"{node} {what}; Slurm marks it down within about 30 s", err=True)


@devcluster.command()
@click.argument("node")
@click.pass_obj
def restore(layout: Layout, node: str) -> None:
    """Reconnect NODE, restart its slurmd if necessary, and wait until Slurm uses the node.

    \b
    toolkit devcluster restore node2
    """
    from toolkit.devcluster import cluster

    cluster.restore(layout, node)
    click.echo(f"{node} is connected and available", err=True)
