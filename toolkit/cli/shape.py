"""Ranks in all, as sbatch reads -n beside -N and --ntasks-per-node; every node gets as many."""

from __future__ import annotations

import re
from collections.abc import Callable

from toolkit.config.origins import Flag
from toolkit.errors import ToolkitError

_RANGE = re.compile(r"(\d+)-\d+")


def shape_of(
    ranks: int, nodes: str | None, ranks_per_node: str | None, nodes_before: Callable[[], int | str]
) -> dict[str, Flag]:
    """What -n makes of the nodes, or of the ranks on each; {} where -N or --ntasks-per-node is refused by its own key.

    Args:
        ranks, nodes, ranks_per_node: -n, -N and --ntasks-per-node as they were typed.
        nodes_before: tells the nodes that hold when -N is not given.

    Raises:
        ToolkitError: the ranks do not fill the nodes evenly, or nobody knows how many nodes there will be.
    """
    if ranks < 1:
        raise _refusal(ranks, "a job has at least one rank", "-n 1, or more")
    each = _count(ranks_per_node)
    if ranks_per_node is not None and each is None:
        return {}
    if each is not None and nodes is None:
        return {"job.nodes": Flag(_nodes_of(ranks, each), f"-n {ranks} --ntasks-per-node {each}, so -N")}
    given = nodes if nodes is not None else nodes_before()
    number = _count(given)
    if number is None:
        return _refuse_range(ranks, str(given))
    if each is not None and ranks != each * number:
        whole = each * number
        said = f"{number} nodes of {each} ranks have {whole}"
        raise _refusal(ranks, said, f"-n {whole}, or leave one of -n, -N and --ntasks-per-node out")
    if ranks % number:
        raise _refusal(
            ranks, f"{ranks} ranks do not fill {number} nodes evenly", f"{_nearest(ranks, number)}, or another -N"
        )
    name = "-n" if number == 1 else f"-n {ranks} over {number} nodes, so --ntasks-per-node"
    return {"job.ranks_per_node": Flag(ranks // number, name)}


def _nodes_of(ranks: int, each: int) -> int:
    if ranks % each:
        fix = f"{_nearest(ranks, each)}, or another --ntasks-per-node"
        raise _refusal(ranks, f"{ranks} ranks do not fill nodes of {each}", fix)
    return ranks // each


def _count(text: int | str | None) -> int | None:
    """A number from 1; one node may also be written as the range 1-1."""
    fewest, _, most = str(text or "").partition("-")
    return int(fewest) if fewest.isdecimal() and int(fewest) and most in ("", fewest) else None


def _nearest(ranks: int, unit: int) -> str:
    fewer = ranks // unit * unit
    return f"-n {fewer} or {fewer + unit}" if fewer else f"-n {unit}"


def _refuse_range(ranks: int, nodes: str) -> dict[str, Flag]:
    match = _RANGE.fullmatch(nodes)
    if match is None or not int(match[1]):
        return {}
    fewest = int(match[1])
    raise _refusal(
        ranks,
        f"of {nodes} nodes nobody knows how many there will be, and each gets as many ranks",
        f"--ntasks-per-node {max(1, ranks // fewest)} in place of -n, or one number of nodes, such as -N {fewest}",
    )


def _refusal(ranks: int, message: str, fix: str) -> ToolkitError:
    return ToolkitError(message, where=f"-n {ranks}", fix=fix)
