"""The total number of ranks (-n) beside -N and --ntasks-per-node; every node gets the same number of ranks."""

import re

from toolkit.config.document import Flag
from toolkit.errors import ToolkitError

__all__ = ["flags_of_ranks", "needs_nodes"]

_RANGE = re.compile(r"(\d+)-\d+")


def needs_nodes(ranks: int, nodes: int | str | None, ranks_per_node: int | str | None) -> bool:
    """Return whether `flags_of_ranks` needs the number of nodes that the job itself requests."""
    return ranks > 0 and nodes is None and ranks_per_node is None


def flags_of_ranks(ranks: int, nodes: int | str | None, ranks_per_node: int | str | None) -> dict[str, Flag]:
    """Return the flags that -n implies; {} if -N or --ntasks-per-node is invalid, which its own key reports.

    Args:
        ranks, nodes, ranks_per_node: -n, -N and --ntasks-per-node as typed; if `needs_nodes`, `nodes` is the job's number.

    Raises:
        ToolkitError: the ranks do not fill the nodes evenly, or the number of nodes is a range.
    """
    if ranks < 1:
        raise _refusal(ranks, "a job has at least one rank", "-n 1, or more")
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
            f"{number} nodes with {each} ranks each have {whole} ranks",
            f"-n {whole}, or omit one of -n, -N and --ntasks-per-node",
        )
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
    """A number of at least 1, or None; the range 1-1 is one node."""
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
        f"--ntasks-per-node {max(1, ranks // fewest)} instead of -n, or one number of nodes, such as -N {fewest}",
    )


def _refusal(ranks: int, message: str, fix: str) -> ToolkitError:
    return ToolkitError(message, where=f"-n {ranks}", fix=fix)
