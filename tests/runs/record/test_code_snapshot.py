"""The copy of the job's folder: what is edited while a job waits does no harm, and what is no code is left where it lies."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from toolkit.rundir.layout import RunDirectory
from toolkit.runs.record import code_snapshot as snapshot


def rendered(toolkit, project: Path, *words: object) -> RunDirectory:
    toolkit.ok("render", project / "work.toml", *words)
    (path,) = toolkit.runs.glob("*/*")
    return RunDirectory(path)


def live(run: RunDirectory) -> str:
    """Run a rendered script by hand; what rank 0 printed."""
    subprocess.run(["bash", str(run.script(0))], check=True, env={"PATH": "/usr/bin:/bin", "TOOLKIT_LOCAL": "1"})
    return run.attempt(0).log_file(0).read_text()


def test_a_job_that_waits_runs_what_was_submitted(toolkit, repository: Path) -> None:
    site = toolkit.folder / "here.toml"  # without an MPI to start
    site.write_text('name = "here"\nextends = "local"\n[launcher]\nkind = "local"\n')
    run = rendered(toolkit, repository, "--site", site)
    (repository / "helper.py").write_text("WORD = 'edited'\n")
    (repository / "train.py").write_text("raise SystemExit('edited')\n")
    assert live(run) == "as submitted data\n"


def test_none_starts_from_the_folder_itself(toolkit, project: Path) -> None:
    run = rendered(toolkit, project, "--set", "job.snapshot=none")
    record = json.loads(run.record.read_text())
    assert record["job"]["code_directory"] is None and not run.code(0).exists()
    assert record["code"]["snapshot_left_out"] == "not asked for"


def test_git_says_what_is_code_and_the_rest_is_linked(toolkit, repository: Path) -> None:
    (repository / "new.py").write_text("")
    (repository / "tool.sh").write_text("#!/bin/sh\n")
    (repository / "tool.sh").chmod(0o755)
    (repository / "also.py").symlink_to("new.py")
    (repository / "source" / "package").mkdir(parents=True)
    (repository / "source" / "package" / "module.py").write_text("")
    (repository / "package").symlink_to("source/package")
    (repository / "history").symlink_to(".git")
    (repository / "head").symlink_to(".git/HEAD")
    (repository / "loop").symlink_to("loop")
    (repository / "source" / "__pycache__").mkdir()
    (repository / "source" / "__pycache__" / "module.pyc").write_text("which the ranks write again")
    (repository / "large.bin").write_bytes(bytes(snapshot.LARGEST_FILE_BYTES + 1))
    code = rendered(toolkit, repository).code(0)
    copied = {path.name for path in code.iterdir() if not path.is_symlink()}
    assert copied == {".gitignore", "helper.py", "head", "new.py", "source", "tool.sh", "train.py", "work.toml"}
    linked = {path.name: str(path.readlink()) for path in code.iterdir() if path.is_symlink()}
    assert linked == {
        "also.py": "new.py",  # within the folder: a link to the copy
        **{name: str(repository / name) for name in ("cache", "data.txt", "large.bin", "history", "loop")},
        "package": "source/package",
    }
    assert (code / "package" / "module.py").resolve() == (code / "source" / "package" / "module.py").resolve()
    assert (code / "head").read_text() == (repository / ".git" / "HEAD").read_text() and not (
        code / "source" / "__pycache__"
    ).exists()
    assert (code / "tool.sh").stat().st_mode & 0o777 == 0o700
    assert (code / "new.py").stat().st_mode & 0o777 == 0o600


def test_a_folder_without_a_repository_is_copied_but_for_what_is_no_code(toolkit, project: Path) -> None:
    for name, mark in (
        ("venv", "pyvenv.cfg"),
        ("old-run", "record.json"),
        (".hidden", "x"),
        ("__pycache__", "x.pyc"),
        ("package", "__init__.py"),
    ):
        (project / name).mkdir()
        (project / name / mark).write_text("{}")
    code = rendered(toolkit, project).code(0)
    assert {path.name for path in code.iterdir() if not path.is_symlink()} == {
        "data.txt",
        "helper.py",
        "package",
        "train.py",
        "work.toml",
    }
    assert {path.name for path in code.iterdir() if path.is_symlink()} == {"venv", "old-run", ".hidden"}


def test_runs_below_the_folder_are_never_copied(toolkit, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLKIT_RUNS", str(repository / "runs"))
    for _ in range(2):
        toolkit.ok("render", repository / "work.toml")
    for code in repository.glob("runs/*/*/code"):
        assert not (code / "runs").exists() and not (code / "runs").is_symlink()


def test_a_folder_that_is_too_large_is_told(toolkit, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "MOST_FILES", 3)
    said = toolkit("render", project / "work.toml")
    assert said.code == 0
    assert (
        "has more than 3 files: too large for a snapshot; the ranks will run the code that is in the folder when they start"
        in said.err
    )
    said = toolkit("render", project / "work.toml", "--set", "job.snapshot=copy")
    assert said.code == 2 and 'snapshot = "none"' in said.err
    monkeypatch.setattr(snapshot, "MOST_FILES", 5000)
    monkeypatch.setattr(snapshot, "MOST_BYTES", 10)
    assert "MiB of files, more than 0" in toolkit("render", project / "work.toml").err
    assert len(list(toolkit.runs.glob("*/*"))) == 2  # of the refused one nothing stays


def test_a_program_from_elsewhere_has_no_code_there(toolkit) -> None:
    run = toolkit.submit(toolkit.job("true"))
    assert not run.code(0).exists()
    assert "names no file" in json.loads(run.record.read_text())["code"]["snapshot_left_out"]


def test_the_outputs_of_a_script_are_not_reported_as_edits(toolkit, project: Path) -> None:
    (project / "work.toml").write_text('[job]\nentry = ["./train.sh"]\n[restart]\nprogress = "out/*.pt"\n')
    script = project / "train.sh"
    script.write_text(f"#!/bin/sh\nmkdir -p {project}/out; date >>{project}/out/ckpt.pt; date >>{project}/log.csv\n")
    script.chmod(0o755)
    toolkit.submit(project / "work.toml", "--wait")
    said = toolkit("resume", "last", "--wait")
    assert "since the last start, log.csv was added; start 1" in said.err


def test_a_resume_takes_the_folder_as_it_is_and_says_so(toolkit, project: Path) -> None:
    (project / "work.toml").write_text('[job]\nentry = ["./train.sh"]\n')
    script = project / "train.sh"
    script.write_text("#!/bin/sh\necho as submitted\n")
    script.chmod(0o755)
    run = toolkit.submit(project / "work.toml", "--wait")
    script.write_text("#!/bin/sh\necho mended\n")
    said = toolkit("resume", "last", "--wait")
    assert said.code == 0, said
    assert "train.sh was changed; start 1 uses the new code (--same-code: the old)" in said.err
    script.write_text("#!/bin/sh\necho not this\n")
    assert toolkit("resume", "last", "--same-code", "--wait").code == 0
    assert [run.attempt(number).log_file(0).read_text() for number in range(3)] == [
        "as submitted\n",
        "mended\n",
        "mended\n",
    ]
    assert not run.code(2).exists() and not list(run.path.glob(".code*"))


def write(path: Path, text: str = "x", mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


@pytest.fixture(params=["project", "repository"])
def with_outputs(request) -> Path:
    """A job's folder, with and without git, with outputs of earlier runs beside code with similar names."""
    folder = request.getfixturevalue(request.param)
    (folder / "work.toml").write_text('[job]\nentry = "train.py"\n[restart]\nprogress = "out/**/*.pt"\n')
    for name in (
        "out/a.pt", "out/deep/b.pt", "out/notes.md", "models/last.ckpt", "models/model.py", "lightning_logs/version_0/h.yaml",
        "sub/wandb/run-1/files/config.yaml", "sub/code.py", "hf/checkpoint-500/model.json", "checkpoint-tools.py",
        "checkpoint-9.json", "wandb/__init__.py", "old/exp/20260101-010101-abcd/record.json",
        "old/exp/20260101-010101-abcd/code/train.py", "old/.bad-nodes/site/n1.json", "lib/exp/util.py", "lib/empty.txt",
        "checkpoint-tools/lib/conv.py", "checkpoint-tools/a.bin", "old/plot.py", "beside/20260101-010101-abcd/code/x.py", "beside/use.py",
    ):  # fmt: skip
        write(folder / name, name)
    return folder


