"""What the ranks would refuse of [checkpoint], [data] and [args] is refused before they start, with the key and the fix."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from whole_checkpoints import make_whole_checkpoint

from toolkit.checkpoint.format import filters
from toolkit.checkpoint.format.manifest import FileRecord

NEW_RUN = ("submit", "run", "render")


def job_with(toolkit, checkpoint_table: str) -> Path:
    return toolkit.job("true", more=f"[checkpoint]\n{checkpoint_table}\n")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Folders of several kinds, beside the job file."""
    for step in (9, 10):
        make_whole_checkpoint(tmp_path / "old" / "checkpoints", step)
    (tmp_path / "other").mkdir()
    (tmp_path / "file").touch()
    make_whole_checkpoint(
        tmp_path / "cut", 7, *(FileRecord(f"shard-00000-of-00001.{end}", 9, "0" * 32) for end in ("h5", "digest"))
    )
    shutil.copytree(tmp_path / "cut" / "step-00000007", tmp_path / "edited" / "step-00000007")
    (tmp_path / "edited" / "step-00000007" / "manifest.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize("command", NEW_RUN)
def test_a_source_that_is_not_there_is_refused_by_each_command_and_leaves_no_run(toolkit, command: str) -> None:
    said = toolkit(command, job_with(toolkit, 'source = "nowhere/step-00000001"'))
    assert (said.code, said.out) == (2, "")
    place = f"toolkit: {toolkit.folder}/work.toml:4:checkpoint.source: "
    assert said.err.startswith(
        f"{place}there is no folder {toolkit.folder}/nowhere/step-00000001. Fix: pass the path of "
    )
    assert not toolkit.runs.exists()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("old", "/old contains checkpoints but is not one itself. Fix: choose one of them, as in source = 'old/checkpoints/step-00000010'"),
        ("old/checkpoints", "but is not one itself. Fix: choose one of them, as in source = 'old/checkpoints/step-00000010'"),
        ("old/checkpoints/step-00000011", "step-00000011. Fix: choose an existing one, such as "),
        ("other", "/other is not a checkpoint: it has no manifest.json. Fix: pass the path of a step-... folder; "),
        ("file", "expected a checkpoint folder, got the file "),
        ("cut/step-00000007", "/cut/step-00000007 is damaged: shard-00000-of-00001.h5: is missing; shard-"),
        ("edited/step-00000007", "/edited/step-00000007 is damaged: manifest.json: is not a valid manifest. Fix: choose another one; "),
    ],
)  # fmt: skip
def test_a_source_that_is_no_checkpoint_is_refused_with_the_fix(toolkit, sources, source: str, said: str) -> None:
    answer = toolkit("render", job_with(toolkit, f'source = "{source}"'))
    assert (answer.code, answer.err.count("\n")) == (2, 1), answer.err
    assert ":4:checkpoint.source: " in answer.err
    assert said in answer.err


def test_a_source_of_a_flag_is_named_by_the_flag(toolkit, sources, monkeypatch) -> None:
    monkeypatch.chdir(sources / "old")
    job = toolkit.job("true")
    toolkit.ok("render", job, "--set", "checkpoint.source=checkpoints/step-00000010")
    said = toolkit("render", job, "--set", "checkpoint.source=step-00000010")
    assert "--set checkpoint.source=step-00000010:checkpoint.source: there is no folder " in said.err


def test_what_only_the_ranks_can_know_is_left_to_them(toolkit, dev_cluster_conf, tmp_path) -> None:
    """The checkpoint of a job that this one waits for, and the folders of a container."""
    missing = 'source = "/data/step-00000001"'
    job = job_with(toolkit, missing)
    assert toolkit("render", job, "--site", "devcluster").code == 2
    toolkit.ok("render", job, "--site", "devcluster", "-d", "afterok:5")
    site = tmp_path / "site.toml"
    site.write_text(
        'name = "site"\n[scheduler]\nkind = "local"\n[container]\nruntime = "apptainer"\nimage = "/i.sif"\n'
    )
    toolkit.ok("render", job, "--site", site)
    assert toolkit("render", job_with(toolkit, 'source = "data/step-00000001"'), "--site", site).code == 2


def test_a_resume_needs_the_source_only_where_the_run_has_saved_nothing_since(toolkit, tmp_path) -> None:
    source = make_whole_checkpoint(tmp_path / "old", 5)
    run = toolkit.submit(job_with(toolkit, f'source = "{source}"'), "--wait")
    shutil.rmtree(source)
    said = toolkit("resume", "last", "--wait")
    assert (said.code, f"checkpoint.source: there is no folder {source}" in said.err) == (2, True)
    assert not run.resumed(1).exists()
    make_whole_checkpoint(run.checkpoints, 6)
    toolkit.ok("resume", "last", "--wait")
    said = toolkit("resume", "last", "--set", f"checkpoint.source={source.parent}/step-00000004")
    assert (said.code, "there is no folder" in said.err) == (2, True)


