"""Submit on this machine: what the run directory holds, what the command prints, what its exit code says."""

from __future__ import annotations

import json
import stat
from functools import partial
from pathlib import Path

import pytest

from toolkit.rundir.layout import RunDirectory
from toolkit.submission import submitit_executors as executors


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_run_directory(toolkit) -> None:
    job = toolkit.job('echo to the log; test -n "$MINE"', more='[env]\nvars = { MINE = "1" }\n')
    run = toolkit.submit(job)
    assert toolkit("wait", run.run_id).code == 0
    names = {str(path.relative_to(run.path)) for path in run.path.rglob("*")}
    job_id = json.loads(toolkit.ok("status", "--json"))["job_id"]
    assert names >= {
        "job.toml", "record.json", "job.sbatch", "secret", "submitted-000.json", "control", "checkpoints", "metrics",
        "starts/000/claim.json", "starts/000/job.json", "starts/000/end.json", "attempts/000/start.json",
        "attempts/000/exit.json", "attempts/000/events.jsonl", "attempts/000/logs/rank-0.log",
        "attempts/000/ranks/rank-00000.done", f"slurm-{job_id}.out",
    }, names  # fmt: skip
    assert run.job_file.read_text() == job.read_text()
    assert not [name for name in names if name.endswith((".pkl", ".tmp", "submission.sh"))]
    wrong = {
        str(path): oct(mode(path))
        for path in [run.path, *run.path.rglob("*")]
        if mode(path) != (0o700 if path.is_dir() or path.name == "job.sbatch" else 0o600)
    }
    assert wrong == {}


def test_a_warning_before_the_supervisor_handles_it_ends_nothing(toolkit) -> None:
    run = toolkit.submit(toolkit.job("true", more="[env]\nsetup = ['kill -USR2 $$']\n"))
    assert toolkit("wait", run.run_id).code == 0


@pytest.mark.parametrize(("end", "code"), [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137)])
def test_wait_has_the_jobs_exit_code(toolkit, end: str, code: int) -> None:
    job = toolkit.job(f"printf 'last words'; {end}", more="[restart]\ncrashes = 0\n")
    said = toolkit("submit", job, "--wait")
    assert said.code == code
    if code:
        assert "rank 0 on " in said.err and "| last words" in said.err
    assert toolkit("wait", "last").code == code


def test_words_behind_the_dashes_reach_the_program(toolkit) -> None:
    run = toolkit.submit(toolkit.job('printf "<%s>" "$@"'), "--", "--wait", "a b", "", "-n", "ü'\"$x")
    toolkit.ok("wait", run.run_id)
    assert toolkit.ok("logs", "--rank", 0) == "<--wait><a b><><-n><ü'\"$x>\n"


def test_render_prints_the_script_and_starts_nothing(toolkit) -> None:
    printed = toolkit.ok("render", toolkit.job("true"))
    run = newest(toolkit.runs)
    assert printed == run.script(0).read_text()
    assert f"# Run {run.run_id} of job work, site local" in printed
    assert not list(run.path.glob("submitted-*")) and not run.start_numbers()
    assert "created" in toolkit.ok("status", newest(toolkit.runs).run_id)


def test_a_dry_run_prints_the_script_and_keeps_nothing(toolkit) -> None:
    printed = toolkit.ok("submit", toolkit.job("true"), "--dry-run")
    assert printed.startswith("#!/bin/bash") and "of job work, site local" in printed
    assert list(toolkit.runs.iterdir()) == []


def test_last_is_no_run_that_was_only_rendered(toolkit) -> None:
    toolkit.ok("render", toolkit.job("true"))
    rendered = newest(toolkit.runs)
    said = toolkit("status", "last")
    assert (said.code, f"{rendered.run_id} is only rendered" in said.err) == (4, True)
    run = toolkit.submit(toolkit.job("true"))
    toolkit.ok("render", toolkit.job("true"))
    assert run.run_id in toolkit.ok("status", "last")


@pytest.mark.parametrize("command", [["wait"], ["logs", "-f"], ["resume"]])
def test_nothing_waits_for_a_run_that_was_only_rendered(toolkit, command: list[str]) -> None:
    toolkit.ok("render", toolkit.job("true"))
    run = newest(toolkit.runs)
    said = toolkit(*command, run.run_id)
    assert (said.code, "was rendered but not submitted" in said.err, f"bash {run.script(0)}" in said.err) == (
        1, True, True,
    )  # fmt: skip


