"""The shipped job for models of Hugging Face: on layouts as on one process, its exports in transformers, its data."""

from __future__ import annotations

import json
import shutil
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import launch, said_by
from model_folders import model_folder, transformers_model
from parity import BOUND, difference

from toolkit.checkpoint.format.manifest_file import read_manifest
from toolkit.config.document import Flag
from toolkit.config.request import resolve_job
from toolkit.config.resolved import ResolvedJob
from toolkit.config.shipped import shipped_jobs
from toolkit.errors import ToolkitError
from toolkit.jobs import finetune_lora
from toolkit.metrics.training import read_train_log
from toolkit.metrics.validation import read_validations
from toolkit.train.data.order import SampleOrder
from toolkit.train.huggingface.chat import encode
from toolkit.train.huggingface.models import library

STEPS = 3
SHARDED, SPLIT = {"parallel.shard": 2}, {"parallel.tp": 2}


def job_of(ranks: int, keys: dict[str, Any]) -> ResolvedJob:
    always = {"train.steps": STEPS, "train.batch": 4, "train.micro_batch": 2, "job.ranks_per_node": ranks}
    given = always | {"train.schedule": "constant", "data.workers": 0, "checkpoint.every_steps": 100} | keys
    flags = {key: Flag(value, "test") for key, value in given.items()}
    return resolve_job(shipped_jobs()["finetune_lora"], site=None, environ={}, flags=flags)


def train(world: Any, config: ResolvedJob) -> None:
    finetune_lora.main(world, config)


def run(run_dir: Path, ranks: int, attempt: int = 0, **keys: Any) -> Path:
    launch(train, ranks, run_dir, job_of(ranks, keys), attempt=attempt)
    return run_dir


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made: dict[str, str] = {}

    def folder_of(kind: str) -> str:
        if kind not in made:
            made[kind] = str(model_folder(tmp_path_factory.mktemp(kind), kind))
        return made[kind]

    return folder_of


def test_the_job_file_names_every_argument():
    job = tomllib.loads(shipped_jobs()["finetune_lora"].read_text())
    assert job["args"] == asdict(finetune_lora.Arguments())


@pytest.mark.evidence
def test_adapters_split_over_ranks_train_as_on_one_process_and_export_to_transformers(folders, tmp_path, toolkit):
    keys = {"args.model": folders("qwen3")}
    alone = run(tmp_path / "alone", 1, **keys)
    assert difference(run(tmp_path / "split", 2, **keys | SPLIT), alone, STEPS).largest <= BOUND
    keys_of = read_manifest(alone / "checkpoints" / f"step-{STEPS:08d}").tensors
    assert "model.model.layers.1.self_attn.q_proj.lora_A" in keys_of
    assert not any(key.startswith("model.") and "lora" not in key for key in keys_of)
    merged = tmp_path / "merged"
    toolkit.ok("ckpt", "export", alone / "checkpoints", merged, "--merge", "--max-shard-size", "100KB")
    assert len(list(merged.glob("model-*.safetensors"))) > 1
    again = toolkit("ckpt", "export", alone / "checkpoints", merged, "--merge")
    assert again.code != 0 and "already contains" in again.err
    check_merged(alone, Path(keys["args.model"]), merged)


def check_merged(run_dir: Path, base: Path, merged: Path) -> None:
    """The merged folder computes what the base does with adapters added by hand."""
    from toolkit.checkpoint.contents.stored_tensors import StoredTensors

    folder = run_dir / "checkpoints" / f"step-{STEPS:08d}"
    model, found = transformers_model(base), transformers_model(merged).double()
    tokens = torch.arange(32)[None]
    before = transformers_model(base).double()(tokens).logits
    with StoredTensors(folder, read_manifest(folder)) as stored, torch.no_grad():
        names = [key for key in stored.manifest.tensors if key.startswith("model.") and key.endswith("lora_A")]
        for name in names:
            low, high = (torch.from_numpy(stored.read(one)) for one in (name, name[:-1] + "B"))
            model.get_parameter(f"{name.removeprefix('model.')[:-7]}.weight").add_(2.0 * high @ low)
    wanted = model.double()(tokens).logits
    assert (wanted - before).abs().max() > 1e-2, "the adapters have learned"
    torch.testing.assert_close(found(tokens).logits, wanted, rtol=0, atol=1e-6)
    tokenizer = library().AutoTokenizer.from_pretrained(merged, local_files_only=True)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "<user>a<end>"


def test_all_weights_export_to_a_folder_that_transformers_opens(folders, tmp_path, toolkit):
    base = tmp_path / "base"
    shutil.copytree(folders("llama"), base)
    alone = run(tmp_path / "alone", 1, **{"args.model": str(base), "adapters.rank": 0, "train.steps": 1})
    export = ("ckpt", "export", alone / "checkpoints")
    toolkit.ok(*export, tmp_path / "out", "--format", "safetensors")
    found, before = transformers_model(tmp_path / "out"), transformers_model(base)
    assert not torch.equal(found.lm_head.weight, before.lm_head.weight)
    assert library().AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True).chat_template
    shutil.rmtree(base)
    again = toolkit(*export, tmp_path / "other", "--format", "safetensors")
    assert again.code == 2 and f"{base}: not found" in again.err and "into one file" in again.err
    toolkit.ok(*export, tmp_path / "one.safetensors")


