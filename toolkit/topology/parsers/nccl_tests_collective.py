"""Which collective a table of nccl-tests is of, and how its bus bandwidth stands to its bandwidth.

The programs did not always print their name. Their tables differ in operation, root and count, and in the ratio of the
bandwidths; where that leaves several, none is named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from toolkit.topology.parsers.nccl_tests_rows import ResultRow

_ROUNDING = 0.005  # GB/s; bandwidths are printed with two decimals


def _all(ranks: int) -> float:
    return (ranks - 1) / ranks


# Bus bandwidth by bandwidth, of so many ranks.
FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce_perf": lambda ranks: 2 * (ranks - 1) / ranks,
    "all_gather_perf": _all,
    "reduce_scatter_perf": _all,
    "alltoall_perf": _all,
    "gather_perf": _all,
    "scatter_perf": _all,
    "hypercube_perf": _all,
    "broadcast_perf": lambda ranks: 1.0,
    "reduce_perf": lambda ranks: 1.0,
    "sendrecv_perf": lambda ranks: 1.0,
}


# Of these the column of the count has all elements; of the others the part of one rank.
OF_ALL_DATA = frozenset({"all_reduce_perf", "broadcast_perf", "reduce_perf"})


def bus_factor(collective: str | None, ranks: int | None) -> float | None:
    """How bus bandwidth stands to bandwidth; None where it is not known of which collective or ranks."""
    return FACTORS[collective](ranks) if collective in FACTORS and ranks else None


def collective_of(named: str | None, rows: Sequence[ResultRow], ranks: int | None) -> str | None:
    """The program: by its own line, else by what all rows have alike."""
    if named in FACTORS:
        return named
    kinds = [(row.operation != "none", row.root, _share(row, ranks)) for row in rows if row.operation]
    reduces, root, share = max(kinds, key=kinds.count, default=(False, None, ""))
    if kinds.count((reduces, root, share)) * 2 <= len(rows):
        return None
    wrong = {row.in_place.wrong for row in rows if row.in_place}
    checked = wrong != {"N/A"}  # what has no variant in place says so there
    if reduces and root in (None, -1) and checked:
        # A table of a root has its column; without the column none is thought of.
        return {"whole": "all_reduce_perf", "part": "reduce_scatter_perf"}.get(share)
    if reduces:
        return "reduce_perf" if root is not None and root >= 0 and share == "whole" else None
    if root == -1 and share == "part":
        return "all_gather_perf" if checked else "alltoall_perf"
    return "broadcast_perf" if root is not None and root >= 0 and share == "whole" else None


def _share(row: ResultRow, ranks: int | None) -> str:
    """Whether the count of elements is that of all data or of one rank's part of it."""
    count = row.elements
    if row.count == count:
        return "whole"
    if ranks is None:
        return "part" if row.count and count % row.count == 0 else ""
    return "part" if row.count == count // ranks or abs(row.count * ranks - count) < 16 * ranks else ""


def ranks_of(collective: str | None, rows: Sequence[ResultRow]) -> int | None:
    """The one number of ranks with which all bandwidths agree, as far as their decimals go; None where several do."""
    if collective not in FACTORS:
        return None
    halves = [half for row in rows for half in (row.out_of_place, row.in_place) if half is not None]
    low, high = 0.0, 2.0
    for half in halves:
        if half.gb_per_s and half.bus_gb_per_s is not None and half.gb_per_s > 1:
            low = max(low, (half.bus_gb_per_s - _ROUNDING) / (half.gb_per_s + _ROUNDING))
            high = min(high, (half.bus_gb_per_s + _ROUNDING) / (half.gb_per_s - _ROUNDING))
    fitting = [ranks for ranks in range(1, 4097) if low <= FACTORS[collective](ranks) <= high]
    return fitting[0] if len(fitting) == 1 else None