def test_outputs_of_earlier_runs_are_links_and_nothing_is_missing(toolkit, with_outputs: Path) -> None:
    code = rendered(toolkit, with_outputs).code(0)
    links = {
        "out/a.pt", "out/deep/b.pt", "models/last.ckpt", "lightning_logs", "sub/wandb", "hf/checkpoint-500",
        "checkpoint-9.json", "old/exp", "checkpoint-tools/a.bin", "beside/20260101-010101-abcd",
    }  # fmt: skip
    copies = {
        "out/notes.md", "models/model.py", "sub/code.py", "checkpoint-tools.py", "wandb/__init__.py", "lib/exp/util.py",
        "checkpoint-tools/lib/conv.py", "old/plot.py", "beside/use.py",
    }  # fmt: skip
    assert {name for name in links | copies if (code / name).is_symlink()} == links
    for path in with_outputs.rglob("*"):
        name = path.relative_to(with_outputs)
        if path.is_file() and not {".git", "__pycache__"} & {*name.parts}:
            assert (code / name).read_bytes() == path.read_bytes(), name
    real = [folder for folder in ("out", "out/deep", "models", "hf", "sub", "lib") if not (code / folder).is_symlink()]
    assert len(real) == 6  # what a job writes there stays in its copy
    (code / "out" / "new.pt").write_text("new")
    (code / "lightning_logs" / "version_1").mkdir()
    assert not (with_outputs / "out" / "new.pt").exists() and (with_outputs / "lightning_logs" / "version_1").exists()
    listed = json.loads(code.with_name("code.json").read_text())
    assert links <= {*listed["linked"]} and links.isdisjoint(listed["files"])


