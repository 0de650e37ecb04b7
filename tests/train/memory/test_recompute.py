"""Recomputed blocks: the same gradients to the last bit, fewer saved bytes, and the cheapest choice under a budget."""

from __future__ import annotations

import copy
import itertools
import json
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from launch import job, launch, said_by
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import CheckpointPolicy

from toolkit.errors import ToolkitError
from toolkit.jobs import train_lm
from toolkit.jobs.train_lm import GPT, Arguments, loss_of
from toolkit.parallel.distribute import Design, Part, distribute
from toolkit.parallel.layer_costs import Trial
from toolkit.parallel.materialise import parameters_on_meta
from toolkit.parallel.mesh import make_mesh
from toolkit.parallel.outline import Outline
from toolkit.topology.gather import gather_topology
from toolkit.train.blocks import blocks_of
from toolkit.train.memory.activations import Activations, BlockActivations, cheapest, measure_activations
from toolkit.train.memory.recompute import _policy, forget_recompute, is_recomputed, recompute, recompute_block

TEXT = torch.arange(128).view(4, 32) % 256
BATCH = (TEXT, TEXT)
FP32 = torch.autocast("cpu", enabled=False)


def settings(kind: str, **given: Any) -> SimpleNamespace:
    return SimpleNamespace(
        recompute=kind, **{"recompute_every": 1, "recompute_above_mb": 0.0, "activation_budget_gb": 0.0} | given
    )


def gpt(**given: Any) -> GPT:
    torch.manual_seed(5)
    return GPT(Arguments(**{"layers": 3, "width": 32, "heads": 2, "context": 32, "dropout": 0.3} | given))


def gradients(model: nn.Module, precision: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(11)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == torch.bfloat16):
        found = loss(model)
    found.backward()
    grown = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    return [found.detach(), torch.rand(4), *grown]  # the stream goes on as without recomputation


def loss(model: nn.Module) -> Tensor:
    return loss_of(model(TEXT), TEXT)


def saved_bytes(model: nn.Module) -> int:
    """The bytes that a forward pass really saves for its backward pass, without parameters."""
    own = {one.untyped_storage().data_ptr() for one in model.parameters()}
    saved: dict[int, Tensor] = {}

    def save(tensor: Tensor) -> None:
        if tensor.untyped_storage().data_ptr() not in own:
            saved[tensor.untyped_storage().data_ptr()] = tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(save, lambda nothing: nothing):
        loss(model)
    return sum(one.untyped_storage().nbytes() for one in saved.values())


def measured(model: nn.Module) -> Activations:
    shapes = TEXT.to("meta")
    return measure_activations(model, lambda twin: loss_of(twin(shapes), shapes), blocks_of(model))


KINDS = [
    settings("every"),
    settings("every", recompute_every=2),
    settings("selective"),
    settings("large", recompute_above_mb=0.01),
    settings("budget", activation_budget_gb=0.001),
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.recompute}-{kind.recompute_every}")
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_gradients_are_the_same_to_the_last_bit_with_dropout_and_fewer_bytes_are_kept(kind, precision):
    plain, model = gpt(), gpt()
    names = recompute(model, kind, loss_of=loss_of, micro_batch=BATCH)
    assert names
    assert names == [name for name, block in blocks_of(model).items() if is_recomputed(block)]
    for found, expected in zip(gradients(model, precision), gradients(plain, precision), strict=True):
        assert torch.equal(found, expected)
    kept = [saved_bytes(one) for one in (model, plain)]
    assert kept[0] < kept[1]
    assert list(model.state_dict()) == list(plain.state_dict())


def test_each_block_that_recomputes_frees_what_was_measured():
    model = gpt()
    before = measured(model)
    total = saved_bytes(model)
    assert total <= before.peak_bytes([]) <= 1.2 * total, "attention with its scores"
    recompute(model, settings("every", recompute_every=2))
    freed = total - saved_bytes(model)
    block = before.blocks[1]
    assert freed == pytest.approx(block.kept_bytes - block.output_bytes, rel=0.15)
    assert block.flops > 0
    assert block.output_bytes == 4 * 32 * 32 * 4


