"""`toolkit submit job.sh` and `toolkit run job.sh` without Slurm, and the script that Slurm gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.rundir.layout import RunDirectory


def write(folder: Path, lines: str, *, name: str = "job.sh") -> Path:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{lines}\n")
    return path


def directives(text: str) -> list[str]:
    found = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    own = ("--output=/", "--comment=toolkit:", "--open-mode=append")
    return [line for line in found if not line.startswith(own)]


def test_a_script_runs_once_with_its_arguments(toolkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "of the shell")
    for name in ("OMP_NUM_THREADS", "TOOLKIT_REQUIRE_CLUSTER"):  # those of the test run
        monkeypatch.delenv(name, raising=False)
    script = write(
        tmp_path, 'echo "$# [$2] in $PWD, $KEPT"; echo problem >&2; env | grep -E "^(TOOLKIT_R|RANK|OMP)"; exit 3'
    )
    assert toolkit("run", script, "--", "a", "b c").code == 3
    (path,) = toolkit.runs.glob("job.sh/2*")
    run = RunDirectory(path)
    log = run.attempt(0).log_file(0).read_text().splitlines()
    assert log[:2] == [f"2 [b c] in {Path.cwd()}, of the shell", "problem"]
    assert sorted(log[2:]) == ["TOOLKIT_RESTART=0", f"TOOLKIT_RUNS={toolkit.runs}"]
    assert run.attempt_numbers() == [0]
    assert run.batch_script.read_bytes() == script.read_bytes() and not run.job_file.exists()


def test_a_script_runs_in_the_folder_of_chdir(toolkit, tmp_path: Path) -> None:
    (folder := tmp_path / "data set").mkdir()
    script = write(tmp_path, f'#SBATCH --chdir="{folder}"\necho "in $PWD"; env | grep CHDIR')
    assert toolkit("run", script).code == 1  # grep finds no variable of toolkit
    (run,) = toolkit.runs.glob("job.sh/2*")
    assert RunDirectory(run).attempt(0).log_file(0).read_text() == f"in {folder}\n"
    folder.rmdir()
    failed = toolkit("run", script)
    assert failed.code and f"cannot change to the folder {folder}: No such file or directory" in failed.err


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("FOO=bar,BAZ", "bar of_shell"),
        ("ALL,FOO=bar", "bar of_shell"),
        ("FOO=bar,ALL", "shell of_shell"),
        ("FOO='a b,c',BAZ=2", "'a b,c' 2"),
        ("NONE", "shell of_shell"),
    ],
)
def test_a_script_has_the_variables_of_export(
    toolkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, expected: str
) -> None:
    monkeypatch.setenv("FOO", "shell")
    monkeypatch.setenv("BAZ", "of_shell")
    script = write(tmp_path, f'#SBATCH --export="{value}"\necho "has $FOO $BAZ"')
    assert f"has {expected}\n" in toolkit.ok("run", script)


def test_a_script_of_python(toolkit, tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text("#!/usr/bin/env python3\n#SBATCH --ntasks=1\nimport sys; print(sys.argv[1:])\n")
    assert "['x']" in toolkit.ok("run", script, "--", "x")


@pytest.mark.usefixtures("dev_cluster_conf")
def test_the_rendered_script_has_only_what_the_script_states(toolkit, tmp_path: Path) -> None:
    script = write(
        tmp_path, '#SBATCH -n 8 --mem=500M -t 5\n#SBATCH --job-name="my job"\n#SBATCH --signal=USR1@60\necho'
    )
    text = toolkit.ok("render", script, "--site", "devcluster")
    assert directives(text) == [
        "--job-name=my_job", "--time=5", "--partition=main", "--ntasks=8", "--mem=500M", '--job-name="my job"',
        "--signal=USR1@60",
    ]  # fmt: skip


@pytest.mark.usefixtures("dev_cluster_conf")
def test_flags_and_variables_override_directives(toolkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = write(tmp_path, "#SBATCH -n 8 --gpus-per-node=a100:2 -t 5 -J 'my job' -p short\necho")
    monkeypatch.setenv("SBATCH_TIMELIMIT", "7")
    text = toolkit.ok("render", script, "--site", "devcluster", "-J", "mine", "-n", "4", "--gpus-per-node", "1")
    assert directives(text) == [
        "--job-name=mine", "--gpus-per-node=1", "--time=7", "--partition=short", "--ntasks=8", "--ntasks=4",
    ]  # fmt: skip


@pytest.mark.parametrize("option", ["--wrap=hostname", "--test-only", "--input=data", "--container=/x"])
def test_a_directive_that_toolkit_cannot_follow(toolkit, tmp_path: Path, option: str) -> None:
    said = toolkit("run", write(tmp_path, f"#SBATCH {option}\necho"))
    assert said.code == 2 and f"job.sh:2: toolkit cannot run a script with {option.partition('=')[0]}" in said.err


def test_what_is_not_a_script(toolkit, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("#SBATCH -N2\nhostname\n")
    assert "job.sh:1: expected a script that starts with `#!`" in toolkit("run", script).err
    job = tmp_path / "job.toml"
    job.write_text('[job]\nentry = "job.sh"\nonce = true\n')
    assert "job.sh does not start with `#!`" in toolkit("run", job).err
    job.write_text('[job]\nentry = ["./job.sh"]\nonce = true\n')
    assert "expected the name of a script" in toolkit("run", job).err


def test_a_job_file_runs_a_script_with_its_variables(toolkit, tmp_path: Path) -> None:
    write(tmp_path, 'echo "$MINE $1"; echo $OMP_NUM_THREADS')
    job = tmp_path / "mine.toml"
    job.write_text('[job]\nentry = "job.sh"\nonce = true\n[env]\nvars = { MINE = "of the job" }\n')
    assert "of the job x\n" in toolkit.ok("run", job, "--", "x")


def test_a_stop_reaches_the_programs_of_a_script(toolkit, tmp_path: Path, wait_until) -> None:
    code = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(print('saved', flush=True))); print('up', flush=True); time.sleep(60)"
    script = write(tmp_path, f'python3 -c "{code}"')
    run = toolkit.submit(script)
    log = run.attempt(0).log_file(0)
    wait_until(lambda: log.exists() and "up" in log.read_text())
    toolkit.ok("stop", run.run_id)
    assert toolkit("wait", run.run_id).code == 130
    assert "saved" in log.read_text()


def test_variables_of_slurm_that_do_not_exist_here_are_named(toolkit, tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "# $SLURM_NODEID\ncd $SLURM_SUBMIT_DIR && echo in $PWD\necho ${SLURM_NTASKS:-1} $SLURM_JOB_ID\necho ${SLURM_JOB_ID}",
    )
    said = toolkit("run", script)
    assert f"in {Path.cwd()}\n" in said.out
    assert "job.sh reads SLURM_JOB_ID (line 4), which only Slurm sets. Fix:" in said.err


def test_arguments_before_the_dashes_are_rejected(toolkit, tmp_path: Path) -> None:
    script = write(tmp_path, 'echo "[$@]"')
    assert "unexpected argument 'ok'; write `--` before" in toolkit("run", script, "ok", "--", "x").err
    assert "[ok x]" in toolkit.ok("run", script, "--", "ok", "x")
    assert "[ok x]" in toolkit.ok("run", script, "ok", "x")  # as for sbatch
    assert "unexpected argument 'ok'; write `--` before" in toolkit("resume", "last", "ok", "--", "x").err
