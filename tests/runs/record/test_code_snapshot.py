"""The copy of the job's folder: what is edited while a job waits does no harm, and what is no code is left where it lies."""

from __future__ import annotations

import json
import subprocess
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


def test_a_file_that_holds_a_secret_is_linked(toolkit, project: Path) -> None:
    secret = project / "token.txt"
    secret.write_text("hidden\n")
    secret.chmod(0o600)
    (project / "work.toml").write_text(f'[job]\nentry = "train.py"\n[env.secrets]\nWORD = "file:{secret}"\n')
    run = rendered(toolkit, project)
    assert (run.code(0) / "token.txt").is_symlink() and not (run.code(0) / "train.py").is_symlink()