def test_selective_keeps_matrix_products_and_so_more_than_all():
    kept = {}
    for kind in ("every", "selective", "none"):
        model = gpt(dropout=0.0)
        recompute(model, settings(kind))
        kept[kind] = saved_bytes(model)
    counted = []

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            counted.append(str(operation))
            return operation(*args, **(kwargs or {}))

    products = {}
    for kind in ("none", "every", "selective"):
        model = gpt(dropout=0.0)
        recompute(model, settings(kind))
        found = loss(model)
        counted.clear()
        with Counting():
            found.backward()
        products[kind] = sum(name.startswith(("aten.mm", "aten.addmm", "aten.bmm")) for name in counted)
    assert products["selective"] == products["none"] < products["every"]


def test_measuring_changes_neither_streams_nor_buffers():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout())
    before, stream = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    measure_activations(model, lambda twin: twin(torch.randn(2, 3, 8, 8, device="meta")), ())
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_copy_computes_with_its_own_weights():
    model = gpt()
    recompute(model, settings("every"))
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(is_recomputed(block) for block in other.blocks)
    plain = gpt()
    for found, expected in zip(gradients(other), gradients(plain), strict=True):
        assert torch.equal(found, expected)


def test_it_can_be_asked_for_twice_and_undone():
    model = gpt()
    total = saved_bytes(model)
    for block in (model.blocks[0], model.blocks[0]):
        recompute_block(block)
    forget_recompute(model)
    assert not any(is_recomputed(block) for block in model.blocks)
    assert saved_bytes(model) == total


def test_what_cannot_be_done_is_refused_with_the_fix():
    with pytest.raises(
        ToolkitError, match="activation checkpointing requires a model with repeated blocks, and Linear has no blocks"
    ):
        recompute(nn.Linear(2, 2), settings("every"))
    with pytest.raises(ToolkitError, match="pass loss_of and micro_batch to recompute"):
        recompute(gpt(), settings("large", recompute_above_mb=1.0))
    with pytest.raises(
        ToolkitError,
        match=r"train\.activation_budget_gb: expected activations of at most .* even if all 3 blocks are recomputed",
    ) as refused:
        recompute(gpt(), settings("budget", activation_budget_gb=1e-5), loss_of=loss_of, micro_batch=BATCH)
    enough = float(refused.value.fix.split()[3])
    assert (
        len(recompute(gpt(), settings("budget", activation_budget_gb=enough), loss_of=loss_of, micro_batch=BATCH)) > 0
    )
    assert recompute(gpt(), settings("budget", activation_budget_gb=9.0), loss_of=loss_of, micro_batch=BATCH) == []


