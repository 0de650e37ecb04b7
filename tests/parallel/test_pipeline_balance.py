"""Blocks are dealt so that the slowest stage is as fast as can be, by times that rank 0 measured, once in a run."""

from __future__ import annotations

import json
import time
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from toolkit.errors import ToolkitError
from toolkit.jobs import train_lm
from toolkit.parallel import layer_costs
from toolkit.parallel.balance import Costs, cut_evenly
from toolkit.parallel.layer_costs import Trial, kept_or_measured_seconds, measured_seconds, parameter_counts
from toolkit.parallel.materialise import parameters_on_meta
from toolkit.parallel.outline import Outline
from toolkit.rundir.layout import RunDirectory

FP32 = torch.autocast("cpu", enabled=False)
ARGUMENTS = train_lm.Arguments(layers=3, width=16, heads=2, context=8, dropout=0.0, tied=False)
TEXT = torch.zeros(2, 8, dtype=torch.int64)


def all_cuts(blocks: int, stages: int) -> list[tuple[range, ...]]:
    inner = combinations(range(1, blocks), stages - 1)
    return [tuple(map(range, (0, *ends), (*ends, blocks))) for ends in inner]


cost = st.integers(0, 20).map(float)


@given(blocks=st.lists(cost, min_size=1, max_size=8), stages=st.integers(1, 8), before=cost, after=cost)
def test_no_cut_has_a_faster_slowest_stage(blocks, stages, before, after):
    costs = Costs(before, tuple(blocks), after)
    if stages > len(blocks):
        with pytest.raises(ToolkitError, match=rf"expected at least {stages} blocks for {stages} pipeline stages, got"):
            cut_evenly(costs, stages)
        return
    cut = cut_evenly(costs, stages)
    assert cut in all_cuts(len(blocks), stages)
    assert max(costs.of_stages(cut)) == min(max(costs.of_stages(one)) for one in all_cuts(len(blocks), stages))


def test_a_costly_end_takes_blocks_off_its_stage():
    assert cut_evenly(Costs(0.0, (1.0,) * 8, 2.0), 2) == (range(5), range(5, 8))
    assert cut_evenly(Costs(0.0, (1.0, 1.0, 1.0, 4.0), 0.0), 2) == (range(3), range(3, 4))


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return train_lm.GPT(ARGUMENTS)


def test_parameters_count_where_they_are():
    counts = parameter_counts(on_meta(), train_lm.OUTLINE)
    assert counts == Costs((256 + 8) * 16, (12 * 16**2 + 9 * 16,) * 3, 2 * 16 + 256 * 16)


def test_every_part_is_timed_alone():
    class Slow(train_lm.GPT):
        def forward(self, text):
            time.sleep(0.01 * len(self.blocks) + 0.04 * (self.head is not None))
            return super().forward(text)

    def build() -> nn.Module:
        with torch.device("meta"):
            return Slow(ARGUMENTS)

    costs = measured_seconds(build, train_lm.OUTLINE, Trial(TEXT, FP32), "cpu")
    assert costs.before < 0.01 <= min(costs.blocks) <= max(costs.blocks) < 0.04 <= costs.after


def test_what_else_runs_does_not_make_equal_blocks_differ():
    """The fourth is of another shape; the fifth takes twice the time, which is no noise."""
    shapes = ["wide", "wide", "wide", "narrow", "wide"]
    times = layer_costs._without_noise([1.0, 1.1, 0.9, 0.5, 2.0], shapes)
    assert times == (1.05, 1.05, 1.05, 0.5, 2.0)


def test_a_run_keeps_its_times(tmp_path, monkeypatch):
    run = RunDirectory(tmp_path)
    given = (on_meta, train_lm.OUTLINE, Trial(TEXT, FP32), "cpu", run)
    first, source = kept_or_measured_seconds(*given)
    assert source == "measured on rank 0"
    assert kept_or_measured_seconds(*given) == (first, "measured by an earlier attempt")
    kept = json.loads(run.layer_times.read_text())
    monkeypatch.setattr(layer_costs, "measured_seconds", lambda *_: Costs(1.0, (2.0,), 3.0))
    for damaged in ("{", "[]", json.dumps(kept | {"parameters": {}}), json.dumps(kept | {"seconds": {"before": 1}})):
        run.layer_times.write_text(damaged)
        assert kept_or_measured_seconds(*given)[1] == "measured on rank 0"


def test_a_model_that_needs_all_its_parts_is_refused():
    class Whole(train_lm.GPT):
        def forward(self, text):
            return self.head(self.norm(self.blocks[0](self._embedded(text))))

    def build() -> nn.Module:
        with torch.device("meta"):
            return Whole(ARGUMENTS)

    with pytest.raises(ToolkitError, match="Whole cannot run with only the modules before the blocks") as refused:
        measured_seconds(build, train_lm.OUTLINE, Trial(TEXT, FP32), "cpu")
    assert "let `forward` skip" in refused.value.fix


def test_a_model_of_blocks_alone_is_timed():
    class Row(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
            self.register_buffer("count", torch.zeros(1, dtype=torch.int64))

        def forward(self, stream):
            for row in self.rows:
                stream = row(stream)
            return stream

    def build() -> nn.Module:
        with parameters_on_meta(0):
            return Row()

    assert len(measured_seconds(build, Outline("rows"), Trial(torch.ones(2, 4), FP32), "cpu").blocks) == 3
