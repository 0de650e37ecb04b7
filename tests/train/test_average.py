"""A moving average of the weights: torch's numbers, kept over a resume, and gone from the model after validation."""

from __future__ import annotations

import pytest
import torch
from launch import launch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from toolkit.checkpoint import Checkpointer
from toolkit.errors import ToolkitError
from toolkit.train.average import WeightAverage
from toolkit.train.state import TrainingState
from toolkit.world.facts import World

ALONE = World(0, 0, 1, 1, 0, 1, "here", "cpu", "none", "alone")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(4, 4, bias=False)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight

    def forward(self, values: Tensor) -> Tensor:
        return self.last(self.norm(self.first(values)))


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def move(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.rand(parameter.shape))
    model(torch.randn(3, 4))  # moves the buffers of the norm


def test_the_average_is_the_recurrence_with_a_decay_that_grows():
    model = Net()
    average = WeightAverage(model, 0.5)
    expected = values_of(model)
    for count in range(6):
        move(model)
        average.update(model)
        decay = min(0.5, (1 + count) / (10 + count))
        for name, value in model.state_dict().items():
            floating = value.is_floating_point()
            expected[name] = decay * expected[name] + (1 - decay) * value if floating else value.clone()
    kept = dict(average.weights.named_parameters(remove_duplicate=False))
    assert kept.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(kept[name], value.to(kept[name].dtype), atol=1e-6), name
    assert kept["first.weight"] is kept["last.weight"]
    assert kept["norm.num_batches_tracked"] == 6
    assert int(average.updates) == 6


def test_within_the_context_the_model_has_the_average_and_afterwards_its_own_bits():
    model = Net().eval()
    average = WeightAverage(model, 0.9)
    kept = values_of(model)
    move(model)
    own = values_of(model)
    with pytest.raises(KeyError), average.in_place_of(model):
        assert model.first.weight is model.last.weight
        assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
        raise KeyError
    assert all(torch.equal(value, own[name]) for name, value in model.state_dict().items())


def test_small_changes_of_16_bit_weights_are_not_lost():
    model = nn.Linear(2, 2, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)
        average = WeightAverage(model, 0.999)
        average.updates += 10**6
        model.weight.fill_(1.5)
    for _ in range(10):
        average.update(model)
    assert torch.allclose(average.weights.weight, torch.tensor(1 + 0.5 * (1 - 0.999**10)), atol=1e-6)
    with average.in_place_of(model):
        assert model.weight.dtype == torch.bfloat16


def test_a_resume_brings_it_back_to_the_last_bit_by_the_names_of_the_model(tmp_path):
    def fresh() -> tuple[TrainingState, WeightAverage]:
        model = Net()
        average = WeightAverage(model, 0.9)
        return TrainingState(model, torch.optim.SGD(model.parameters()), None, 1, modules={"average": average}), average

    state, average = fresh()
    for _ in range(3):
        move(state.model)
        average.update(state.model)
    state.save(Checkpointer(tmp_path, ALONE), ALONE)
    other, again = fresh()
    other.resume(Checkpointer(tmp_path, ALONE), ALONE)
    assert set(again.state_dict()) == {"updates", *(f"weights.{name}" for name in Net().state_dict())}
    for name, value in average.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    for one, kept in ((state.model, average), (other.model, again)):
        with torch.no_grad():
            one.first.weight.add_(1.0)
        kept.update(one)
    assert torch.equal(average.weights.first.weight, again.weights.first.weight)


def test_what_makes_no_average_is_refused():
    with pytest.raises(ToolkitError, match=r"train\.average_decay: expected a decay in \[0, 1\), got 1\.0"):
        WeightAverage(Net(), 1.0)
    with pytest.raises(
        ToolkitError, match=r"created from another model; only one of the models has bias, first\.weight"
    ):
        WeightAverage(Net(), 0.5).update(nn.Linear(4, 4))


def averaged_over_shards(world) -> None:
    def built() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))  # 3 rows on 2 ranks

    whole, sharded = built(), built()
    mesh = init_device_mesh("cpu", (world.size,))
    fully_shard(sharded[0], mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    averages = [WeightAverage(one, 0.9) for one in (whole, sharded)]
    inputs = torch.ones(2, 4)
    for model, average in zip((whole, sharded), averages, strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(inputs).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update(model)
    kept = averages[1].weights.get_parameter("1.weight")
    assert isinstance(kept, DTensor)
    assert torch.allclose(kept.full_tensor(), averages[0].weights.get_parameter("1.weight"), atol=1e-6)
    with torch.no_grad():
        trained = sharded(inputs)  # the root stays gathered now
        with averages[1].in_place_of(sharded), averages[0].in_place_of(whole):
            assert torch.allclose(sharded(inputs), whole(inputs), atol=1e-6)
            assert not torch.allclose(sharded(inputs), trained)
        assert torch.equal(sharded(inputs), trained)


def test_parts_of_a_sharded_model_are_averaged_and_swapped_where_they_are(tmp_path):
    launch(averaged_over_shards, 2, tmp_path)
