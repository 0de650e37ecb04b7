"""The columns of nccl-tests: by hand, against real tables, and as ours are read back."""

import dataclasses
import json
from pathlib import Path

import pytest
from nccl_table import read_table

from toolkit.errors import ToolkitError
from toolkit.metrics.collectives import (
    OPERATIONS,
    Limit,
    Measurement,
    RankPlace,
    Row,
    Series,
    Timing,
    read_measurement,
    sizes_of,
    write_measurement,
)
from toolkit.metrics.collectives_table import has_both, lines_of

CORPUS = Path(__file__).parents[3] / "shared" / "corpus" / "nccl-tests"


def measurement(ranks=4, operations=OPERATIONS, libraries=("torch", "mpi"), first=8, last=1 << 20, wrong=0):
    """What a measurement on two hosts could find; times have no pattern."""
    series = []
    for name in operations:
        for library in libraries:
            one = Series(name, library, "flat" if library == "torch" else "", 12.5, ())
            rows = []
            for size in sizes_of(OPERATIONS[name], first, last, 2, ranks):
                halves = [
                    Timing.of(OPERATIONS[name], size, ranks, (40 + size / 1.7e3 + place) / 1e6, 39e-6, wrong)
                    for place in range(2 if has_both(one) else 1)
                ]
                rows.append(
                    Row(size, OPERATIONS[name].count(size, ranks), halves[0], halves[1] if halves[1:] else None, None)
                )
            series.append(dataclasses.replace(one, rows=tuple(rows)))
    places = tuple(RankPlace(rank, 100 + rank, f"n{rank % 2}", rank // 2, "0x00", "CPU") for rank in range(ranks))
    return Measurement(
        schema_version=1, time="2026-01-01T00:00:00.000Z", toolkit="0.1.0", torch="2.13.0", mpi="MPICH Version: 5.0.2",
        backend="gloo", launcher="mpirun", iterations=20, warmup=5, first_bytes=first, last_bytes=last, factor=2,
        ranks=places, limit=Limit(12.5, "node", "1 active port, 100 Gbit/s"), series=tuple(series), left_out=(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "bandwidth", "bus", "count"),
    [
        # 8 MiB in 1 ms on 4 ranks are 8.388608 GB/s.
        ("all_reduce", 8.388608, 12.582912, 2097152),
        ("all_gather", 8.388608, 6.291456, 524288),
        ("reduce_scatter", 8.388608, 6.291456, 524288),
        ("all_to_all", 8.388608, 6.291456, 524288),
        ("broadcast", 8.388608, 8.388608, 2097152),
        ("reduce", 8.388608, 8.388608, 2097152),
        ("send_recv", 8.388608, 8.388608, 2097152),
    ],
)
def test_columns_by_hand(name, bandwidth, bus, count):
    operation = OPERATIONS[name]
    found = Timing.of(operation, 8 << 20, 4, 1e-3, 0.9e-3, 0)
    assert found == Timing(1000.0, 900.0, pytest.approx(bandwidth), pytest.approx(bus), 0)
    assert operation.count(8 << 20, 4) == count


@pytest.mark.skipif(not CORPUS.is_dir(), reason="the corpus is not here")
def test_real_tables_have_the_same_ratios_and_counts():
    by_program = {operation.program: operation for operation in OPERATIONS.values()}
    seen = set()
    for path in sorted(CORPUS.glob("*.json")):
        truth = json.loads(path.read_text())["truth"]
        operation = by_program.get(truth.get("collective") or "")
        if operation is None or not truth.get("nranks"):
            continue
        for row in read_table(path.with_suffix(".txt").read_text(errors="replace")).rows:
            half = row.halves[0]
            if not half.time_us or half.algbw < 1:
                continue
            ours = Timing.of(operation, row.size_bytes, truth["nranks"], half.time_us / 1e6, 1.0, 0)
            assert ours.algbw_gb_per_s == pytest.approx(half.algbw, rel=0.01)
            assert ours.busbw_gb_per_s == pytest.approx(half.busbw, rel=0.01)
            assert row.data_type != "float" or operation.count(row.size_bytes, truth["nranks"]) == row.count
            seen.add(truth["collective"])
    assert "all_reduce_perf" in seen


def test_sizes_grow_by_the_factor_and_give_every_rank_a_whole_part():
    assert sizes_of(OPERATIONS["all_reduce"], 8, 64, 2, 3) == (8, 16, 32, 64)
    assert sizes_of(OPERATIONS["all_reduce"], 6, 64, 4, 3) == (8, 32)
    assert sizes_of(OPERATIONS["all_gather"], 8, 500, 2, 3) == (48, 96, 192, 384)
    assert sizes_of(OPERATIONS["all_to_all"], 8, 47, 2, 3) == ()


@pytest.mark.parametrize("ranks", [2, 3, 4, 16])
def test_what_is_printed_is_read_back(ranks):
    found = measurement(ranks)
    blocks = "\n".join(lines_of(found)).split("# Collective test starting: ")[1:]
    assert len(blocks) == len(found.series) == 14
    for series, block in zip(found.series, blocks, strict=True):
        table = read_table(f"# Collective test starting: {block}")
        assert table.program == OPERATIONS[series.operation].program
        assert (len(table.hosts), len(set(table.hosts))) == (ranks, 2)
        assert [(row.size_bytes, row.count) for row in table.rows] == [
            (row.size_bytes, row.count) for row in series.rows
        ]
        assert table.average_busbw == pytest.approx(series.average_busbw_gb_per_s, rel=1e-4)
        last, printed = series.rows[-1], table.rows[-1]
        assert [half.busbw for half in printed.halves] == [
            pytest.approx(h.busbw_gb_per_s, abs=0.006) for h in last.halves
        ]
        assert (len(printed.halves) == 1) == (last.in_place is None)
        assert table.out_of_bounds == "0 OK"


def test_wrong_elements_are_told_in_the_row_and_below():
    lines = list(lines_of(measurement(2, ["all_reduce"], ["torch"], wrong=3)))
    table = read_table("\n".join(lines) + "\n")
    assert table.rows[-1].halves[1].wrong == "3"
    assert table.out_of_bounds == f"{2 * 3 * len(table.rows)} FAILED"


def test_times_that_are_not_steady_are_told():
    steady = measurement(2, ["all_reduce"], ["torch"], last=64)
    assert not [line for line in lines_of(steady) if "Unsteady" in line]
    (series,) = steady.series
    slow = dataclasses.replace(series.rows[0], in_place=Timing(100.0, 10.0, 1.0, 1.0, 0))
    unsteady = dataclasses.replace(
        steady, series=(dataclasses.replace(series, rows=(slow, *series.rows[1:])),), left_out=("mpi: no MPI",)
    )
    lines = list(lines_of(unsteady))
    assert "# Unsteady: 1 of 8 times are more than 2 times their median (--json)" in lines
    assert lines[-1] == "# Skipped: mpi: no MPI"


def test_a_file_is_read_as_it_was_written(tmp_path):
    found = measurement()
    write_measurement(tmp_path / "metrics" / "collectives.json", found)
    assert read_measurement(tmp_path / "metrics" / "collectives.json") == found


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda table: table.pop("factor"), ""),
        (lambda table: table.update(more=1), ""),
        (lambda table: table.update(factor="2"), ":factor"),
        (lambda table: table["series"][0].update(rows=None), ":series[0]:rows"),
        (lambda table: table["series"][0]["rows"][1].update(size_bytes=1.5), ":series[0]:rows[1]:size_bytes"),
        (lambda table: table["series"][0]["rows"][1]["in_place"].pop("wrong"), ":series[0]:rows[1]:in_place"),
    ],
)
def test_another_file_is_refused_by_its_place(tmp_path, change, where):
    path = tmp_path / "collectives.json"
    table = json.loads(measurement().to_json())
    change(table)
    path.write_text(json.dumps(table))
    with pytest.raises(ToolkitError) as caught:
        read_measurement(path)
    assert caught.value.where == f"{path}{where}" and caught.value.fix


def test_a_limit_of_a_node_is_one_of_what_must_leave_it():
    """16 ranks on 2 nodes with 25 GB/s each: of an all-reduce S leaves a node once, of an all-to-all 4 times."""
    limit = Limit(25.0, "node", "one port")
    bus = {name: operation.bus_limit(limit, 16, 2, 8) for name, operation in OPERATIONS.items()}
    assert bus["all_reduce"] == bus["all_gather"] == bus["reduce_scatter"] == pytest.approx(25 * (15 / 16) / (1 / 2))
    assert bus["all_to_all"] == pytest.approx(25 * (15 / 16) / 4)
    assert bus["broadcast"] == bus["reduce"] == bus["send_recv"] == 25.0
    of_ranks = Limit(300.0, "rank", "NVLink")
    assert {operation.bus_limit(of_ranks, 8, 1, 8) for operation in OPERATIONS.values()} == {300.0}
    assert OPERATIONS["all_reduce"].bus_limit(None, 8, 1, 8) is None