@pytest.mark.usefixtures("dev_cluster_conf")
@pytest.mark.parametrize(("answer", "left"), [("echo no >&2; exit 1", 0), ("echo nothing known", 1)])
def test_a_refused_run_leaves_nothing(toolkit, fake_slurm, monkeypatch, answer: str, left: int) -> None:
    """Unless nobody knows whether sbatch took it: then the job would need its folder."""
    for command in ("sbatch", "srun", "squeue", "sacct"):
        fake_slurm.script(command, answer)
    monkeypatch.setattr(executors, "submit_once", partial(executors.submit_once, patience_s=0))
    said = toolkit("submit", toolkit.job("true"), "--site", "devcluster")
    assert said.code == 3
    assert len(list(toolkit.runs.glob("work/*"))) == left
    assert len(list(toolkit.runs.glob("work/*/submitting-000.json"))) == left


def newest(runs: Path) -> RunDirectory:
    return RunDirectory(max(runs.glob("*/*"), key=lambda path: path.name))


def test_parsable_is_the_job_and_the_run_alone(toolkit) -> None:
    said = toolkit("submit", toolkit.job("true"), "--parsable")
    job, _, run_id = said.out.strip().partition(";")
    assert (said.out, said.err) == (f"{job};{run_id}\n", "")
    assert job.startswith("local-") and toolkit.run(run_id).run_id == run_id
    toolkit.ok("wait", job)


def test_a_script_that_cannot_be_rendered_leaves_no_run(toolkit) -> None:
    said = toolkit("submit", toolkit.job("true"), "--runs", toolkit.folder / "back\\slash")
    assert (said.code, "backslash" in said.err) == (2, True)
    assert not list((toolkit.folder / "back\\slash").glob("*/*"))


def test_run_here_shows_what_ranks_print_and_ends_as_they_do(toolkit) -> None:
    job = toolkit.job("printf 'rank %s' $PMI_RANK$OMPI_COMM_WORLD_RANK; exit 5", more="[restart]\ncrashes = 0\n")
    said = toolkit("run", job)
    assert (said.code, said.out) == (5, "rank 0\n")
    # Its second rank begins later: whether lines are numbered does not hang on which logs are there yet.
    late = "sleep $PMI_RANK$OMPI_COMM_WORLD_RANK; printf hello"
    many = toolkit("run", toolkit.job(late), "-n", 2)
    assert (many.code, many.out) == (0, "[0] hello\n[1] hello\n")


def test_site_local_inside_an_allocation_stays_on_this_machine(toolkit, monkeypatch) -> None:
    """SLURM_ variables of somebody's salloc must not turn a local run into a step."""
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    for command in (["run", "--site", "local"], ["submit", "--wait"]):
        assert toolkit(*command, toolkit.job('test -z "$SLURM_JOB_ID"')).code == 0
        assert "local-" in toolkit.ok("status")


def test_the_record_keeps_no_secrets(toolkit, monkeypatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "hunter2-in-the-environment")
    run = toolkit.submit(
        toolkit.job('test "$MY_TOKEN" = hunter2-in-the-environment', more='[env]\npass = ["MY_TOKEN"]\n')
    )
    assert toolkit("wait", run.run_id).code == 0  # it reached the rank
    for path in run.path.rglob("*"):
        assert path.is_dir() or "hunter2" not in path.read_text().replace("= hunter2-in-the-environment", ""), path


def test_code_of_a_repository_is_recorded(toolkit) -> None:

    import subprocess

    def git(*words: str) -> None:
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        subprocess.run(["git", "-C", str(toolkit.folder), *identity, *words], check=True, capture_output=True)

    job = toolkit.job("true")
    git("init", "-q")
    git("add", job.name)
    git("commit", "-qm", "first")
    toolkit.ok("render", job)
    assert json.loads(newest(toolkit.runs).record.read_text())["code"]["clean"] is True
    job.write_text(job.read_text() + "# changed\n")
    toolkit.ok("render", job)
    code = json.loads(newest(toolkit.runs).record.read_text())["code"]
    assert code["clean"] is False and "+# changed" in code["diff"]


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        ("toolkit.submission.create", "make_record"),  # in the middle of the making
        ("toolkit.submission.submitit_executors", "LocalScriptExecutor"),  # the run is made, and nobody has its script
    ],
)
def test_an_interrupt_before_the_start_leaves_nothing(toolkit, monkeypatch, owner: str, name: str) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"{owner}.{name}", interrupt)
    said = toolkit("submit", toolkit.job("true"))
    assert (said.code, said.err.strip()) == (130, "toolkit: interrupted")
    assert not list(toolkit.runs.iterdir())


def test_an_interrupt_of_the_start_keeps_the_run(toolkit, monkeypatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("toolkit.submission.submitit_executors.start_local", interrupt)
    said = toolkit("submit", toolkit.job("true"))
    run = newest(toolkit.runs)
    assert said.code == 130 and f"`toolkit status {run.run_id}` shows whether it was submitted" in said.err
