"""The picture of a measurement: what is drawn, and what cannot be."""

import dataclasses
import re
import sys

import pytest

from toolkit.errors import ToolkitError
from toolkit.metrics.collectives import OPERATIONS, Limit, Measurement, RankPlace, Row, Series, Timing, sizes_of
from toolkit.observe.pictures.collectives import draw_measurement
from toolkit.observe.pictures.formats import check_picture


def series(operation, library, algorithm, model):
    rows = []
    for size in sizes_of(OPERATIONS[operation], 8, 1 << 20, 8, 4):
        half = Timing.of(OPERATIONS[operation], size, 4, (30 + size / 2e3) / 1e6, (29 + size / 2e3) / 1e6, 0)
        rows.append(Row(size, size // 4, half, half, 25 + size / 2.2e3 if model else None))
    return Series(operation, library, algorithm, 11.5, tuple(rows))


def measurement():
    return Measurement(
        schema_version=1, time="2026-01-01T00:00:00.000Z", toolkit="0.1.0", torch="2.13.0", mpi="MPICH Version: 5.0.2",
        backend="gloo", launcher="mpirun", iterations=20, warmup=5, first_bytes=8, last_bytes=1 << 20, factor=8,
        ranks=tuple(RankPlace(rank, rank, "n1", rank, "0x00", "CPU") for rank in range(4)),
        limit=Limit(11.5, "rank", "memcpy of one core, 1 MiB at a time, measured"),
        series=(
            series("all_reduce", "torch", "flat", True), series("all_reduce", "torch", "ring", True),
            series("all_reduce", "mpi", "", False), series("all_gather", "torch", "flat", False),
        ),
        left_out=(),
    )  # fmt: skip


def words_of(picture):
    """matplotlib writes each text of an SVG as a comment, before its letters as paths."""
    return re.findall(r"<!-- (.*?) -->", picture.read_text())


def test_measurement_model_and_limit_are_drawn_for_each_operation(tmp_path):
    draw_measurement(measurement(), tmp_path / "picture.svg")
    words = words_of(tmp_path / "picture.svg")
    for said in ("all_reduce: time", "all_gather: bus bandwidth", "gloo, ring, in place", "MPI, in place", "4 KiB"):
        assert said in words
    assert words.count("model") == 1, "nothing is predicted of all-gathers"
    assert sum(word.startswith("limit 11.5 GB/s: memcpy of one core") for word in words) == 2
    assert "Collectives of 4 ranks on 1 node (CPU), torch 2.13.0, 2026-01-01" in words


def test_without_model_and_limit_neither_is_in_the_legend(tmp_path):
    plain = measurement()
    plain = dataclasses.replace(
        plain, limit=None, series=(dataclasses.replace(plain.series[3], busbw_limit_gb_per_s=None),)
    )
    draw_measurement(plain, tmp_path / "picture.svg")
    words = words_of(tmp_path / "picture.svg")
    assert "model" not in words and not [word for word in words if word.startswith("limit")]


def test_the_ending_says_which_kind(tmp_path):
    draw_measurement(measurement(), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_drawn_is_refused_before_anything_is_measured(tmp_path, monkeypatch):
    with pytest.raises(ToolkitError, match=r"unsupported image format: \.gif") as caught:
        check_picture(tmp_path / "picture.gif")
    assert ".svg" in caught.value.fix
    with pytest.raises(ToolkitError, match="folder not found"):
        check_picture(tmp_path / "nowhere" / "picture.svg")
    with pytest.raises(ToolkitError, match="no measured sizes to draw"):
        draw_measurement(dataclasses.replace(measurement(), series=()), tmp_path / "picture.svg")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ToolkitError, match="matplotlib is not installed"):
        check_picture(tmp_path / "picture.svg")
