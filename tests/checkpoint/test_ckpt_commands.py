"""`toolkit ckpt`, as a user types it; and that none of it imports torch."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import h5py
import pytest
import torch
import xxhash
from ckpt_runs import SHARD, disk_of_one_mib, flip, save, two_steps, typed
from click.testing import CliRunner

from toolkit.checkpoint.format.digests import BLOCK_BYTES
from toolkit.cli.main import cli
from toolkit.errors import ToolkitError

WITHOUT_TORCH = """
import sys
from toolkit.cli.main import cli
import toolkit.checkpoint
code = cli.main(sys.argv[1:], standalone_mode=False)
assert "torch" not in sys.modules, "torch was imported"
sys.exit(code)
"""


@pytest.fixture
def run(tmp_path) -> Path:
    return two_steps(tmp_path)


def invoke(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["ckpt", *map(str, words)], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.return_value or 0, result.stdout


COMMANDS = [
    ["ls"], ["show"], ["show", "--norms"], ["show", "--pieces"], ["index"], ["verify"], ["verify", "--full"], ["diff", "{run}"],
    ["prune", "--keep-last", "1"],
]  # fmt: skip


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_no_command_imports_torch(run, words):
    argv = [word.format(run=run) for word in words]
    command = [sys.executable, "-c", WITHOUT_TORCH, "ckpt", *argv, str(run)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_ls_tells_committed_from_not(run):
    (run / "checkpoints" / "step-00000030.part-4").mkdir()
    (run / "checkpoints" / "step-00000010" / "manifest.json").unlink()
    _, text = invoke("ls", run)
    lines = text.splitlines()[1:]
    assert "manifest.json: is missing" in lines[0]
    assert lines[1].split()[0] == "20" and lines[1].split()[-1] == "ok"
    assert "step-00000030.part-4" in lines[2] and "not committed: attempt 4" in lines[2]
    _, text = invoke("ls", run, "--json")
    answers = json.loads(text)
    assert [(answer["step"], answer["good"]) for answer in answers] == [(10, False), (20, True), (None, False)]
    assert answers[1]["world_size"] == 1 and answers[1]["size_bytes"] > 24


def test_ls_takes_a_step_as_the_other_commands_do(run):
    (run / "checkpoints" / "step-00000020.bad-1").mkdir()
    for words in ([f"{run}:20"], [run, "--step", 20], [f"{run}:20", "--step", "20"], [f"{run}/checkpoints:20"]):
        answers = json.loads(invoke("ls", *words, "--json")[1])
        assert [Path(answer["path"]).name for answer in answers] == ["step-00000020", "step-00000020.bad-1"], words


def test_a_run_is_found_by_its_name(run, tmp_path):
    runs = tmp_path / "runs" / "train"
    runs.mkdir(parents=True)
    run.rename(runs / "20260101-000000-abcd")
    (runs / "20260101-000000-abcd" / "record.json").write_text("{}")
    _, text = invoke("ls", "20260101-000000-abcd", "--runs", tmp_path / "runs")
    assert text.splitlines()[-1].split()[0] == "20"


def test_index_is_made_anew(run):
    lost = run / "checkpoints" / "step-00000020" / "index.h5"
    lost.write_bytes(b"not an index")
    _, text = invoke("index", run)
    assert text == f"{lost}\n"
    with h5py.File(lost) as file:
        assert file["tensors/model.a%2F[b]"][:].tolist() == [[1.0] * 3] * 4


def test_a_folder_in_the_place_of_the_index_is_said(run):
    index = run / "checkpoints" / "step-00000020" / "index.h5"
    index.unlink()
    index.mkdir()
    with pytest.raises(ToolkitError, match=r"cannot be written: Is a directory\. Fix: remove or rename .*index\.h5$"):
        invoke("index", run)


def test_a_full_disk_is_said_with_a_way_out_that_helps(run, tmp_path):
    """The folder is given by its path: another --runs would change nothing."""
    with disk_of_one_mib(tmp_path / "small") as disk:
        shutil.copytree(run, disk / "run")
        folder = disk / "run" / "checkpoints" / "step-00000020"
        (folder / "index.h5").unlink()
        with suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
            while filler.write(bytes(4096)):
                pass
        done = typed("index", disk / "run")
        assert (done.returncode, done.stdout) == (125, "") and done.stderr.count("\n") == 1
        assert f"toolkit: {folder / 'index.h5'}: cannot be written: No space left on device." in done.stderr
        assert "Fix: free disk space, for example with `toolkit ckpt prune RUN`\n" in done.stderr
        assert typed("prune", disk / "run", "--keep-last", 1).returncode == 0
        assert typed("index", disk / "run").returncode == 0


def test_a_disk_that_can_only_be_read_is_said(run, tmp_path):
    with disk_of_one_mib(tmp_path / "small") as disk:
        shutil.copytree(run, disk / "run")
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        for words, verb in ((["index"], "written"), (["prune", "--keep-last", 1], "removed")):
            done = typed(*words, disk / "run")
            assert (done.returncode, done.stderr.count("\n")) == (2, 1), done
            said = f"cannot be {verb}: Read-only file system. Fix: run the command on a host that can write there"
            assert said in done.stderr and "--runs" not in done.stderr


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_where_nothing_can_be_renamed_the_folder_is_named(run, monkeypatch, number):
    """File systems that copy on write may need room to rename."""
    error = OSError(number, os.strerror(number), "step")
    monkeypatch.setattr("toolkit.checkpoint.folder.prune.move_aside", raising(error))
    with pytest.raises(ToolkitError, match=r"cannot be removed: .* rename the folder first: `rm -r .*/step-00000010`$"):
        invoke("prune", run, "--keep-last", 1)


def raising(error):
    def fail(*_):
        raise error

    return fail


def test_verify_exits_1_and_names_file_block_and_tensor(run):
    assert invoke("verify", run)[0] == 0
    assert invoke("verify", "--full", run)[0] == 0
    flip(run / "checkpoints" / "step-00000010" / SHARD, -1)
    # The quick look reads no data.
    assert invoke("verify", run)[0] == 0
    code, text = invoke("verify", "--full", run)
    assert code == 1
    assert f"{SHARD} block 0" in text and "model.a/[b]" in text
    code, text = invoke("verify", "--full", run, "--json")
    (problem,) = json.loads(text)[0]["problems"]
    assert code == 1 and problem["block"] == 0 and problem["tensors"] == ["model.a/[b]"]
    assert json.loads(text)[1]["good"]


def test_verify_looks_at_all_checkpoints_and_counts(run):
    (run / "checkpoints" / "step-00000010" / SHARD).unlink()
    code, text = invoke("verify", run)
    lines = text.splitlines()
    assert code == 1
    assert [line.rpartition("/")[2] for line in lines if not line.startswith(" ")] == [
        "step-00000010: BAD", "step-00000020: ok", "2 checkpoints: 1 ok, 1 BAD",
    ]  # fmt: skip
    assert lines[1] == f"  {SHARD}: is missing"


def test_verify_says_how_much_it_read_and_how_fast(run):
    folder = run / "checkpoints" / "step-00000020"
    size = sum((folder / name).stat().st_size for name in (SHARD, SHARD.replace(".h5", ".digest")))
    code, text = invoke("verify", "--full", folder)
    assert code == 0 and ": ok (read " in text and text.endswith("/s)\n")
    (answer,) = json.loads(invoke("verify", "--full", folder, "--json")[1])
    assert (answer["read_bytes"], answer["unknown"]) == (size, "") and answer["seconds"] > 0
    (answer,) = json.loads(invoke("verify", folder, "--json")[1])
    assert answer["read_bytes"] == 0


def test_verify_names_a_few_of_many_tensors_and_blocks_and_json_all(run):
    many = {f"w{number:02}": torch.ones(4) for number in range(48)}
    folder = save(run, 30, many)
    flip(folder / SHARD, -1)
    _, text = invoke("verify", "--full", run, "--step", 30)
    assert "(contains w00, w01, w02 and 45 more)\n" in text
    _, text = invoke("verify", "--full", f"{run}:30", "--json")
    assert json.loads(text)[0]["problems"][0]["tensors"] == sorted(many)
    folder = save(run, 40, {"large": torch.zeros(25 * BLOCK_BYTES, dtype=torch.uint8)})
    with (folder / SHARD).open("r+b") as file:
        file.write(b"x" * 25 * BLOCK_BYTES)
    text = invoke("verify", "--full", folder)[1]
    assert text.endswith("  and 5 more; --json lists all\n") and text.count("was changed after it was saved") == 20


@pytest.fixture
def open_run() -> Iterator[Path]:
    """A run in a folder that everybody may enter; those of pytest are for its user alone."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield two_steps(Path(folder))