def test_a_copy_is_private_before_it_has_its_mode(toolkit, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes, chmod = [], Path.chmod

    def note(path: Path, mode: int) -> None:
        modes.extend([path.stat().st_mode & 0o777] if path.name == "helper.py" else [])
        chmod(path, mode)

    monkeypatch.setattr(Path, "chmod", note)
    before = os.umask(0)
    try:
        rendered(toolkit, project)
    finally:
        os.umask(before)
    assert modes == [0o600]


def test_a_rerun_has_the_same_links_and_outputs_are_no_difference(toolkit, with_outputs: Path) -> None:
    run = rendered(toolkit, with_outputs)
    again = toolkit.ok("rerun", run.path, "--parsable").partition(";")[2].strip() or "last"
    (with_outputs / "out" / "a.pt").write_text("another")
    copy = toolkit.run(again).code(0)
    assert (copy / "out" / "a.pt").read_text() == "another" and (copy / "lightning_logs").is_symlink()
    before, after = snapshot.read_snapshot(run.code(0)), snapshot.read_snapshot(copy)
    assert before is not None and after is not None and before.digest == after.digest
    one = snapshot.CodeFile("0", 1, False)
    older = replace(before, files={**before.files, "out/a.pt": one, "lightning_logs/version_0/h.yaml": one}, linked=[])
    assert snapshot.differences(older, after) == {}  # older versions copied outputs


@pytest.mark.parametrize("access", ["user", "group"])
def test_what_only_the_owner_may_read_stays_so(toolkit, repository: Path, access: str) -> None:
    site = toolkit.folder / "here.toml"
    site.write_text(f'name = "here"\nextends = "local"\n[paths]\naccess = "{access}"\n')
    write(repository / "key", "hidden", 0o600)
    write(repository / "tool", "hidden", 0o700)
    write(repository / "private" / "data.csv")
    (repository / "private").chmod(0o700)
    write(repository / "hook.url", "https://example.org", 0o600)
    text = '[job]\nentry = "train.py"\n[notify]\nwebhook = "file:' + str(repository / "hook.url") + '"\n'
    write(repository / "work.toml", text, 0o600)
    (repository / "helper.py").chmod(0o600)
    with (repository / "helper.py").open("a") as stream:
        stream.write("TOKEN = 'T0SECRET'\n")  # git tracks it, so the diff has the change
    run = rendered(toolkit, repository, "--site", site)

    def mode(path: Path) -> int:
        return path.stat().st_mode & 0o777

    shared, code = access == "group", run.code(0)
    assert {name: mode(code / name) for name in ("key", "tool", "private", "helper.py", "train.py")} == {
        "key": 0o600, "tool": 0o700, "private": 0o700, "helper.py": 0o600, "train.py": 0o640 if shared else 0o600,
    }  # fmt: skip
    assert (code / "hook.url").is_symlink() and mode(run.job_file) == 0o600
    assert mode(code) == (0o750 if shared else 0o700) and mode(run.record) == (0o640 if shared else 0o600)
    state = json.loads(run.record.read_text())["code"]
    assert state.get("diff_left_out") == ("only you may read helper.py" if shared else None)
    for path in (
        path for path in run.path.rglob("*") if path.is_file() and not path.is_symlink() and mode(path) & 0o077
    ):
        assert b"T0SECRET" not in path.read_bytes() and b"hidden" not in path.read_bytes(), path


def test_a_private_folder_of_a_job_stays_private(toolkit, project: Path) -> None:
    site = toolkit.folder / "here.toml"
    site.write_text('name = "here"\nextends = "local"\n[paths]\naccess = "group"\n')
    project.chmod(0o700)
    code = rendered(toolkit, project, "--site", site).code(0)
    assert code.stat().st_mode & 0o777 == 0o700


def test_a_file_that_holds_a_secret_is_linked(toolkit, project: Path) -> None:
    secret = project / "token.txt"
    secret.write_text("hidden\n")
    secret.chmod(0o600)
    (project / "work.toml").write_text(f'[job]\nentry = "train.py"\n[env.secrets]\nWORD = "file:{secret}"\n')
    run = rendered(toolkit, project)
    assert (run.code(0) / "token.txt").is_symlink() and not (run.code(0) / "train.py").is_symlink()
