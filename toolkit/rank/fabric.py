"""Set the few variables of the fabric that follow from this node, before anything reads them."""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.topology.nccl.environment import SYSTEM_FILE, of_process
from toolkit.topology.nccl.finding import effective
from toolkit.topology.nccl.node import read_node
from toolkit.topology.nccl.settings import fabric_settings
from toolkit.world.address import choose_interface
from toolkit.world.device import visible_gpus
from toolkit.world.facts import World


def set_fabric(
    world: World, interface: str, environ: MutableMapping[str, str], system_file: Path = SYSTEM_FILE
) -> list[str]:
    """Set the variables that follow from the facts of this node; returns a line for each, of the node's first rank.

    What NCCL would read from its files is kept as well: a variable would override it.
    """
    gpus = visible_gpus(environ) if world.device.startswith("cuda") else 0
    # On one node `meet` keeps to loopback, which is not a choice to report.
    name = "" if world.nodes == 1 else choose_interface(interface, single_node=False)[0]
    lines, given = [], dict(environ)
    try:
        given = {name: one.value for name, one in effective(of_process(environ, system_file)).items()}
    except ToolkitError as error:  # NCCL does not read such a file either, and continues
        lines.append(f"ignoring {error.where}: {error.message}")
    for setting in fabric_settings(read_node(name, world.nodes, gpus), given):
        if setting.kept is None:
            environ[setting.name] = setting.value
            lines.append(f"set {setting.line}")
    return lines if world.local_rank == 0 else []