def test_what_this_user_may_not_read_is_not_called_damaged(open_run):
    """Nobody can say more of it, and the others are looked at."""
    closed = open_run / "checkpoints" / "step-00000010"
    (closed / SHARD).chmod(0)
    done = typed("verify", "--full", open_run, unprivileged=True)
    assert (done.returncode, done.stderr) == (125, "")
    assert "step-00000010: not checked\n" in done.stdout and "EACCES: Permission denied. Fix: " in done.stdout
    assert "BAD" not in done.stdout and done.stdout.splitlines()[-1].startswith("2 checkpoints: 1 ok, 1 not checked")
    closed.chmod(0)
    lines = typed("ls", open_run, unprivileged=True).stdout.splitlines()
    assert "cannot be read on" in lines[1] and lines[2].endswith(" ok")
    other = closed.with_name("step-00000020")
    other.chmod(0o500)
    for words in (["show", closed], ["index", f"{open_run}:20"], ["diff", open_run, closed], ["ls", closed / "inside"]):
        done = typed(*words, unprivileged=True)
        assert done.returncode in (2, 125) and done.stdout == "" and done.stderr.count("\n") == 1, done
        assert "Fix:" in done.stderr and "Permission denied" in done.stderr
    closed.chmod(0o700)
    other.chmod(0o700)


