"""The topology sources of the `topo` commands: files of facts, known machines, a printed matrix."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from toolkit.topology.facts import Topology

MOST_NODES = 100_000  # about ten times the largest GPU clusters; all nodes must fit in memory


def read_facts(path: str) -> Topology:
    """Return the topology in a facts file, or in stdin for `-`."""
    from toolkit.topology.topology_json import read_topology

    return read_topology(_text(path, "pass the output of `toolkit topo show --json` from each node"), _name(path))


def matrix_topology(path: str) -> Topology:
    """Return the topology of one node from the output of `nvidia-smi topo -m` in a file, or in stdin for `-`."""
    from pathlib import Path

    from toolkit.errors import ToolkitError
    from toolkit.topology.facts import Fact
    from toolkit.topology.probe import settle
    from toolkit.topology.sources.commands import answer_of_matrix
    from toolkit.topology.topology_json import topology_of_node

    fix = "pass the output of `nvidia-smi topo -m`"
    name = "stdin" if path == "-" else Path(path).name
    answer = answer_of_matrix(_text(path, fix), name)
    if "gpu_count" not in {about[0] for about in answer.claims}:
        raise ToolkitError(answer.reasons[()].removeprefix(f"{name}: "), where=_name(path), fix=fix)
    node = settle(Fact(name, "the file", "printed"), [answer])
    for warning in node.warnings:
        click.echo(f"warning: {warning}", err=True)
    return topology_of_node(node)


def machine_of(name: str | None) -> str:
    """Return the name of a known machine."""
    from toolkit.errors import ToolkitError
    from toolkit.topology.machine_facts import machines

    if name is None or name not in machines():
        raise ToolkitError(
            "the machine type of the nodes is missing" if name is None else f"unknown machine {name!r}",
            where="--machine",
            fix=f"choose one of {', '.join(machines())}"
            + (
                ", or --facts FILE with the output of `toolkit topo show --json` from each node" if name is None else ""
            ),
        )
    return name


def leaves_of(text: str) -> list[int]:
    """Return the number of nodes below each leaf switch: [4, 4] for "4,4"."""
    from toolkit.errors import ToolkitError

    fix = "pass the number of nodes below each leaf switch, such as 4,4"
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() for word in words):
        raise ToolkitError(f"expected a list of whole numbers, got {text!r}", where="--leaves", fix=fix)
    if not all(word.strip("0") for word in words):
        raise ToolkitError(f"{text} has a leaf switch without nodes", where="--leaves", fix=fix)
    shortest = [word.lstrip("0") for word in words]
    if any(len(word) > len(str(MOST_NODES)) for word in shortest) or sum(map(int, shortest)) > MOST_NODES:
        raise too_many_nodes("--leaves", text)
    return [int(word) for word in shortest]


def too_many_nodes(where: str, said: str) -> Exception:
    """Return the error for a number of nodes above the limit."""
    from toolkit.errors import ToolkitError

    return ToolkitError(
        f"{said} exceeds the limit of {MOST_NODES} nodes", where=where, fix=f"choose {MOST_NODES} or fewer"
    )


def _text(path: str, fix: str) -> str:
    from pathlib import Path

    from toolkit.errors import NotFoundError, ToolkitError

    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ToolkitError("is not a text file", where=_name(path), fix=fix) from error
    except FileNotFoundError as error:
        raise NotFoundError("no such file", where=path, fix=fix) from error
    except OSError as error:
        raise ToolkitError(f"cannot be read: {error.strerror}", where=_name(path), fix=fix) from error


def _name(path: str) -> str:
    return "stdin" if path == "-" else path