@pytest.mark.evidence
def test_all_weights_are_trained_sharded_with_packed_and_padded_rows_and_another_layout(folders, tmp_path):
    """Unequal numbers of trained tokens per row must not weigh rows differently on other layouts."""
    data = tmp_path / "chat.jsonl"
    lines = [
        [{"role": "user", "content": "?" * (number % 5)}, {"role": "assistant", "content": "ja" * (number % 7 + 1)}]
        for number in range(24)
    ]
    data.write_text("\n".join(json.dumps({"messages": one}) for one in lines))
    keys = {"args.model": folders("llama"), "data.paths": [str(data)], "args.context": 32, "adapters.rank": 0}
    keys |= {"args.packed": False, "args.held_out": 0.25, "train.validate_every": 1}
    alone = run(tmp_path / "alone", 1, **keys | {"train.micro_batch": 4})
    run(tmp_path / "two", 2, **keys | SHARDED | {"train.steps": 2, "train.micro_batch": 1})
    run(tmp_path / "two", 2, attempt=1, **keys | {"train.micro_batch": 0})
    assert difference(tmp_path / "two", alone, STEPS).largest <= BOUND
    check_first_loss(alone, Path(keys["args.model"]), lines)
    first, wanted = (next(iter(read_train_log(one / "metrics" / "train.jsonl"))) for one in (tmp_path / "two", alone))
    assert first.loss == pytest.approx(wanted.loss, rel=BOUND)
    (last, *_), (found, *_) = (
        read_validations(one / "metrics" / "validation.jsonl") for one in (alone, tmp_path / "two")
    )
    assert found.means["loss"] == pytest.approx(last.means["loss"], rel=BOUND)


def check_first_loss(run_dir: Path, folder: Path, lines: list[Any]) -> None:
    """The first step's loss is transformers' mean over the trained tokens of its rows."""
    job = job_of(1, {})
    first = SampleOrder(len(lines) - len(lines) // 4, job.train.seed).positions(range(job.train.batch))
    model, total, count = transformers_model(folder), 0.0, 0
    for number in first:
        ids, trained = encode(finetune_lora.tiny_model().tokenizer, {"messages": lines[number]})
        ids, labels = torch.from_numpy(ids).long(), torch.from_numpy(trained)
        with torch.no_grad():
            loss = float(model(ids[None], labels=torch.where(labels, ids, -100)[None]).loss)
        total, count = total + loss * int(labels.sum()), count + int(labels.sum())
    record = next(iter(read_train_log(run_dir / "metrics" / "train.jsonl")))
    assert record.loss == pytest.approx(total / count, rel=1e-5)


def test_packed_rows_of_another_model_are_refused_by_the_job(folders, tmp_path):
    with pytest.raises(AssertionError):
        run(tmp_path / "run", 1, **{"args.model": folders("gpt2")})
    assert "args.packed: expected one of llama, mistral, qwen2, qwen3, got a gpt2" in said_by(tmp_path / "run", 0)


def test_a_relative_path_of_a_model_starts_at_the_job_file_and_the_error_names_all_of_it(
    folders, tmp_path, monkeypatch
):
    monkeypatch.chdir(Path(folders("llama")).parent)
    with pytest.raises(AssertionError):
        run(tmp_path / "run", 1, **{"args.model": Path(folders("llama")).name})
    wanted = shipped_jobs()["finetune_lora"].parent / Path(folders("llama")).name
    assert f"args.model: folder not found: {wanted}. Fix: pass an absolute path" in said_by(tmp_path / "run", 0)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"args.device_map": "auto"}, r"args\.device_map: .*parallel\.shard and parallel\.tp split a model"),
        ({"env.vars": {"PYTORCH_ENABLE_MPS_FALLBACK": "1"}}, "configures GPUs of Apple"),
        ({"env.pass": ["PYTORCH_MPS_HIGH_WATERMARK_RATIO"]}, "configures GPUs of Apple"),
    ],
)
def test_settings_of_other_devices_are_refused_at_submission(keys, message, toolkit):
    result = toolkit("run", "finetune_lora", "-n", "1", *(f"--set={key}={_toml(value)}" for key, value in keys.items()))
    assert result.code == 2
    with pytest.raises(ToolkitError, match=message):
        raise ToolkitError(result.err, where="", fix="")


def _toml(value: Any) -> str:
    return '{PYTORCH_ENABLE_MPS_FALLBACK="1"}' if isinstance(value, dict) else json.dumps(value)


@pytest.mark.evidence
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("kind", "rank"), [*((kind, rank) for kind in ("llama", "qwen2", "qwen3") for rank in (4, 0)), ("gpt2", 0)]
)
def test_every_layout_trains_as_one_process_does(folders, tmp_path, kind, rank):
    keys = {"args.model": folders(kind), "adapters.rank": rank, "args.packed": kind != "gpt2"}
    alone = run(tmp_path / "alone", 1, **keys)
    layouts: list[dict[str, Any]] = [
        {},
        SHARDED,
        SHARDED | {"parallel.zero": 1},
        {"train.recompute": "every"} | SHARDED,
    ]
    layouts += [SHARDED | {"parallel.wrap": "classes", "parallel.wrap_classes": [_LAYERS[kind]]}]
    layouts += [] if kind == "gpt2" else [SPLIT]
    for number, layout in enumerate(layouts):
        found = run(tmp_path / str(number), 2, **keys | layout)
        apart = difference(found, alone, STEPS)
        # Not of parameters: AdamW magnifies the rounding of gradients that are 0, such as those of biases of keys.
        assert max(apart.loss, apart.gradient) <= BOUND, layout


_LAYERS = {
    "llama": "LlamaDecoderLayer",
    "qwen2": "Qwen2DecoderLayer",
    "qwen3": "Qwen3DecoderLayer",
    "gpt2": "GPT2Block",
}