def test_nine_digits_come_after_eight(run):
    """As names they would stand before."""
    save(run, 100_000_000, {"x": torch.ones(1)})
    save(run, 99_999_999, {"x": torch.ones(1)})
    (run / "checkpoints" / "step-100000000.left-0").rename(run / "checkpoints" / "step-100000000")
    assert [answer["step"] for answer in json.loads(invoke("ls", run, "--json")[1])] == [10, 20, 99999999, 100000000]
    assert json.loads(invoke("show", run, "--json")[1])["step"] == 100_000_000


def test_ls_tells_what_a_resume_from_an_earlier_step_set_aside(run):
    (run / "checkpoints" / "step-00000020").rename(run / "checkpoints" / "step-00000020.aside-003")
    _, text = invoke("ls", run)
    assert text.splitlines()[2].endswith("archived: start 3 resumed from an earlier checkpoint")


HERE = "{run}/checkpoints/step-00000010"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["ls", "{run}/nothing"], 4, "there is no such folder"),
        (["ls", "{run}/checkpoints/step-00000015"], 4, "choose one of: step-00000010, step-00000020"),
        (["ls", "{run}/empty"], 4, "there is no checkpoint here"),
        (
            ["show", "{run}", "--step", "7"],
            4,
            "no committed checkpoint for step 7. Fix: choose one of the steps 10, 20",
        ),
        (["show", "{run}:7"], 4, "no committed checkpoint for step 7"),
        (["ls", "{run}:7"], 4, "there is no checkpoint for step 7. Fix: choose one of the steps 10, 20"),
        (["ls", "{run}:10", "--step", "20"], 2, "names step 10, but --step is 20"),
        (["show", "{run}:10", "--step", "20"], 2, "names step 10, but --step is 20"),
        (["verify", f"{HERE}/manifest.json"], 4, "expected a checkpoint folder, got a file"),
        (["show", "{run}/odd:5"], 4, "there is no checkpoint here"),
        (["show", "{run}/broken"], 1, "is not a valid manifest"),
        (["diff", "{run}", "{run}/broken"], 1, "is not a valid manifest"),
        (["show", "{run}/later"], 2, "with schema 1 or 2 or 3, got"),
        (["show", "{run}/pipe"], 1, "is not a regular file"),
        (["show", "{run}/folder"], 1, "is not a regular file"),
        (["show", "{run}", "--only", "modle"], 4, "no key matches 'modle'. Fix: begin with one of: model"),
        (["diff", "{run}", "{run}", "--only", "modle"], 4, "no key matches 'modle'"),
        (["ls", "{run}/torch"], 4, "is a torch.distributed.checkpoint (DCP) folder"),
        (["ls", "{run}/array"], 4, "pass a task of this array run: array_0"),
    ],
)
def test_a_mistake_is_one_line_with_its_fix(run, words, code, said):
    for name in ("empty", "odd:5", "broken", "later", "pipe", "folder/manifest.json", "torch", "array/tasks"):
        (run / name).mkdir(parents=True)
    good = (run / "checkpoints" / "step-00000010" / "manifest.json").read_text()
    (run / "broken" / "manifest.json").write_bytes(b"\xff" + good.encode()[:99])
    (run / "later" / "manifest.json").write_text(of_schema(9, good))
    os.mkfifo(run / "pipe" / "manifest.json")
    (run / "torch" / ".metadata").write_bytes(b"")
    done = typed(*(word.format(run=run) for word in words))
    assert (done.returncode, done.stdout) == (code, ""), done
    assert done.stderr.startswith("toolkit: ") and done.stderr.count("\n") == 1 and "Fix: " in done.stderr
    assert said in done.stderr


def of_schema(number: int, manifest: str) -> str:
    """A whole manifest of another version, under its own digest."""
    body = json.loads(manifest) | {"schema": number, "digest": "0" * 32}
    unsigned = json.dumps(body)
    return unsigned.replace("0" * 32, xxhash.xxh3_128_hexdigest(unsigned.encode()))


def test_a_locked_file_is_read_all_the_same(run):
    """NFS and Lustre may lock nothing, or wait for ever: none of our own looks may ask for a lock."""
    folder = run / "checkpoints" / "step-00000020"
    with (folder / SHARD).open("rb") as shard, (folder / "index.h5").open("rb") as index:
        for file in (shard, index):
            fcntl.flock(file, fcntl.LOCK_EX)
        for words in (
            ("show", "--norms", folder),
            ("verify", "--full", folder),
            ("index", folder),
            ("diff", run, folder),
        ):
            assert typed(*words).returncode == 0, words


def test_the_index_opens_without_locks_as_the_page_says(run):
    folder = run / "checkpoints" / "step-00000020"
    with (folder / SHARD).open("rb") as shard, (folder / "index.h5").open("rb") as index:
        for file in (shard, index):
            fcntl.flock(file, fcntl.LOCK_EX)
        with h5py.File(folder / "index.h5", locking=False) as file:
            assert file["tensors/model.a%2F[b]"][:].tolist() == [[1.0] * 3] * 4
