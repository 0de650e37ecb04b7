"""Every sample counts once, whatever the number of ranks, the samples and the micro-batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from launch import launch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from toolkit.errors import ToolkitError
from toolkit.train.data.order import split
from toolkit.train.held_out import Validation, evaluating, validate

CASES = [(samples, micro_batch) for samples in (10, 7, 1) for micro_batch in (0, 1, 3)]


def net() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.BatchNorm1d(3))


def take(samples: range) -> Tensor:
    return torch.stack([torch.tensor([1.0, index, index**2]) for index in samples])


def measure(model: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
    """A loss that is the model's, and one that no batch changes in its last bits; some samples have more tokens."""
    return {"loss": model(inputs).square().sum(1), "exact": 1.0 / (1.0 + inputs[:, 1]), "weight": inputs[:, 1] % 3 + 1}


def of_one_process(samples: int) -> Validation:
    model = net().eval()
    with torch.no_grad():
        found = [
            {name: value.double() for name, value in measure(model, take(range(one, one + 1))).items()}
            for one in range(samples)
        ]
    weight = sum(one["weight"].item() for one in found)
    means = {name: sum((one[name] * one["weight"]).item() for one in found) / weight for name in ("exact", "loss")}
    return Validation(means, samples, weight)


@pytest.mark.parametrize(("samples", "micro_batch"), CASES)
def test_one_process(samples, micro_batch):
    found, expected = validate(net(), samples, take, measure, micro_batch=micro_batch), of_one_process(samples)
    assert (found.samples, found.weight) == (samples, expected.weight)
    assert found.means["exact"] == pytest.approx(expected.means["exact"], rel=1e-15)
    assert found.means["loss"] == pytest.approx(expected.means["loss"], rel=1e-6)


def on_ranks(world) -> None:
    seen: list[int] = []

    def take_seen(samples: range) -> Tensor:
        seen.extend(samples)
        return take(samples)

    model = net()
    fully_shard(
        model, mesh=init_device_mesh("cpu", (world.size,))
    )  # hangs where ranks make different numbers of passes
    found = [validate(model, *case[:1], take_seen, measure, micro_batch=case[1]) for case in CASES]
    text = json.dumps([[one.means, one.samples, one.weight] for one in found])
    (world.run_dir / f"found-{world.rank}").write_text(text)


@pytest.mark.parametrize("ranks", [2, 3])
def test_any_number_of_ranks_finds_what_one_process_finds(ranks, tmp_path):
    launch(on_ranks, ranks, tmp_path)
    files = [(tmp_path / f"found-{rank}").read_text() for rank in range(ranks)]
    assert len(set(files)) == 1, "every rank has the same bits"
    for (means, samples, weight), (count, _) in zip(json.loads(files[0]), CASES, strict=True):
        expected = of_one_process(count)
        assert (samples, weight) == (count, expected.weight)
        assert means["exact"] == pytest.approx(expected.means["exact"], rel=1e-15)
        assert means["loss"] == pytest.approx(expected.means["loss"], rel=1e-6)


def test_without_weights_samples_count_alike_and_the_mean_of_means_would_differ():
    found = validate(net(), 7, take, lambda model, inputs: {"index": inputs[:, 1]}, micro_batch=3)
    assert found == Validation({"index": 3.0}, 7, 7.0)
    assert sum(sum(part) / len(part) for part in split(range(7), 3)) / 3 != 3.0


def test_modules_are_in_the_mode_that_they_were_in_afterwards():
    model = net()
    model[2].eval()
    with pytest.raises(ZeroDivisionError), evaluating(model):
        assert not any(module.training for module in model.modules())
        raise ZeroDivisionError
    assert [module.training for module in model] == [True, True, False]


def test_a_mean_in_place_of_the_samples_is_refused(tmp_path: Path):
    with pytest.raises(
        ToolkitError, match=r"expected 3 values of 'loss', one per sample, got shape \[\].*reduction=\"none\""
    ):
        validate(net(), 7, take, lambda model, inputs: {"loss": model(inputs).mean()}, micro_batch=3)
    with pytest.raises(ToolkitError, match="no samples to validate on"):
        validate(net(), 0, take, measure, micro_batch=3)
