"""Convert -n, the total number of ranks, to nodes or ranks per node; every node gets the same number of ranks."""

import re

from toolkit.config.document import Flag
from toolkit.errors import ToolkitError

__all__ = ["flags_of_ranks", "needs_nodes"]

_RANGE = re.compile(r"(\d+)-\d+")


def needs_nodes(ranks: int, nodes: int | str | None, ranks_per_node: int | str | None) -> bool:
    """Return whether `flags_of_ranks` needs the number of nodes from the job file."""
    return ranks > 0 and nodes is None and ranks_per_node is None


def flags_of_ranks(ranks: int, nodes: int | str | None, ranks_per_node: int | str | None) -> dict[str, Flag]:
    """Return the flags that -n implies; {} if -N or --ntasks-per-node is invalid, which a later check reports.

    Args:
        ranks, nodes, ranks_per_node: -n, -N and --ntasks-per-node as typed; if `needs_nodes`, `nodes` is that of the job.

    Raises:
        ToolkitError: the ranks are not divisible by the nodes, or the number of nodes is a range.
    """
    if ranks < 1:
        raise _refusal(ranks, f"expected at least 1 rank, got {ranks}", "use -n 1 or more")
    each = _count(ranks_per_node)
    if ranks_per_node is not None and each is None:
        return {}
    if each is not None and nodes is None:
        return {"job.nodes": Flag(_nodes_of(ranks, each), f"-n {ranks} --ntasks-per-node {each}, so -N")}
    number = _count(nodes)
    if number is None:
        return _refuse_range(ranks, str(nodes))
    if each is not None and ranks != each * number:
        whole = each * number
        raise _refusal(
            ranks,
            f"-n {ranks} does not match {number} nodes with {each} ranks each, which is {whole} ranks",
            f"use -n {whole}, or omit one of -n, -N and --ntasks-per-node",
        )
    if ranks % number:
        raise _refusal(
            ranks, f"{ranks} ranks are not divisible by {number} nodes", f"use {_nearest(ranks, number)}, or another -N"
        )
    name = "-n" if number == 1 else f"-n {ranks} over {number} nodes, so --ntasks-per-node"
    return {"job.ranks_per_node": Flag(ranks // number, name)}


def _nodes_of(ranks: int, each: int) -> int:
    if ranks % each:
        fix = f"use {_nearest(ranks, each)}, or another --ntasks-per-node"
        raise _refusal(ranks, f"{ranks} ranks are not divisible by {each} ranks per node", fix)
    return ranks // each


def _count(text: int | str | None) -> int | None:
    """Return the number in `text`, which may be a range such as 2-2; None if it is not a number of at least 1."""
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
        f"expected one number of nodes with -n, got the range {nodes}",
        f"use --ntasks-per-node {max(1, ranks // fewest)} instead of -n, or one number of nodes, such as -N {fewest}",
    )


def _refusal(ranks: int, message: str, fix: str) -> ToolkitError:
    return ToolkitError(message, where=f"-n {ranks}", fix=fix)
