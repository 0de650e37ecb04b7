"""Stages keep the whole model's names, and what cannot be cut is refused with the fix."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from toolkit.config.train import ParallelTable
from toolkit.errors import ToolkitError
from toolkit.jobs import train_lm
from toolkit.parallel.materialise import materialise
from toolkit.parallel.outline import Outline
from toolkit.parallel.pipeline import _refuse_ties_on_one_rank
from toolkit.parallel.pipeline_passes import PipelinePasses
from toolkit.parallel.stages import StagesOfRank, cut_stage, shared_weights

CUT = (range(2), range(2, 3), range(3, 5))


def gpt(*, tied: bool = True) -> nn.Module:
    with torch.device("meta"):
        return train_lm.GPT(train_lm.Arguments(layers=5, width=16, heads=2, context=8, tied=tied))


def names(module: nn.Module) -> set[str]:
    return {name.partition("_norm")[0] for name, _ in module.named_parameters()}


def test_blocks_keep_their_numbers_and_ends_are_left_out():
    first, middle, last = (cut_stage(gpt, train_lm.OUTLINE, CUT, stage) for stage in range(3))
    assert list(middle.blocks._modules) == ["2"] and middle.token_embedding is middle.head is None
    assert first.head is None and first.token_embedding is not None and last.norm is not None
    every = [name for stage in (first, middle, last) for name in dict(stage.named_parameters())]
    assert set(every) == set(dict(gpt(tied=False).named_parameters()))
    assert train_lm.OUTLINE.blocks_of(middle) is middle.blocks


def test_tied_weights_are_found_and_known_by_one_name():
    (shared,) = shared_weights(gpt(), train_lm.OUTLINE, CUT)
    assert (shared.name, shared.stages) == ("token_embedding.weight", (0, 2))
    assert shared.own_names == ("token_embedding.weight", "head.weight")
    assert shared_weights(gpt(tied=False), train_lm.OUTLINE, CUT) == []
    last = cut_stage(gpt, train_lm.OUTLINE, CUT, 2)
    known_as = {"head.weight": "token_embedding.weight"}
    whole = gpt()
    for module, known in ((last, known_as), (whole, {})):
        materialise(module, train_lm.initialise, 7, "cpu", known)
    assert torch.equal(last.head.weight, whole.token_embedding.weight)
    shown = StagesOfRank([last], train_lm.OUTLINE, known_as)
    assert "token_embedding.weight" in dict(shown.named_parameters())
    assert "head.weight" not in dict(shown.named_parameters()) and "head.weight" in shown.state_dict()
    assert shown.get_parameter("token_embedding.weight") is last.head.weight


class Nested(nn.Module):
    """Blocks within a module that has more than them, and one module at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Module()
        self.decoder.ends = nn.Linear(4, 4)
        self.decoder.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.decoder.register_buffer("angles", torch.ones(3))
        self.drop = nn.Dropout()


NESTED = Outline("decoder.layers", before=("decoder.ends",), after=("decoder.ends",))


def test_several_stages_are_shown_as_one_module():
    cut = tuple(range(start, stop) for start, stop in pairwise(range(5)))
    stages = [cut_stage(Nested, NESTED, cut, stage) for stage in (0, 2)]
    shown = StagesOfRank(stages, NESTED, {})
    every = {"decoder.angles", "decoder.ends", "decoder.layers.0", "decoder.layers.2"}
    assert {name.removesuffix(".weight").removesuffix(".bias") for name in shown.state_dict()} == every
    shown.eval()
    assert not any(module.training for stage in stages for module in stage.modules())
    shown.training = True  # as who puts each module back into the mode that it was in
    assert stages[0].training and stages[0].decoder.training and not stages[0].drop.training
    with pytest.raises(ToolkitError, match="the pipeline stages of one rank cannot be called as a model"):
        shown(torch.ones(4))
    assert [weight.stages for weight in shared_weights(Nested(), NESTED, cut)] == [(0, 3)] * 2


def test_a_parameter_of_no_stage_is_refused():
    with pytest.raises(
        ToolkitError,
        match=r"no pipeline stage would contain place_embedding\.weight, because no module in the Outline of GPT does",
    ) as refused:
        shared_weights(gpt(), Outline("blocks", ("token_embedding",), ("norm", "head")), CUT)
    assert "Outline.before or Outline.after" in refused.value.fix


def test_ties_that_would_need_more_than_two_ranks_or_less_are_refused():
    model = Nested()
    for block in model.decoder.layers:
        block.weight = model.decoder.layers[0].weight
    cut = (range(2), range(2, 3), range(3, 4))
    with pytest.raises(ToolkitError, match=r"expected decoder\.layers\.0\.weight in at most 2 pipeline stages, got 3"):
        shared_weights(model, NESTED, cut)
    model = Nested()
    model.decoder.layers[2].weight = model.decoder.layers[0].weight
    shared = shared_weights(
        model, Outline("decoder.layers", ("decoder.ends",)), tuple(range(n, n + 1) for n in range(4))
    )
    with pytest.raises(ToolkitError, match="is tied between the stages 0 and 2, which are on the same rank"):
        _refuse_ties_on_one_rank(shared, ParallelTable(pp=2, schedule="interleaved", stages_per_rank=2))


@pytest.mark.parametrize(
    ("sizes", "schedule", "message", "fix"),
    [
        ([3, 3, 2], "1f1b", "equal micro-batches, got 3, 3, 2 samples", "micro_batch = 2"),
        ([4], "gpipe", "1 micro-batch per step: a pipeline of 2 ranks requires at least 2", "micro_batch = 2"),
        (
            [1] * 7,
            "interleaved",
            "7 micro-batches per step are not divisible by 3 rounds",
            "batch = 12 and micro_batch = 1",
        ),
        ([2] * 5, "zero_bubble", "5 micro-batches per step are not divisible by 2 rounds", "micro_batch = 1"),
    ],
)
def test_micro_batches_that_no_schedule_takes_are_refused(sizes, schedule, message, fix):
    passes = PipelinePasses({}, 2, None, ParallelTable(pp=2, schedule=schedule), 2.0, "cpu", ())
    micro_batches: list[tuple[Tensor, Tensor]] = [(torch.zeros(size, 8), torch.zeros(size, 8)) for size in sizes]
    with pytest.raises(ToolkitError, match=message) as refused:
        passes.run(micro_batches, None, None, torch.autocast("cpu", enabled=False))
    assert refused.value.fix.removeprefix("set ").startswith(fix)
