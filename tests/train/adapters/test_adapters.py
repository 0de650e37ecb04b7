"""Adapters on one process: their layers, their checkpoints, peft's files, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import said_by
from safetensors.torch import load_file, save_file
from tiny_training import Model, config_of, initialise, note, samples_at, train
from torch import nn

from toolkit.config.document import Flag
from toolkit.config.request import resolve_job
from toolkit.config.shipped import shipped_jobs
from toolkit.config.train import TrainTable
from toolkit.errors import ToolkitError
from toolkit.parallel.materialise import parameters_on_meta
from toolkit.parallel.outline import Outline
from toolkit.site.load import load_site
from toolkit.train.adapters.adapt import Adapters
from toolkit.train.adapters.files import Adapter, merge, read_adapter, unmerge, use_adapters
from toolkit.train.adapters.layers import AdaptedLinear, Quantised, Scale
from toolkit.train.memory.out_of_memory import memory_parts
from toolkit.train.memory.recompute import recompute

ROOT = Path(__file__).parents[3]
INPUTS = samples_at(range(4))[0]


def config(rank: int = 2, **adapters: Any):
    job = config_of()
    checkpoint = job.checkpoint.model_copy(update={"every_steps": 6})
    table = job.adapters.model_copy(update={"rank": rank, "alpha": 4.0} | adapters)
    return job.model_copy(update={"adapters": table, "checkpoint": checkpoint})


def adapted(**adapters: Any) -> Adapters:
    return Adapters(config(**adapters), Model, initialise, Outline(blocks="blocks"))


def base_file(folder: Path, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    path = folder / f"base-{seed}.safetensors"
    save_file(Model().state_dict(), path)
    return path


def train_and_note(world, config):
    trainer = train(world, config)
    trainer.model.module.eval()
    note(world, outputs=trainer.model.module(INPUTS).tolist())


@pytest.fixture
def trained(tiny_training, tmp_path) -> Path:
    """A run of 12 steps on the base of a file, with `last` trained whole."""
    tiny_training.launch(train_and_note, 1, config(base=str(base_file(tmp_path)), modules_to_save=["last"]))
    return tmp_path


def outputs_of(run_dir: Path) -> torch.Tensor:
    return torch.tensor(json.loads((run_dir / "findings-0.json").read_text())["outputs"])


def export(toolkit, run_dir: Path, *arguments: Any) -> None:
    toolkit.ok("ckpt", "export", run_dir / "checkpoints", *arguments)


def test_merged_weights_and_files_of_peft_give_the_outputs_of_the_run(toolkit, trained):
    export(toolkit, trained, trained / "peft", "--format", "peft")
    export(toolkit, trained, trained / "merged.safetensors", "--merge")
    merged, model = Model(), Model()
    merged.load_state_dict(load_file(trained / "merged.safetensors"))
    model.load_state_dict(load_file(trained / "base-0.safetensors"))
    assert (model(INPUTS) - outputs_of(trained)).abs().max() > 1e-3, "the adapters have learned"
    torch.testing.assert_close(merged(INPUTS), outputs_of(trained), rtol=0, atol=1e-6)
    adapter = read_adapter(trained / "peft")
    assert adapter.scale == Scale(2, 4.0) and set(adapter.layers) == {"blocks.0", "blocks.1"}
    use_adapters(model, [Adapter(adapter.scale, {name: one for name, one in adapter.values.items() if "lora" in name})])
    model.last.load_state_dict({end: adapter.values[f"last.{end}"] for end in ("weight", "bias")})
    torch.testing.assert_close(model(INPUTS), outputs_of(trained), rtol=0, atol=1e-6)


def test_a_run_starts_from_adapters_of_peft(toolkit, trained):
    export(toolkit, trained, trained / "peft", "--format", "peft")
    again = adapted(base=str(trained / "base-0.safetensors"), modules_to_save=["last"], source=str(trained / "peft"))
    model = again.build()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            again.initialise(name, parameter)
    torch.testing.assert_close(model(INPUTS), outputs_of(trained), rtol=0, atol=1e-6)
    with pytest.raises(ToolkitError, match=r"expected adapters with rank = 3, .* got rank = 2") as error:
        adapted(rank=3, source=str(trained / "peft"))
    assert "set rank = 2, alpha = 4" in error.value.fix


def test_another_base_is_refused(tiny_training, trained, toolkit):
    other = config(base=str(base_file(trained, seed=1)), modules_to_save=["last"])
    with pytest.raises(AssertionError):
        tiny_training.launch(train_and_note, 1, other, attempt=1)
    said = said_by(trained, 0, 1)
    assert "were trained on another base: expected" in said and "base-0.safetensors (" in said
    with pytest.raises(ToolkitError, match=r'base with quantize = "int8", got "none"'):
        adapted().load_state_dict(adapted(quantize="int8").state_dict())
    (trained / "base-1.safetensors").replace(trained / "base-0.safetensors")
    refused = toolkit("ckpt", "export", trained / "checkpoints", trained / "x.safetensors", "--merge")
    assert refused.code != 0 and "its contents have changed" in refused.err


def random_adapter(seed: int, rank: int) -> Adapter:
    torch.manual_seed(seed)
    names = ("blocks.0", "blocks.1")
    values = {f"{name}.lora_A": torch.randn(rank, 8) for name in names}
    return Adapter(Scale(rank, 4.0), values | {f"{name}.lora_B": torch.randn(8, rank) for name in names})


def test_adapters_are_switched_added_merged_and_unmerged():
    torch.manual_seed(0)
    model = Model().eval()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    first, second = random_adapter(1, 2), random_adapter(2, 3)

    def wanted(*pairs: tuple[Adapter, float]) -> torch.Tensor:
        changed = Model()
        changed.load_state_dict(weights)
        for adapter, factor in pairs:
            for name, (low, high) in adapter.layers.items():
                changed.get_submodule(name).weight.data += factor * adapter.scale.factor * high @ low
        return changed(INPUTS)

    use_adapters(model, [first])
    torch.testing.assert_close(model(INPUTS), wanted((first, 1)), rtol=0, atol=1e-5)
    use_adapters(model, [second])
    torch.testing.assert_close(model(INPUTS), wanted((second, 1)), rtol=0, atol=1e-5)
    use_adapters(model, [first, second], weights=[0.5, 2.0])
    both = wanted((first, 0.5), (second, 2.0))
    torch.testing.assert_close(model(INPUTS), both, rtol=0, atol=1e-5)
    merge(model)
    merge(model)  # once only
    torch.testing.assert_close(model(INPUTS), both, rtol=0, atol=1e-5)
    unmerge(model)
    torch.testing.assert_close(model(INPUTS), both, rtol=0, atol=1e-5)
    use_adapters(model, [])
    torch.testing.assert_close(model(INPUTS), wanted(), rtol=0, atol=1e-5)


def test_half_of_an_adapter_and_too_few_weights_are_refused(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2}))
    tensors = {"base_model.model.blocks.0.up.lora_A.weight": torch.zeros(2, 8)}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ToolkitError, match=r"blocks\.0\.up\.lora_A without the other matrix"):
        read_adapter(tmp_path)
    with pytest.raises(ToolkitError, match="expected a weight for each of 2 adapters, got 1"):
        use_adapters(Model(), [random_adapter(1, 2), random_adapter(2, 3)], weights=[0.5])


def test_quantised_weights_are_a_part_of_the_memory():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters())
    assert "quantised weights" not in memory_parts(model, optimizer)
    layer = AdaptedLinear.of(model.blocks[0])
    layer.quantised = Quantised(layer.weight, "int8", double=False)
    layer.quantised.pack(layer.weight)
    assert memory_parts(model, optimizer)["quantised weights"] == 64


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_activations_beside_a_quantised_base_are_measured(kind):
    with parameters_on_meta(0):
        adapters = adapted(quantize=kind)
        model = adapters.build()
    adapters.take_out(model)
    large, trial = TrainTable(recompute="large", recompute_above_mb=1e-6), samples_at(range(4))
    names = recompute(model, large, loss_of=nn.functional.mse_loss, micro_batch=trial, below=["blocks"])
    assert names == [f"blocks.{number}" for number in range(len(model.blocks))]


@pytest.mark.parametrize(
    ("kind", "double", "error"), [("nf4", False, 0.11), ("fp4", True, 0.13), ("int8", False, 0.01)]
)
def test_a_quantised_weight_is_near_and_has_the_gradient_of_its_numbers(kind, double, error):
    torch.manual_seed(0)
    weight = torch.randn(64, 128)
    quantised = Quantised(weight, kind, double)
    quantised.pack(weight)
    numbers = quantised.whole(torch.float32, torch.device("cpu"))
    assert 0 < (numbers - weight).norm() / weight.norm() < error
    stream = torch.randn(3, 128, requires_grad=True)
    quantised.product(stream).square().sum().backward()
    plain = stream.detach().requires_grad_()
    nn.functional.linear(plain, numbers).square().sum().backward()
    torch.testing.assert_close(stream.grad, plain.grad)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_quantised_layer_gives_the_type_of_autocast(kind):
    layer = AdaptedLinear.of(nn.Linear(64, 64))
    layer.quantised = Quantised(layer.weight, kind, False)
    layer.quantised.pack(layer.weight.detach())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = layer(torch.randn(2, 64, requires_grad=True))
    assert outputs.dtype == torch.bfloat16, "an fp32 bias must not make activations twice as large"


def test_dropout_applies_to_the_adapter_alone():
    one = adapted(dropout=0.5, targets=["blocks.0"])
    model = one.build()
    layer = model.get_submodule("blocks.0")
    nn.init.ones_(layer.lora_A)
    nn.init.zeros_(layer.lora_B)
    plain = nn.functional.linear(INPUTS, layer.weight, layer.bias)
    torch.testing.assert_close(layer(INPUTS), plain)
    nn.init.ones_(layer.lora_B)
    assert not torch.equal(layer(INPUTS), layer(INPUTS))
    layer.eval()
    assert torch.equal(layer(INPUTS), layer(INPUTS))


@pytest.mark.parametrize(
    ("adapters", "message"),
    [
        ({"targets": ["blocks.7"]}, "'blocks.7' matches no linear layer"),
        ({"modules_to_save": ["lost"]}, "'lost' matches no module"),
        ({"modules_to_save": ["blocks.1"], "targets": ["blocks.1"]}, "matches no linear layer"),
        ({"modules_to_save": ["blocks"]}, "expected nn.Linear layers to adapt in blocks, got none"),
        ({"base": "missing"}, "missing"),
        ({"source": "missing"}, "not found"),
    ],
)
def test_a_table_that_does_not_fit_the_model_is_refused(adapters, message):
    with pytest.raises(ToolkitError, match=message):
        adapted(**adapters)


def test_a_base_of_another_model_is_refused(tmp_path):
    save_file({"blocks.0.weight": torch.zeros(9, 8), "blocks.0.bias": torch.zeros(8)}, tmp_path / "x.safetensors")
    with pytest.raises(ToolkitError, match=r"blocks\.1\.weight.*blocks\.0\.weight"):
        adapted(base=str(tmp_path / "x.safetensors"))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"adapters.quantize": "nf4", "parallel.shard": 2}, "packed bytes of nf4 weights without their scales"),
        ({"checkpoint.take": "weights", "checkpoint.source": "x"}, "loads a whole model"),
        ({"train.average_decay": 0.9}, "second copy of the frozen base"),
        ({"adapters.rank": 0, "adapters.targets": ["x"]}, "has no effect with rank = 0"),
        ({"adapters.double_quantization": True}, "has no effect with quantize"),
    ],
)
def test_settings_that_exclude_each_other_are_refused_at_submission(keys, message):
    flags = {key: Flag(value, "test") for key, value in ({"adapters.rank": 2, "job.ranks_per_node": 2} | keys).items()}
    with pytest.raises(ToolkitError, match=message):
        resolve_job(shipped_jobs()["train_lm"], site=load_site("local"), environ={}, flags=flags)


IN_PEFT = """
import sys, torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tiny_training import Model, samples_at
folder = sys.argv[1]
model = Model().eval()
model.load_state_dict(load_file(folder + "/base-0.safetensors"))
peft = PeftModel.from_pretrained(model, folder + "/peft").eval()
inputs = samples_at(range(4))[0]
outputs = peft(inputs)
peft.save_pretrained(folder + "/again")
save_file({"outputs": outputs.detach(), "merged": peft.merge_and_unload()(inputs).detach()}, folder + "/of-peft.safetensors")
"""


@pytest.mark.evidence
def test_peft_loads_the_files_and_toolkit_those_of_peft(toolkit, trained):
    export(toolkit, trained, trained / "peft", "--format", "peft")
    subprocess.run([sys.executable, "scripts/guests.py"], cwd=ROOT, check=True)
    path = ":".join(str(ROOT / folder) for folder in ("", "tests/shared", "tests/train"))
    command = [str(ROOT / ".venv-guests/bin/python"), "-c", IN_PEFT, str(trained)]
    subprocess.run(command, env={"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}, check=True)
    found = load_file(trained / "of-peft.safetensors")
    torch.testing.assert_close(found["outputs"], outputs_of(trained), rtol=0, atol=1e-6)
    torch.testing.assert_close(found["merged"], outputs_of(trained), rtol=0, atol=1e-6)
    own, again = read_adapter(trained / "peft"), read_adapter(trained / "again")
    assert own.scale == again.scale and own.values.keys() == again.values.keys()
    assert all(torch.equal(own.values[name], again.values[name]) for name in own.values)