@pytest.mark.parametrize("command", NEW_RUN)
def test_data_that_are_not_there_are_refused_by_each_command_and_leave_no_run(toolkit, command: str) -> None:
    (toolkit.folder / "corpus").mkdir()
    (toolkit.folder / "corpus" / "a.txt").touch()
    said = toolkit(command, toolkit.job("true", more='[data]\npaths = ["corpus/*.txt", "corpse/*.txt"]\n'))
    assert (said.code, said.out) == (2, "")
    assert said.err == (
        f"toolkit: {toolkit.folder}/work.toml:4:data.paths: no file on this host matches 'corpse/*.txt'. Fix: list files that this "
        f"host and every node can read; relative patterns start at {toolkit.folder}\n"
    )
    assert not toolkit.runs.exists()


def test_data_of_other_hosts_and_of_jobs_before_are_left_to_the_ranks(toolkit, dev_cluster_conf, tmp_path) -> None:
    (tmp_path / "here.txt").touch()
    there = f'paths = ["*.txt", "**/here.txt", "{tmp_path}/h*.txt", "s3://bucket/*.txt"]'
    toolkit.ok("render", toolkit.job("true", more=f"[data]\n{there}\n"))
    job = toolkit.job("true", more='[data]\npaths = ["/data/*.txt"]\n')
    assert toolkit("render", job, "--site", "devcluster").code == 2
    toolkit.ok("render", job, "--site", "devcluster", "-d", "afterok:5")
    site = tmp_path / "site.toml"
    for tables in ('[container]\nruntime = "apptainer"\nimage = "/i.sif"\n', '[paths]\nlocal_scratch = "/data"\n'):
        site.write_text(f'name = "site"\n[scheduler]\nkind = "local"\n{tables}')
        toolkit.ok("render", job, "--site", site)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--set", "args.sizes=8..x"), "--set args.sizes=8..x:args.sizes: 'x' is not a valid size. Fix: set 8..16M"),
        (
            ("--set", "args.iteration=3"),
            "args.iteration: this job has no argument 'iteration'. Fix: write 'iterations'",
        ),
        (("--set", "args.factor=two"), "args.factor: 'two' is rejected: input should be a valid integer"),
        (("-n", "1"), "expected two or more ranks, got one"),
        (
            ("--set", "args.algorithms=hierarchical"),
            "'hierarchical' requires two nodes or more with two ranks or more each",
        ),
    ],
)
def test_a_bench_that_its_ranks_would_refuse_is_not_submitted(toolkit, words, said: str) -> None:
    answer = toolkit("submit", "bench_collectives", *words)
    assert (answer.code, said in answer.err, answer.err.count("\n")) == (2, True, 1), answer.err
    assert not toolkit.runs.exists()
    assert toolkit("render", "bench_collectives").code == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("args.heads=3",), "args.width: args.width = 128 is not a multiple of args.heads = 3. Fix: args.width = 126 or 129, or args.heads = 2 or 4"),
        (("parallel.tp=3", "job.ranks_per_node=3", "train.batch=12"), "--set parallel.tp=3:parallel.tp: args.heads = 4 is not a multiple of parallel.tp = 3. Fix: parallel.tp = 2 or 4, or args.heads = 3 or 6"),
        (("args.dropout=1.5",), "--set args.dropout=1.5:args.dropout: 1.5 is rejected: input should be less than 1. Fix: choose a number, at least 0, less than 1"),
        (("args.layer=2",), "args.layer: this job has no argument 'layer'. Fix: write 'layers'"),
        (("train.guard=roll_back", "checkpoint.every_steps=500"), "none is scheduled before the last step: checkpoint.every_steps is 500, train.steps 150"),
    ],
)  # fmt: skip
def test_what_the_ranks_of_a_training_would_refuse_is_not_submitted(toolkit, words, said: str) -> None:
    """Also of a copy of a shipped job, whose script is the user's."""
    toolkit.ok("jobs", "copy", "train_lm", toolkit.folder)
    settings = [word for one in words for word in ("--set", one)]
    for command, job in (("submit", "train_lm"), ("preflight", toolkit.folder / "train_lm.toml")):
        answer = toolkit(command, job, *settings)
        assert (answer.code, said in answer.err, answer.err.count("\n")) == (2, True, 1), answer.err
    assert not toolkit.runs.exists()


def test_each_task_of_a_sweep_is_looked_at(toolkit, dev_cluster_conf) -> None:
    said = toolkit("submit", "train_lm", "--site", "devcluster", "--sweep", "args.heads=2,3")
    assert (
        said.code == 2 and "task 1 (args.heads=3): " in said.err and "is not a multiple of args.heads = 3" in said.err
    )


