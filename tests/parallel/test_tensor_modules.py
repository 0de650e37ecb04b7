"""A model that shares key heads among query heads, normalises heads and embeds by columns, and how it may be laid wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from launch import launch
from sampling import sampled, selected
from tensor_cases import difference, job, laid, micro_batches, step_of, whole
from torch import Tensor, nn

from toolkit.errors import ToolkitError
from toolkit.jobs.train_lm import loss_of as LOSS_OF
from toolkit.parallel.outline import Outline

BOUND = 1e-5
WIDTH, HEADS, KEY_HEADS, HEAD_WIDTH = 32, 8, 4, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.key_heads = HEADS, KEY_HEADS
        self.norm = nn.RMSNorm(WIDTH)
        self.query = nn.Linear(WIDTH, HEADS * HEAD_WIDTH)
        self.key = nn.Linear(WIDTH, KEY_HEADS * HEAD_WIDTH, bias=False)  # a bias would have no gradient but rounding
        self.value = nn.Linear(WIDTH, KEY_HEADS * HEAD_WIDTH)
        self.query_norm = nn.RMSNorm(HEAD_WIDTH)
        self.drop = nn.Dropout(0.0)
        self.out = nn.Linear(HEADS * HEAD_WIDTH, WIDTH)

    def forward(self, stream: Tensor) -> Tensor:
        normal = self.norm(stream)
        query, key, value = (
            matrix(normal).unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2)
            for matrix in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(
            self.query_norm(query), key, value, is_causal=True, enable_gqa=True
        )
        return stream + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(65, WIDTH)  # odd on purpose: its columns are split
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 68)

    def forward(self, text: Tensor) -> Tensor:
        stream = self.embedding(text)
        for block in self.blocks:
            stream = block(stream)
        return self.head(self.norm(stream))


OUTLINE = Outline(
    blocks="blocks",
    before=("embedding",),
    after=("norm", "head"),
    tensor={
        "embedding": "embedding_column",
        "blocks.*.norm": "norm",
        "blocks.*.query": "column by heads",
        "blocks.*.key": "column by key_heads",
        "blocks.*.value": "column by key_heads",
        "blocks.*.query_norm": "piece",
        "blocks.*.drop": "norm",
        "blocks.*.out": "row",
        "norm": "norm",
        "head": "head",
    },
)


def but(name: str, word: str | None) -> Outline:
    tensor = dict(OUTLINE.tensor) | {name: word}
    return replace(OUTLINE, tensor={name: word for name, word in tensor.items() if word})


GATHERED = but("head", "head_gathered")


def smooth(logits: Tensor, following: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten(), label_smoothing=0.1)


def spread(logits: Tensor, following: Tensor) -> Tensor:
    return nn.functional.log_softmax(logits, -1).square().mean()


def steps(world, config, outline=OUTLINE, loss_of=None) -> dict[str, Tensor]:
    from toolkit.jobs import train_lm

    train_lm.OUTLINE = outline
    train_lm.loss_of = loss_of or LOSS_OF
    model = laid(world, config, Grouped)
    step = step_of(model, config)
    stepped = [step.take(micro_batches(model, config, number)) for number in range(2)]
    return {
        "losses": torch.stack([one.loss for one in stepped]),
        "norms": torch.stack([one.grad_norm for one in stepped]),
        **{name: whole(tensor) for name, tensor in model.module.named_parameters()},
    }


def steps_of_all(world, layouts) -> None:
    for name, parallel in layouts.items():
        found = steps(world, job(parallel), *((GATHERED, smooth) if "smooth" in name else ()))
        if world.rank == 0:
            torch.save(found, world.run_dir / f"{name}.pt")


def refusals(world) -> None:
    plain, sequence = job({"tp": 2}), job({"tp": 2, "sequence": True}, {"context": 15})
    cases = [
        (plain, but("blocks.*.query_norm", None), None, "blocks.0.query_norm is replicated on every rank, but its inputs are different heads"),
        (plain, but("blocks.*.query_norm", "norm"), None, 'Fix: set the style of blocks.0.query_norm to "piece"'),
        (sequence, OUTLINE, None, "parallel.sequence: a sequence length of 15 is not divisible by 2 tensor-parallel ranks. Fix: use a length of 14 or 16"),
        (plain, OUTLINE, spread, "split by vocabulary differs from that of whole logits: its gradient differs by "),
        (plain, OUTLINE, smooth, 'torch cannot compute this loss on them: aten.masked_fill_.Scalar got mixed'),
        (plain, OUTLINE, smooth, 'Fix: set the style of the head to "head_gathered"'),
    ]  # fmt: skip
    for config, outline, loss_of, said in cases:
        with pytest.raises(ToolkitError) as error:
            steps(world, config, outline, loss_of)
        assert said in str(error.value), error.value


LAYOUTS = {
    2: {"two": {"tp": 2}, "pieces": {"tp": 2, "sequence": True}, "smooth_two": {"tp": 2}},
    4: {
        "four": {"tp": 4, "sequence": True},
        "sharded": {"tp": 2, "shard": 2},
        "smooth_pieces": {"tp": 2, "shard": 2, "sequence": True},
    },
}


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("modules")
    launch(steps_of_all, 1, folder, {"one": {}, "smooth": {}})
    names = {case["name"] for case in selected(request, "test_every_word_trains_as_one_process_does")}
    for ranks, layouts in LAYOUTS.items():
        launch(steps_of_all, ranks, folder, {name: layout for name, layout in layouts.items() if name in names})
    return folder


@pytest.mark.parametrize(
    ("name", "alone"),
    sampled(
        [(name, "smooth" if "smooth" in name else "one") for names in LAYOUTS.values() for name in names],
        lambda case: case[0] in (*LAYOUTS[2], "smooth_pieces"),
    ),
)
def test_every_word_trains_as_one_process_does(folder, name, alone):
    one, found = (torch.load(folder / f"{which}.pt", weights_only=True) for which in (alone, name))
    assert difference(found, one) < BOUND


def test_what_would_be_wrong_in_a_pass_is_refused_in_the_first(tmp_path):
    launch(refusals, 2, tmp_path)
