"""Models of transformers: their logits, packed rows, what each rank reads, and which folders are refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import results_of
from model_folders import KINDS, model_folder, transformers_model
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from toolkit.checkpoint.convert.adapters import BaseWeights
from toolkit.config.document import Flag
from toolkit.config.request import resolve_job
from toolkit.config.shipped import shipped_jobs
from toolkit.errors import ToolkitError
from toolkit.parallel.materialise import materialise, parameters_on_meta
from toolkit.train.huggingface.chat import rows_of
from toolkit.train.huggingface.models import open_folder


@pytest.fixture(scope="module", params=list(KINDS))
def folder(request, tmp_path_factory) -> Path:
    return model_folder(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return model_folder(tmp_path_factory.mktemp("llama"), "llama")


def unset(name: str, tensor: torch.Tensor) -> None:
    raise AssertionError(f"{name} is not read")


def loaded(folder: Path) -> torch.nn.Module:
    model = open_folder(folder)
    with parameters_on_meta(0):
        built = model.build()
    materialise(built, unset, 0, "cpu", read=model.read)
    return built.eval()


def conversations(*lengths: int) -> list[Any]:
    torch.manual_seed(1)
    made = [torch.randint(1, 256, (length,)).numpy().astype("int32") for length in lengths]
    return [(ids, ids > 0) for ids in made]


@torch.no_grad()
def test_a_loaded_model_has_the_logits_of_from_pretrained(folder):
    tokens, _, _ = rows_of(conversations(9, 5), 12, 256, is_packed=False)
    ids = torch.where(tokens < 0, ~tokens, tokens)
    torch.testing.assert_close(loaded(folder)(tokens), transformers_model(folder)(ids).logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
@torch.no_grad()
def test_packed_conversations_do_not_see_each_other(tmp_path, kind):
    model = loaded(model_folder(tmp_path, kind))
    lengths = (9, 5, 16, 2)
    packed, targets, line = rows_of(conversations(*lengths), 16, 256, is_packed=True)
    assert "4 conversations in 2 rows, 100% filled" in line and len(packed) == 2
    alone = [model(torch.from_numpy(ids)[None])[0] for ids, _ in conversations(*lengths)]
    torch.testing.assert_close(model(packed)[0], torch.cat([alone[0], alone[1], alone[3]]), rtol=0, atol=1e-5)
    torch.testing.assert_close(model(packed)[1], alone[2], rtol=0, atol=1e-5)
    logits, targets = model(packed).flatten(0, 1), targets.flatten().long()
    total = torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    expected = sum(
        float(torch.nn.functional.cross_entropy(one[:-1], torch.from_numpy(ids[1:]).long(), reduction="sum"))
        for one, (ids, _) in zip(alone, conversations(*lengths), strict=True)
    )
    assert float(total) == pytest.approx(expected, rel=1e-6)


def read_split(world, folder: str) -> int:
    """Load a folder as shards of rows and of columns, and return the number of bytes that were read."""
    counted, base = [0], BaseWeights(Path(folder))
    plain = base.numbers

    def box(name: str, offset: Any, shape: Any) -> Any:
        counted[0] += torch.Size(shape).numel() * 4
        return plain(name, offset, shape)

    model = open_folder(Path(folder))
    with parameters_on_meta(0):
        built = model.build()
    mesh = init_device_mesh("cpu", (world.size,))
    for name, parameter in list(built.named_parameters()):
        columns = name.endswith(("o_proj.weight", "down_proj.weight"))
        part = distribute_tensor(parameter, mesh, [Shard(int(columns))], src_data_rank=None)
        owner, _, own = name.rpartition(".")
        built.get_submodule(owner).register_parameter(own, torch.nn.Parameter(part))

    materialise(built, unset, 0, "cpu", read=lambda *one: torch.from_numpy(box(*one)))
    wanted = transformers_model(Path(folder)).state_dict()
    for name, parameter in built.named_parameters():
        assert isinstance(parameter, DTensor)
        assert torch.equal(parameter.full_tensor(), wanted[name])
    return counted[0]


def test_a_rank_reads_only_its_parts(llama, tmp_path):
    read = results_of(read_split, 3, tmp_path, str(llama))
    size = sum(file.stat().st_size for file in llama.glob("*.safetensors"))
    assert len(set(read)) > 1 and max(read) < size * 0.4 and sum(read) <= size


def test_bfloat16_weights_become_float32(llama, tmp_path):
    for file in llama.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for file in tmp_path.glob("*.safetensors"):
        save_file({name: one.bfloat16() for name, one in load_file(file).items()}, file, {"format": "pt"})
    wanted = {name: one.bfloat16().float() for name, one in transformers_model(llama).state_dict().items()}
    found = dict(loaded(tmp_path).named_parameters())
    assert all(torch.equal(found[name], one) for name, one in wanted.items())


def test_angles_that_old_releases_of_transformers_stored_are_ignored(llama, tmp_path):
    for file in llama.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    file, index = min(tmp_path.glob("*.safetensors")), tmp_path / "model.safetensors.index.json"
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file(load_file(file) | {name: torch.zeros(8)}, file, {"format": "pt"})
    stored = json.loads(index.read_text())
    index.write_text(json.dumps(stored | {"weight_map": stored["weight_map"] | {name: file.name}}))
    wanted = transformers_model(llama).state_dict()
    assert all(torch.equal(one, wanted[name]) for name, one in loaded(tmp_path).named_parameters())


def edit(name: str, **values: Any):
    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def pickles(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "pytorch_model-00001-of-00002.bin").touch()


def whole_numbers(folder: Path) -> None:
    """Quantise the weights without a quantization_config."""
    for file in folder.glob("*.safetensors"):
        save_file({name: one.mul(100).to(torch.int8) for name, one in load_file(file).items()}, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("change", "where", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json", "No such file"),
        (lambda folder: (folder / "config.json").write_text("[1]"), "config.json", "cannot be read as JSON"),
        (lambda folder: (folder / "tokenizer_config.json").unlink(), "tokenizer_config.json", "No such file"),
        (lambda folder: [file.unlink() for file in folder.glob("*.safetensors")], "", "contains no weights"),
        (lambda folder: min(folder.glob("*.safetensors")).unlink(), "model-00001-of-00003.safetensors", "not found"),
        (pickles, "", "pytorch_model-00001-of-00002.bin is a pickle"),
        (edit("config.json", auto_map={"AutoModel": "own.Model"}), "config.json", "auto_map needs Python code"),
        (edit("tokenizer_config.json", auto_map={"x": "y"}), "tokenizer_config.json", "auto_map needs Python code"),
        (edit("config.json", quantization_config={"bits": 4}), "config.json", "quantised weights"),
        (edit("config.json", device_map="auto"), "config.json", "device_map places layers on devices"),
        (edit("config.json", hidden_size=32, head_dim=16), "", r"other shapes: lm_head.weight \(saved: \[264, 64\]"),
        (edit("config.json", num_hidden_layers=3), "", r"model\.layers\.2\.input_layernorm\.weight"),
        (whole_numbers, "", r"expected weights in float64, .* got int8 in model\.embed_tokens\.weight"),
        (edit("config.json", model_type="lost"), "", "cannot open it"),
        (edit("config.json", model_type="t5"), "", "cannot open it"),
    ],
)  # fmt: skip
def test_a_folder_that_toolkit_cannot_train_is_refused(llama, tmp_path, change, where, message):
    for file in llama.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    change(tmp_path)
    with pytest.raises(ToolkitError, match=message) as error:
        open_folder(tmp_path)
    assert error.value.where == str(tmp_path / where) and error.value.fix


@pytest.mark.parametrize(
    ("kind", "keys", "message"),
    [
        ("llama", {"parallel.pp": 2}, "parallel.pp"),
        ("llama", {"parallel.tp": 2, "parallel.sequence": True}, "parallel.sequence"),
        ("gpt2", {}, "args.packed: expected one of llama, .* got a gpt2"),
        ("llama", {"args.context": 257}, "the model attends to 256 tokens, got 257"),
    ],
)
def test_settings_that_a_model_cannot_have_are_refused(tmp_path, kind, keys, message):
    flags = {key: Flag(value, "test") for key, value in keys.items()}
    job = resolve_job(shipped_jobs()["finetune_lora"], site=None, environ={}, flags=flags)
    model = open_folder(model_folder(tmp_path, kind))
    with pytest.raises(ToolkitError, match=message):
        model.check(job, job.args.get("context", 128), is_packed=job.args.get("packed", True))


OFFLINE = """
import socket, sys
def refuse(*_, **__): raise AssertionError("the network was used")
socket.socket.connect = socket.getaddrinfo = refuse
from pathlib import Path
import toolkit
assert "transformers" not in sys.modules
from toolkit.train.huggingface.models import open_folder
open_folder(Path(sys.argv[1]))
import huggingface_hub.constants
assert huggingface_hub.constants.HF_HUB_OFFLINE
"""


def test_a_folder_is_opened_without_network_and_toolkit_alone_does_not_import_transformers(llama):
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS"))}
    subprocess.run([sys.executable, "-c", OFFLINE, llama], env=environ, check=True)