def test_a_model_folder_that_its_ranks_would_refuse_is_not_submitted(toolkit, tmp_path) -> None:
    folder = tmp_path / "model"

    def said(*settings: str) -> str:
        words = [word for one in (f"args.model={folder}", *settings) for word in ("--set", one)]
        answer = toolkit("preflight", "finetune_lora", "--site", "local", *words)
        assert answer.code in (0, 2), answer
        return answer.err.strip() if answer.code else ""

    def write(name: str, **values: object) -> None:
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(values))

    key = f"--set args.model={folder}:args.model"
    assert f"{key}: folder not found: {folder}. Fix: pass an absolute path" in said()
    write("config.json", model_type="gpt2")
    assert f"{key}: {folder}/tokenizer_config.json: cannot be read as JSON: No such file" in said()
    write("tokenizer_config.json")
    (folder / "pytorch_model.bin").touch()
    assert "pytorch_model.bin is a pickle" in said()
    (folder / "model.safetensors").touch()
    assert "finetune_lora.toml" in said() and "args.packed: expected one of llama" in said()
    assert "has no chat template. Fix: set args.model" in said("args.packed=false")
    write("config.json", model_type="qwen2", max_position_embeddings=512, sliding_window=64, use_sliding_window=False)
    assert "attends to" not in said("args.packed=false")
    write("config.json", model_type="llama", max_position_embeddings=64)
    write("tokenizer_config.json", chat_template="x")
    assert "args.context: the model attends to 64 tokens, got 128. Fix: set it to 64" in said()
    assert said("args.context=64") == ""
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").touch()
    assert said("args.context=64") == ""


@pytest.mark.parametrize("command", NEW_RUN)
def test_a_codec_that_is_not_installed_is_refused_with_what_to_install(toolkit, monkeypatch, command: str) -> None:
    job = job_with(toolkit, 'compression = "zstd"')
    monkeypatch.setitem(sys.modules, "zstandard", None)
    filters._zstandard.cache_clear()
    said = toolkit(command, job)
    assert (said.code, said.err.count("\n")) == (2, 1)
    assert ":4:checkpoint.compression: zstd compression of checkpoints requires zstandard, but " in said.err
    assert f"{sys.executable}, which also runs the ranks, does not have it. Fix: install the extra: pip" in said.err
    toolkit.ok("render", job_with(toolkit, 'compression = "gzip"'))


def trained(toolkit, checkpoint_table: str) -> Path:
    """As `job_with`, of a job with a main function."""
    (toolkit.folder / "fit.py").write_text("def main(world, config): ...\n")
    path = toolkit.folder / "fit.toml"
    path.write_text(f'[job]\nentry = "fit.py:main"\n[checkpoint]\n{checkpoint_table}\n')
    return path


def test_a_source_at_the_last_step_leaves_nothing_to_do_but_for_its_weights(toolkit, sources) -> None:
    source = 'source = "old/checkpoints/step-00000010"'
    said = toolkit("render", trained(toolkit, source), "--set", "train.steps=10")
    assert (said.code, "step-00000010 is at step 10, and train.steps is 10: no steps would remain" in said.err) == (
        2,
        True,
    )
    assert 'Fix: set train.steps above 10, or checkpoint.take to "weights"' in said.err
    toolkit.ok("render", trained(toolkit, source), "--set", "train.steps=11")
    toolkit.ok("render", trained(toolkit, f'{source}\ntake = "weights"'), "--set", "train.steps=10")
    toolkit.ok("render", job_with(toolkit, source), "--set", "train.steps=10")  # a script counts as it likes


def test_what_was_imported_is_refused_before_the_ranks_refuse_it(toolkit) -> None:
    """It has tensors and no training to go on with: its weights can be taken, where they are the model's."""
    beginning = json.dumps({"w": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}).encode()
    (toolkit.folder / "m.safetensors").write_bytes(len(beginning).to_bytes(8, "little") + beginning + b"ab")
    bare = toolkit.ok("ckpt", "import", toolkit.folder / "m.safetensors", toolkit.folder / "bare").strip()
    model = toolkit.ok(
        "ckpt", "import", toolkit.folder / "m.safetensors", toolkit.folder / "new", "--under", "model"
    ).strip()
    said = toolkit("render", trained(toolkit, f'source = "{model}"'))
    place = f"toolkit: {toolkit.folder}/fit.toml:4:checkpoint.source: {model} was imported, and has no training state"
    assert (said.code, said.err.startswith(place)) == (2, True), said.err
    assert said.err.endswith('Fix: set checkpoint.take to "weights"\n')
    toolkit.ok("render", trained(toolkit, f'source = "{model}"\ntake = "weights"'))
    said = toolkit("render", trained(toolkit, f'source = "{bare}"\ntake = "weights"'))
    assert said.code == 2
    assert "has no tensors below `model`. Fix: import the file again with --under model" in said.err
    toolkit.ok("render", job_with(toolkit, f'source = "{bare}"'))  # what a script takes of it is its own business
