"""Local SGD: exchanges against a simulation in one process, and trainings with saves, other numbers of ranks and refusals."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
from launch import results_of, said_by
from tiny_training import TinyTraining, config_of, note, train
from torch import Tensor, nn

from toolkit.comm.communicator import Communicator
from toolkit.comm.sent_bytes import SentBytes
from toolkit.config.gradient_compression import GradientCompressionTable
from toolkit.config.layout_checks import check_layout
from toolkit.config.local_sgd import LocalSgdTable
from toolkit.config.request import resolve_job
from toolkit.config.shipped import shipped_jobs
from toolkit.errors import ToolkitError

RANKS, STEPS = 3, 7


def model_of(world_seed: int = 0) -> nn.Module:
    torch.manual_seed(world_seed)
    return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 8), nn.Linear(8, 1))


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * step + rank))
    optimizer.zero_grad()
    (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([one.detach().flatten() for one in model.parameters()])


def simulated(table: LocalSgdTable, steps: int = STEPS) -> Tensor:
    """The parameters of rank 0 after training all ranks in this process, with torch's SGD as outer optimizer."""
    from toolkit.train.local_sgd import fragments_of

    models = [model_of() for _ in range(RANKS)]
    optimizers = [optimizer_of(one) for one in models]
    outer = model_of()
    fragments = fragments_of(dict(outer.named_parameters()), table.fragments)
    momentum = table.outer_momentum
    by_average = table.algorithm == "average"
    outer_steps = torch.optim.SGD(
        outer.parameters(),
        lr=1.0 if by_average else table.outer_lr,
        momentum=0.0 if by_average else momentum,
        nesterov=not by_average and momentum > 0,
    )
    for step in range(1, steps + 1):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            take_step(model, optimizer, rank, step)
        number = [place * table.every // table.fragments for place in range(table.fragments)]
        due = fragments[number.index(step % table.every)] if step % table.every in number else []
        outer_steps.zero_grad()
        for name in due:
            kept, after = outer.get_parameter(name), torch.stack([one.get_parameter(name) for one in models]).detach()
            kept.grad = kept.detach() - after.mean(0)
        outer_steps.step()
        for model, name in product(models, due):
            model.get_parameter(name).data.copy_(outer.get_parameter(name))
    return flat(models[0])


TABLES = {
    "average": LocalSgdTable(algorithm="average", every=3),
    "diloco": LocalSgdTable(algorithm="diloco", every=2, outer_lr=0.5),
    "fragments": LocalSgdTable(algorithm="diloco", every=2, fragments=2),
    "diloco as average": LocalSgdTable(algorithm="diloco", every=3, outer_lr=1, outer_momentum=0),
}


def trained(world: Any, table: LocalSgdTable, **compression: Any):
    """A model after `STEPS` steps on this rank, its exchanges, and the bytes sent after each step."""
    from toolkit.train.local_sgd import LocalSgd

    model = model_of(0)
    optimizer = optimizer_of(model)
    config = config_of().model_copy(
        update={"local_sgd": table, "gradient_compression": GradientCompressionTable(**compression)}
    )
    local = LocalSgd(world, model, optimizer, config)
    local.begin(is_new=True)
    sent = []
    for step in range(1, STEPS + 1):
        take_step(model, optimizer, world.rank, step)
        sent.append(local.after_step(step))
    return model, local, sent


def equal_names(world: Any, model: nn.Module) -> list[str]:
    """The parameters whose bits are equal on all ranks."""
    tensors = [one.detach() for one in model.parameters()]
    gathered = Communicator(world).all_gather(flat(model)[None])
    parts = gathered.split([one.numel() for one in tensors], dim=1)
    names = [name for name, _ in model.named_parameters()]
    return [name for name, part in zip(names, parts, strict=True) if all(torch.equal(part[0], one) for one in part)]


def exchanges(world: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, table in TABLES.items():
        model, _, _ = trained(world, table)
        found[name] = float((flat(model) - simulated(table)).abs().max()) if world.rank == 0 else None
    compressed = {"algorithm": "int8", "min_elements": 32, "block": 16, "error_feedback": "on"}
    model, _, sent = trained(world, TABLES["diloco"].model_copy(update={"every": STEPS}), **compressed)
    dense, _, dense_sent = trained(world, TABLES["diloco"].model_copy(update={"every": STEPS}))
    found["int8"] = float((flat(model) - flat(dense)).abs().max())
    found["equal"] = equal_names(world, model) == [name for name, _ in model.named_parameters()]
    found["sent"] = [sent, dense_sent]
    return found


def merges(world: Any) -> dict[str, Any]:
    """What differs before and after a merge in the middle of three fragments, and the outer steps with and without it."""
    from toolkit.train.local_sgd import fragments_of

    table = LocalSgdTable(algorithm="diloco", every=6, fragments=3)
    with SentBytes() as all_sent:
        model, local, sent = trained(world, table)
    assert all_sent.total >= sum(sent) > 0
    groups = fragments_of(dict(model.named_parameters()), 3)
    outer, statistics = copy.deepcopy(local.outer), copy.deepcopy(model[1].running_mean)
    before = equal_names(world, model)
    local.merge(with_optimizer=True)
    momenta = nn.ParameterList([state["momentum_buffer"] for state in local._optimizer.state.values()])
    assert all(torch.equal(outer[kind][name], one) for kind in outer for name, one in local.outer[kind].items())
    after = [len(equal_names(world, model)), len(equal_names(world, momenta))]
    if world.rank == 1:
        del local._optimizer.state[model[0].bias]
    with pytest.raises(ToolkitError) as refused:
        local.merge(with_optimizer=True)
    return {
        "refused": refused.value.message,
        "groups": groups,
        "sent": sent,
        "before": before,
        "after": after,
        "statistics": [statistics.tolist(), model[1].running_mean.tolist()],
    }


def test_exchanges_equal_a_simulation_in_one_process(tmp_path):
    found = results_of(exchanges, RANKS, tmp_path)
    assert all(found[0][name] < 1e-6 for name in TABLES)
    assert all(0 < one["int8"] < 0.02 and one["equal"] for one in found)
    (*none, sent), (*_, dense) = found[0]["sent"]
    numbers = sum(one.numel() for one in model_of().parameters())
    assert not any(none) and dense >= 4 * numbers * 2 * (RANKS - 1) / RANKS
    assert sent < 0.6 * dense, "small parameters and buffers are sent dense"


def test_fragments_are_exchanged_at_their_own_steps_and_a_merge_makes_all_equal(tmp_path):
    found = results_of(merges, RANKS, tmp_path)
    first, second, last = found[0]["groups"]
    assert first and second and [*first, *second, *last] == [name for name, _ in model_of().named_parameters()]
    assert [bool(one) for one in found[0]["sent"]] == [step in (2, 4, 6) for step in range(1, STEPS + 1)]
    assert all(one["before"] == [] and one["after"] == [8, 8] for one in found)
    assert all("some ranks had none of 0.bias" in one["refused"] for one in found)
    assert found[1]["statistics"][0] != found[0]["statistics"][0] == found[1]["statistics"][1]


def job(
    local: dict[str, Any],
    compression: dict[str, Any] | None = None,
    every_steps: int = 0,
    steps: int = 12,
    **settings: Any,
):
    config = config_of(**settings)
    tables = {
        "train": config.train.model_copy(update={"steps": steps}),
        "local_sgd": config.local_sgd.model_validate(local),
        "gradient_compression": config.gradient_compression.model_validate(compression or {}),
        "checkpoint": config.checkpoint.model_copy(update={"every_steps": every_steps}),
    }
    return config.model_copy(update=tables)


def with_parameters(world: Any, config: Any) -> None:
    note(world, parameters=flat(train(world, config).model.module).tolist())


def run(folder: Any, *given: Any, ranks: int = 2, attempt: int = 0, **settings: Any) -> list[float]:
    """Train on all ranks; return the losses and then the parameters, which must be equal on all ranks."""
    tiny = TinyTraining(folder)
    tiny.launch(with_parameters, ranks, job(*given, **settings), attempt=attempt)
    parameters = [tiny.findings(rank)["parameters"] for rank in range(ranks)]
    assert all(one == parameters[0] for one in parameters)
    return [*(record.loss for record in tiny.records()), *parameters[0]]


def test_an_exchange_at_each_step_trains_as_ddp_does(tmp_path):
    sgd = {"optimizer": "sgd", "lr": 0.01, "clip_norm": 0.0, "steps": 6}
    wanted = run(tmp_path / "ddp", {}, **sgd)
    average = run(tmp_path / "average", {"algorithm": "average", "every": 1}, **sgd, check_replicas_every=2)
    diloco = run(tmp_path / "diloco", {"algorithm": "diloco", "every": 1, "outer_lr": 1, "outer_momentum": 0}, **sgd)
    assert average == pytest.approx(wanted, rel=1e-6, abs=1e-6)
    assert diloco == pytest.approx(average, rel=1e-6, abs=1e-6)


def test_a_run_shorter_than_the_interval_is_reported(tmp_path):
    run(tmp_path, {"algorithm": "average", "every": 9}, ranks=1, steps=2)
    assert "every 9 steps; a run of 2 steps averages only before validations and saves" in said_by(tmp_path, 0)


DILOCO = {"algorithm": "diloco", "every": 4, "fragments": 2, "outer_momentum": 0.5}
INT8 = {"algorithm": "int8", "min_elements": 32, "error_feedback": "on", "residual_saved": "exact"}


def test_a_resumed_run_repeats_every_bit_and_continues_on_other_numbers_of_ranks(tmp_path):
    settings = {"every_steps": 3, "validate_every": 4, "guard": "skip"}
    whole, parts = run(tmp_path / "whole", DILOCO, INT8, **settings), tmp_path / "parts"
    assert "local SGD (diloco): changes of parameters averaged over 2 ranks every 4 steps in 2 fragments" in said_by(
        tmp_path / "whole", 0
    )
    run(parts, DILOCO, INT8, steps=3, **settings)
    log = said_by(parts, 0)
    assert "averages only" not in log and "nothing is compressed" not in log, "the first fragment is due at step 2"
    assert run(parts, DILOCO, INT8, attempt=1, **settings) == whole
    run(parts, DILOCO, INT8, attempt=2, ranks=1, steps=14)
    log = said_by(parts, 0, attempt=2)
    assert "resumed at step 12" in log and "mean residual of 2 ranks" in log and "momentum" not in log


def test_a_run_can_change_between_diloco_and_gradients(tmp_path):
    run(tmp_path, {}, steps=2, ranks=1)
    run(tmp_path, DILOCO, attempt=1, steps=4)
    assert "diloco starts without the momentum of 6 parameters" in said_by(tmp_path, 0, attempt=1)
    run(tmp_path, {}, attempt=2, steps=5, ranks=1)
    assert "the outer momentum of the checkpoint is ignored" in said_by(tmp_path, 0, attempt=2)


REFUSED = [
    (["local_sgd.every=3", "local_sgd.fragments=4"], "expected at most one fragment per step (every = 3), got 4"),
    (["parallel.shard=2"], "with shard = 2 ranks share one"),
    (["parallel.tp=2"], "with tp = 2 ranks share one"),
    (["parallel.cp=2"], "with cp = 2 ranks share one"),
    (["parallel.reduction=measured"], "reduction = measured has no effect with [local_sgd]"),
    (["parallel.unused_parameters=true"], "unused_parameters = True has no effect with [local_sgd]"),
    (["train.check_replicas_every=5"], "check_replicas_every = 5 checks at other steps"),
    (["train.check_replicas_every=10", "local_sgd.fragments=2"], "check_replicas_every = 10 checks at other steps"),
    (["train.average_decay=0.9"], "the moving average would follow the parameters of each rank"),
    (["train.offload=optimizer"], "offload moves optimizer out of it"),
    (["train.optimizer=adamw_8bit"], "adamw_8bit keeps in 8 bits"),
    (["train.lr_scaling=adaptive", "train.lr_reference_batch=8", "train.micro_batch=4"], "AdaScale compares gradients"),
    (["local_sgd.algorithm=average", "gradient_compression.algorithm=int8"], '"average" sends parameters'),
    (["gradient_compression.algorithm=top_k", "gradient_compression.momentum=0.9", "train.optimizer=sgd", "train.momentum=0"],
     "a second momentum beside local_sgd.outer_momentum"),
]  # fmt: skip


def resolved(*settings: str):
    settings = ("job.ranks_per_node=4", "local_sgd.algorithm=diloco", *settings)
    return resolve_job(shipped_jobs()["train_lm"], site=None, environ={}, settings=list(settings))


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_combinations_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ToolkitError) as caught:
        check_layout(resolved(*settings))
    assert message in caught.value.message
    assert caught.value.where and caught.value.fix


def test_other_combinations_are_accepted():
    check_layout(resolved("train.check_replicas_every=20", "train.guard=skip", "train.offload=activations"))
    check_layout(resolved("gradient_compression.algorithm=int4", "local_sgd.fragments=10"))
