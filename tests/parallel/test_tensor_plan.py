"""What is refused before a model takes memory: outlines that do not fit it, and sizes that ranks cannot share equally."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from toolkit.config.train import ParallelTable
from toolkit.errors import ToolkitError
from toolkit.jobs.train_lm import GPT, OUTLINE, Arguments
from toolkit.parallel.tensor_plan import Split, tensor_plan

ARGUMENTS = Arguments(layers=2, width=48, heads=6, context=32)


def plan(
    ranks: int, sequence: bool = False, args: Arguments = ARGUMENTS, *, size: int = 0, **tensor: str | None
) -> dict[str, Split]:
    """Of the shipped model; `tensor` changes its outline, and leaves out what is None; "__" stands for a dot."""
    with torch.device("meta"):
        model = GPT(args)
    words = dict(OUTLINE.tensor) | {name.replace("__", "."): word for name, word in tensor.items()}
    outline = replace(OUTLINE, tensor={name: word for name, word in words.items() if word is not None})
    return tensor_plan(model, outline, ParallelTable(tp=ranks, sequence=sequence), size or ranks)


def refused(*given, **named) -> str:
    with pytest.raises(ToolkitError) as error:
        plan(*given, **named)
    return "\n".join(map(str, (error.value, *error.value.others)))


def test_the_shipped_model_is_planned_whole():
    found = plan(2)
    assert found["blocks.1.query_key_value"] == Split("column", 6, "heads of blocks.*")
    assert found["head"] == Split("head", 256, "outputs of head")
    assert [name for name in found if found[name].word == "norm"][-1] == "norm"
    assert plan(1) == {}


@pytest.mark.parametrize(
    ("ranks", "size", "args", "said"),
    [
        (4, 4, {}, "parallel.tp: 6 heads of blocks.* are not divisible by 4 tensor-parallel ranks. Fix: set parallel.tp to 2 with 2 ranks"),
        (3, 3, {"heads": 4}, " and 256 outputs of head are not divisible by 3 tensor-parallel ranks. Fix: set parallel.tp to 2 with 2 ranks or 4 with 4 ranks"),
        (3, 6, {"heads": 4}, "Fix: set parallel.tp to 2 with 4 ranks or 4 with 8 ranks"),
        (16, 16, {"heads": 16, "width": 16 * 3, "context": 40}, "40 rows of place_embedding are not divisible by 16 tensor-parallel ranks. Fix: set parallel.tp to 8 with 8 ranks"),
        (2, 2, {"context": 31}, "31 rows of place_embedding are not divisible by 2 tensor-parallel ranks. Fix: set parallel.tp to 1, or change these numbers to 32"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_divide_are_refused_with_the_nearest_that_do(ranks, size, args, said):
    assert refused(ranks, size=size, args=replace(ARGUMENTS, **args)).endswith(said)


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_proposed_is_taken(ranks):
    assert plan(ranks, args=replace(ARGUMENTS, heads=4))


def test_all_that_does_not_divide_is_said_at_once():
    said = refused(5, args=replace(ARGUMENTS, context=31))
    assert said == (
        "parallel.tp: 256 rows of token_embedding, 31 rows of place_embedding, 6 heads of blocks.*, 48 inputs of "
        "blocks.*.attention_out, 192 outputs of blocks.*.perceptron_in, 192 inputs of blocks.*.perceptron_out and 256 "
        "outputs of head are not divisible by 5 tensor-parallel ranks. Fix: set parallel.tp to 1, or change these numbers to 260 and 35 "
        "and 10 and 50 and 195 and 195 and 260"
    )


def test_an_outline_without_a_plan_is_refused():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(
        ToolkitError, match=r"parallel\.tp is 2, but the Outline of Sequential has no style for any module\..*'column'"
    ):
        tensor_plan(model, replace(OUTLINE, tensor={}), ParallelTable(tp=2), 2)


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        ({"blocks__*__attention_outs": "row"}, "GPT has no module 'blocks.*.attention_outs'. Fix: use one of its modules: blocks.*.attention_out"),
        ({"heads": "head"}, "GPT has no module 'heads'. Fix: use one of its modules: head"),
        ({"blocks__*__attention_out": "rows"}, "'rows' is not a valid style for blocks.0.attention_out. Fix: use row"),
        ({"blocks__*__attention_out": "row by heads"}, "'row by heads' is not a valid style for blocks.0.attention_out"),
        ({"blocks__*__attention_norm": "column"}, "the style 'column' requires nn.Linear, but blocks.0.attention_norm is a LayerNorm. Fix: use one of norm, piece"),
        ({"blocks__0": "row"}, "the style 'row' requires nn.Linear, but blocks.0 is a Block. Fix: use the name of the nn.Linear in blocks.0"),
        ({"blocks__*__query_key_value": "column by head"}, " needs a number of groups as Block.head, got None. Fix: use an attribute that is a number: heads"),
        ({"blocks__1__attention_out": "column"}, "blocks.1.attention_out has the style 'row' from one pattern and 'column' from 'blocks.1.attention_out'"),
    ],
)  # fmt: skip
def test_outlines_that_do_not_fit_the_model_are_refused_with_what_does(tensor, said):
    assert said in refused(2, **tensor)
    assert said in refused(1, **tensor), "whoever wrote it hears of it before there are more ranks"


def test_with_pieces_of_the_sequence_every_parameter_must_be_in_the_plan():
    plan(2, norm=None)
    said = refused(2, sequence=True, norm=None)
    assert "must be summed; missing: norm. Fix: set a style for norm, one of 'column', 'row'" in said
