"""Read what the programs of nccl-tests print: the ranks, the table of times and bandwidths, and its summary.

A row checks itself: bandwidth is size by time, and the bus bandwidth stands to it as the collective and the number of
ranks say. A row that does not is named and not read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from toolkit.errors import CheckFailedError
from toolkit.topology.parsers.host_lines import read_lines
from toolkit.topology.parsers.nccl_tests_collective import OF_ALL_DATA, bus_factor, collective_of, ranks_of
from toolkit.topology.parsers.nccl_tests_lines import RunReader
from toolkit.topology.parsers.nccl_tests_rows import Half, ResultRow

KEYS = {
    "collective": "the program (`all_reduce_perf`): named on a line, else told by operation, root, count and bandwidths",
    "nranks": "how many ranks, by their lines, else by the ratio of the bandwidths; null where neither tells",
    "nodes": "how many hosts the lines of the ranks name",
    "result_rows": "how many rows of results are printed",
    "first_size": "the size of the first row in bytes",
    "last_size": "the size of the last row in bytes",
    "avg_busbw_GBs": "the average bus bandwidth of all rows in GB/s, as printed",
    "out_of_bounds": 'the number of values out of bounds and the verdict, as printed ("0 OK")',
    "last_row": "the last row: time in microseconds, bandwidth and bus bandwidth in GB/s and wrong values as printed, "
    "out of place (oop) and in place (ip)",
    "busbw_over_algbw_expected": "how bus bandwidth stands to bandwidth by collective and ranks, to 5 decimals",
    "busbw_over_algbw_seen": "the same by the last row, out of place; null where it is 0",
}


@dataclass(frozen=True)
class CollectiveRun:
    """One run of a program of nccl-tests; None where no line says so or lines contradict one another."""

    collective: str | None
    rank_count: int | None
    hosts: tuple[str, ...] | None
    rows: tuple[ResultRow, ...]
    row_count: int
    average_gb_per_s: float | None
    out_of_bounds: str | None


def parse_nccl_tests(text: str) -> tuple[CollectiveRun, tuple[str, ...]]:
    """Read the whole output: (facts, warnings that name the damaged lines).

    Raises:
        CheckFailedError: it is no output of nccl-tests.
    """
    lines, warnings = read_lines(text)
    reader = RunReader(warnings)
    for line in lines:
        reader.read(line)
    if not reader.rows and not reader.ranks and not reader.headers:
        said = f": {lines[0].text[:60]!r}" if lines else ""
        raise CheckFailedError(f"nothing that nccl-tests prints{said}", where=f"line {lines[0].number if lines else 1}")
    last = lines[-1].number
    reader.compare(last)
    rows = tuple(row for _, row in reader.rows if row is not None)
    rank_count = reader.rank_count()
    collective = collective_of(reader.named, rows, rank_count)
    if rank_count is None and not reader.ranks:
        rank_count = ranks_of(collective, rows)
        warnings.append(f"line {last}: no line lists the ranks; by the bandwidths there are {rank_count or 'none'}")
    fits = reader.compare_bandwidths(bus_factor(collective, rank_count), whole=collective in OF_ALL_DATA)
    rank_count = rank_count if fits else None
    hosts = tuple(dict.fromkeys(host for _, host in reader.ranks.values()))
    whole = tuple(row for _, row in reader.rows if row is not None)
    facts = CollectiveRun(
        collective, rank_count, hosts or None, whole, len(reader.rows), reader.average, reader.out_of_bounds
    )
    return facts, tuple(warnings)


def answer_nccl_tests(text: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The values of `KEYS` and warnings.

    Raises:
        CheckFailedError: it is no output of nccl-tests.
    """
    facts, warnings = parse_nccl_tests(text)
    first, last = _ends(facts)
    factor = bus_factor(facts.collective, facts.rank_count)
    half = last.out_of_place if last else None
    seen = half.bus_gb_per_s / half.gb_per_s if half and half.gb_per_s and half.bus_gb_per_s is not None else None
    return {
        "collective": facts.collective,
        "nranks": facts.rank_count,
        "nodes": None if facts.hosts is None or facts.rank_count is None else len(facts.hosts),
        "result_rows": facts.row_count,
        "first_size": first.size_bytes if first else None,
        "last_size": last.size_bytes if last else None,
        "avg_busbw_GBs": facts.average_gb_per_s,
        "out_of_bounds": facts.out_of_bounds,
        "last_row": {**_half("oop", last.out_of_place), **_half("ip", last.in_place)} if last else None,
        "busbw_over_algbw_expected": None if factor is None else round(factor, 5),
        "busbw_over_algbw_seen": None if seen is None else round(seen, 5),
    }, warnings


def _ends(facts: CollectiveRun) -> tuple[ResultRow | None, ResultRow | None]:
    """The first and the last row; None where that one is damaged."""
    by_place = {row.place: row for row in facts.rows}
    return by_place.get(0), by_place.get(facts.row_count - 1)


def _half(prefix: str, half: Half | None) -> dict[str, Any]:
    return {
        f"{prefix}_time_us": half.time_us if half else None,
        f"{prefix}_algbw": half.gb_per_s if half else None,
        f"{prefix}_busbw": half.bus_gb_per_s if half else None,
        f"{prefix}_wrong": half.wrong if half else None,
    }