class Turning(nn.Module):
    """A block with buffers that it computes with: angles, as of rotary embeddings, and those of a batch norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("angles", torch.rand(width), persistent=False)

    def forward(self, stream: Tensor) -> Tensor:
        turned = self.norm(stream) * self.angles.cos()
        return stream + self.down(torch.tanh(self.up(turned)))


class Turner(nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(3, 8)
        self.blocks = nn.ModuleList(Turning(8) for _ in range(blocks))
        self.last = nn.Linear(8, 1)

    def forward(self, stream: Tensor) -> Tensor:
        stream = self.first(stream) if self.first is not None else stream
        for block in self.blocks:
            stream = block(stream)
        return self.last(stream) if self.last is not None else stream


TURNER = Outline("blocks", ("first",), ("last",), {"blocks.*.up": "column", "blocks.*.down": "row"})
ROWS = torch.rand(6, 3)


def mean_square(twin: nn.Module, rows: Tensor = ROWS) -> Tensor:
    return twin(rows.to("meta")).square().mean()


def test_a_model_with_buffers_is_measured_on_shapes_wherever_it_is():
    torch.manual_seed(1)
    real = Turner()
    with parameters_on_meta(1):
        shapes = Turner()
    before = {name: buffer.clone() for name, buffer in shapes.named_buffers()}
    found = [measure_activations(model, mean_square, blocks_of(model)) for model in (shapes, real)]
    assert found[0] == found[1] and found[0].blocks[0].kept_bytes > found[0].blocks[0].output_bytes > 0
    assert all(torch.equal(buffer, before[name]) for name, buffer in shapes.named_buffers())
    names = recompute(
        shapes,
        settings("budget", activation_budget_gb=found[0].peak_bytes([]) / 1e9 * 0.9),
        loss_of=nn.functional.mse_loss,
        micro_batch=(ROWS.to("meta"), torch.rand(6, 1).to("meta")),
    )
    assert names and shapes.blocks[0].angles.device.type == "cpu"


def test_a_model_that_does_not_run_on_shapes_is_refused_with_other_kinds():
    class Looking(Turner):
        def forward(self, stream: Tensor) -> Tensor:
            return super().forward(stream if stream.sum() > 0 else -stream)

    with parameters_on_meta(1):
        model = Looking()
    with pytest.raises(
        ToolkitError, match=r"train\.recompute: Looking cannot be measured.*choose \"every\" or"
    ) as refused:
        recompute(
            model,
            settings("large", recompute_above_mb=1.0),
            loss_of=nn.functional.mse_loss,
            micro_batch=(ROWS.to("meta"), ROWS.to("meta")),
        )
    assert "\n" not in str(refused.value)


def measured_parts(world, config) -> None:
    """What this rank's parts keep, when they are prepared, and the shapes that go into them."""
    shown = []

    def prepare(part: Part) -> None:
        rows, blocks = part.inputs(), blocks_of(part.module, ["blocks"])
        found = measure_activations(part.module, partial(mean_square, rows=rows), blocks)
        shown.append({"shape": tuple(rows.shape), "blocks": {one.name: one.kept_bytes for one in found.blocks}})

    design = Design(Turner, lambda name, tensor: nn.init.ones_(tensor), TURNER, prepare, Trial(ROWS, FP32))
    topology = gather_topology(world)
    distribute(design, world, make_mesh(world, config, topology), config, topology)
    (world.run_dir / f"parts-{world.rank}.json").write_text(json.dumps(shown))


@pytest.mark.parametrize("parallel", [{"tp": 2}, {"pp": 2, "balance": "even"}], ids=["tp", "pp"])
def test_what_is_measured_is_what_the_rank_has(tmp_path, parallel):
    launch(measured_parts, 2, tmp_path, job(parallel=parallel, micro_batch=1))
    parts = [json.loads((tmp_path / f"parts-{rank}.json").read_text())[0] for rank in (0, 1)]
    model = Turner()
    whole = measure_activations(model, mean_square, blocks_of(model))
    of_whole = {block.name: block.kept_bytes for block in whole.blocks}
    if "tp" in parallel:
        assert parts[0] == parts[1] and parts[0]["blocks"].keys() == of_whole.keys()
        assert all(parts[0]["blocks"][name] < of_whole[name] for name in of_whole), (
            "a half of what is between the matrices"
        )
    else:
        assert [part["shape"] for part in parts] == [[6, 3], [6, 8]]
        assert parts[0]["blocks"] | parts[1]["blocks"] == of_whole
        assert not parts[0]["blocks"].keys() & parts[1]["blocks"].keys()


def trained_by_budget(world, config) -> None:
    train_lm.main(world, config)


@pytest.mark.parametrize(
    ("parallel", "kind", "said"),
    [
        ({"tp": 2, "sequence": True}, {"recompute": "large", "recompute_above_mb": 0.001}, "blocks.0, blocks.1"),
        ({"pp": 2, "balance": "even"}, {"recompute": "large", "recompute_above_mb": 0.001}, "blocks.0"),
    ],
    ids=["tp", "pp"],
)
def test_a_job_recomputes_what_its_ranks_measure(tmp_path, parallel, kind, said):
    config = job(parallel=parallel, args={"layers": 2}, steps=2, **kind)
    launch(trained_by_budget, 2, tmp_path, config)
    assert f"recomputed in the backward pass: {said}\n" in said_by(tmp_path, 0)


