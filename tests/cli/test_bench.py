"""`toolkit bench collectives` as it is typed: it starts ranks, is started by mpirun, and prints what a run wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sampling import sampled

from toolkit.metrics.collectives import read_measurement

QUICK = ("--sizes", "8..1K", "--factor", 8, "--iterations", 2, "--warmup", 1)


@pytest.fixture
def here(toolkit, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(toolkit.folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return toolkit.folder


def mpirun(ranks: int, *argv: object) -> subprocess.CompletedProcess[str]:
    """`mpirun -n RANKS toolkit ...`, outside any run."""
    bin_folder = Path(sys.executable).parent
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("TOOLKIT_", "SLURM_"))}
    words = [bin_folder / "mpirun", "-n", ranks, bin_folder / "toolkit", *argv]
    return subprocess.run([*map(str, words)], env=plain, capture_output=True, text=True, timeout=240)


def test_it_starts_ranks_and_what_they_wrote_can_be_printed_and_drawn(toolkit, here) -> None:
    said = toolkit("bench", "collectives", "--ranks", 2, *QUICK)
    assert said.code == 0, said
    lines = said.out.splitlines()
    assert lines[0] == "# Collective test starting: all_reduce_perf"
    assert lines[-1] == "# Collective test concluded: all_reduce_perf"
    assert sum(line.startswith("#  Rank ") for line in lines) == 2
    assert sum(not line.startswith("#") for line in lines) == 3
    assert "# Out of bounds values : 0 OK" in lines

    again = toolkit("bench", "collectives", "--result", "last", "-o", "picture.svg")
    assert (again.code, again.out) == (0, said.out) and Path("picture.svg").is_file()
    (path,) = toolkit.runs.glob("*/*/metrics/collectives.json")
    found = read_measurement(path)
    assert found.limit is not None and found.limit.source.startswith("memcpy of one core")
    assert json.loads(toolkit.ok("bench", "collectives", "--result", path, "--json")) == json.loads(found.to_json())


def test_under_mpirun_the_ranks_measure_and_every_operation_of_mpi_is_right(here) -> None:
    done = mpirun(3, "bench", "collectives", "--operation", "all", "--mpi", "--json", "--sizes", "192", *QUICK[4:])
    assert done.returncode == 0, done.stderr
    table = json.loads(done.stdout)
    assert table["mpi"] and table["left_out"] == []
    assert [one["library"] for one in table["series"]] == ["torch", "mpi"] * 7
    rows = {one["operation"]: one["rows"][0] for one in table["series"] if one["library"] == "mpi"}
    assert all(row[half]["wrong"] == 0 for row in rows.values() for half in ("out_of_place", "in_place")), rows


@pytest.mark.evidence
def test_where_no_mpi_started_the_ranks_mpi_is_left_out_and_that_is_said(here) -> None:
    script = [sys.executable, "-m", "torch.distributed.run", "--no-python", "--nproc-per-node", "2"]
    argv = [*script, str(Path(sys.executable).with_name("toolkit")), "bench", "collectives", "--mpi", *map(str, QUICK)]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("TOOLKIT_")}
    done = subprocess.run(argv, env=plain, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "# Skipped: mpi: torchrun started the ranks" in done.stdout


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--ranks", 1], "expected two or more ranks, got one"),
        (["--ranks", 1], "Fix: start two ranks: `toolkit bench collectives --ranks 2`"),
        (["--sizes", "8..x"], "--sizes: 'x' is not a valid size"),
        (["--operation", "allreduce"], "--operation: unknown name 'allreduce'. Fix: did you mean 'all_reduce'"),
        (["--operation", "all_gather", "--ranks", 4, "--sizes", 32], "--sizes: no size up to 32"),
        (["--sizes", "0..1K"], "--sizes: '0..1K' starts with 0, which no factor increases. Fix: set 8..1K"),
        (["--backend", "nccl"], "--backend: nccl requires GPUs, but this machine has none. Fix: omit the backend"),
        (["--operation", "all_gather", "--algorithm", "ring"], "--algorithm: 'ring' applies only to all_reduce"),
        (
            ["--algorithm", "hierarchical"],
            "--algorithm: all-reduce algorithm 'hierarchical' requires two nodes or more",
        ),
        (["-o", "picture.gif"], "picture.gif: unsupported image format: .gif"),
    ],
)
def test_mistakes_are_told_before_anything_is_started(toolkit, here, monkeypatch, argv, said) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    told = toolkit("bench", "collectives", *argv)
    assert told.code == 2 and said in told.err and not toolkit.runs.exists()
    assert told.err.count("\n") == 1, "once, and nothing else"


def test_a_run_that_measured_nothing_is_named(toolkit, here) -> None:
    toolkit.submit(toolkit.job("true"))
    toolkit.ok("wait", "last")
    told = toolkit("bench", "collectives", "--result", "last")
    assert told.code == 4 and "no measurement of collectives found" in told.err


@pytest.mark.parametrize(
    ("ranks", "argv", "said"),
    sampled(
        [
            (1, [], "expected two or more ranks, got one"),
            (2, ["--backend", "nccl"], "--backend: nccl requires GPUs"),
            (2, ["--ranks", 3], "--ranks 3: mpirun has already started 2 ranks. Fix: omit --ranks"),
            (
                2,
                ["--algorithm", "hierarchical"],
                "--algorithm: all-reduce algorithm 'hierarchical' does not support this layout",
            ),
        ],
        lambda case: "--ranks" in case[1],
    ),
)
def test_mpiruns_ranks_refuse_with_one_voice(here, ranks, argv, said) -> None:
    done = mpirun(ranks, "bench", "collectives", *argv)
    assert done.returncode != 0 and done.stdout == ""
    told = [line for line in done.stderr.splitlines() if line.startswith("toolkit: ")]
    assert len(told) == 1 and said in told[0], done.stderr