costs = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 20), st.integers(0, 50)).map(
        lambda three: (three[0] + three[1], three[1], three[2])
    ),
    min_size=1,
    max_size=7,
)


def activations(blocks: list[tuple[int, int, int]], other: int = 5) -> Activations:
    return Activations(tuple(BlockActivations(str(number), *one) for number, one in enumerate(blocks)), other)


def best_flops(model: Activations, budget: int) -> int | None:
    names = [block.name for block in model.blocks]
    choices = itertools.chain.from_iterable(itertools.combinations(names, size) for size in range(len(names) + 1))
    fitting = [choice for choice in choices if model.peak_bytes(choice) <= budget]
    return min((flops(model, choice) for choice in fitting), default=None)


def flops(model: Activations, names: Any) -> int:
    return sum(block.flops for block in model.blocks if block.name in names)


def test_the_peak_is_where_one_block_is_whole_again_or_the_forward_pass_ends():
    model = activations([(10, 1, 1), (20, 2, 1), (30, 3, 1)])
    assert model.peak_bytes([]) == 5 + 60
    assert model.peak_bytes(["0"]) == 5 + 1 + 20 + 30
    assert model.peak_bytes(["0", "1", "2"]) == 5 + 1 + 2 + 3 + 30, "the last block beside the inputs of all"
    assert model.peak_bytes(["2"]) == 5 + 10 + 20 + 3 + 30, "what is wanted at once is not worth giving up"
    assert model.peak_bytes(["0", "1"]) == 5 + 1 + 2 + 30


@given(blocks=costs, budget=st.integers(1, 300))
def test_a_choice_meets_the_budget_and_holds_nothing_that_is_not_needed(blocks, budget):
    model = activations(blocks)
    try:
        chosen = cheapest(model, budget)
    except ToolkitError:
        assert (
            model.peak_bytes([block.name for block in model.blocks if block.kept_bytes > block.output_bytes]) > budget
        )
        return
    assert model.peak_bytes(chosen) <= budget
    for name in chosen:
        assert model.peak_bytes([one for one in chosen if one != name]) > budget


@given(
    count=st.integers(1, 7),
    block=st.tuples(st.integers(21, 60), st.integers(0, 20), st.integers(1, 50)),
    share=st.floats(0, 1),
)
def test_of_equal_blocks_as_few_recompute_as_can(count, block, share):
    model = activations([block] * count)
    least, most = model.peak_bytes([str(number) for number in range(count)]), model.peak_bytes([])
    budget = max(least, int(least + share * (most - least)))
    assert flops(model, cheapest(model, budget)) == best_flops(model, budget)


def on_shards(world) -> None:
    found = []
    for kind in ("none", "every", "selective"):
        model = gpt()
        recompute(model, settings(kind))
        mesh = init_device_mesh("cpu", (world.size,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        torch.manual_seed(world.rank)
        loss(model).backward()
        found.append([parameter.grad.to_local() for parameter in model.parameters()])
    for grown in found[1:]:
        assert all(torch.equal(one, plain) for one, plain in zip(grown, found[0], strict=True))


def test_a_sharded_model_recomputes_to_the_last_bit(tmp_path):
    launch(on_shards, 2, tmp_path)


def test_attention_that_draws_numbers_is_recomputed_with_all_else_that_draws():
    aten = torch.ops.aten
    for operation in (
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    ):
        schema = [argument.name for argument in operation._schema.arguments]
        place = schema.index("dropout_p")
        for dropout, expected in ((0.0, CheckpointPolicy.MUST_SAVE), (0.1, CheckpointPolicy.PREFER_RECOMPUTE)):
            given = [None] * place + [dropout]
            assert _policy(None, operation, *given) == expected
            assert _policy(None, operation, *given[:3], dropout_p=dropout) == expected
    assert _policy(None, aten.gelu.default) == CheckpointPolicy.PREFER_RECOMPUTE
