"""Rerun: the same configuration, code and data as a run before, whatever became of its folder; and what differs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from projects import git

from toolkit.rundir.layout import RunDirectory
from toolkit.rundir.sweep import read_sweep
from toolkit.submission import create, next_start
from toolkit.submission.create import Submitted

# Ranks are not started here: what they would start from stands in the run.


@pytest.fixture
def made(toolkit, monkeypatch: pytest.MonkeyPatch):
    """Make a run by a command, without any rank."""
    # Both are imported above: a module first imported while this is in place would keep it after the test.
    for module in (create, next_start):
        monkeypatch.setattr(module, "submit_new", lambda run, job: Submitted(run, 0, "local-1"))

    def make(*words: object) -> RunDirectory:
        return toolkit.run(toolkit.ok(*words, "--parsable").strip().partition(";")[2])

    return make


def record_of(run: RunDirectory) -> dict:
    return json.loads(run.record.read_text())


def helper_of(run: RunDirectory) -> str:
    return (Path(record_of(run)["job"]["code_directory"]) / "helper.py").read_text()


def test_code_and_values_are_those_of_the_run(toolkit, made, repository: Path) -> None:
    run = made("submit", repository / "work.toml", "--set", "train.seed=7", "--set", "args.word=a b")
    for name in ("helper.py", "train.py", "work.toml"):
        (repository / name).write_text("edited")
    again = made("rerun", run.run_id)
    assert helper_of(again) == "WORD = 'as submitted'\n" and again.code(0).exists()
    record, before = record_of(again), record_of(run)
    assert record["rerun_of"] == run.run_id
    assert record["job"] == {**before["job"], "code_directory": str(again.code(0))}
    assert again.job_file.read_text() == run.job_file.read_text()
    other = made("rerun", again.run_id, "--set", "train.seed=8", "-n", 2)
    assert record_of(other)["job"]["train"]["seed"] == 8
    assert record_of(other)["job"]["args"] == {"word": "a b"}
    assert record_of(other)["job"]["job"]["ranks_per_node"] == 2


def test_a_set_argument_is_compared_with_the_job_file_of_the_run(toolkit, made, repository: Path) -> None:
    job = repository / "work.toml"
    (repository / "train.py").write_text("def main(world, config):\n    pass\n")
    job.write_text('[job]\nentry = "train.py:main"\n[args]\nrate = 0.1\n')
    run = made("submit", job)
    job.write_text(job.read_text().replace("rate = 0.1", "speed = 0.1"))
    assert "args.rate" not in toolkit("rerun", run.run_id, "--set", "args.rate=1").err
    assert "args.speed is neither in [args]" in toolkit("rerun", run.run_id, "--set", "args.speed=1").err
    job.unlink()
    assert "args.rat is neither in [args]" in toolkit("rerun", run.run_id, "--set", "args.rat=1").err


def test_it_runs_and_keeps_its_code_when_it_is_resumed(toolkit, project: Path) -> None:
    (project / "work.toml").write_text('[job]\nentry = ["./train.sh"]\n')
    (project / "train.sh").write_text("#!/bin/sh\necho as submitted\n")
    (project / "train.sh").chmod(0o755)
    toolkit.ok("render", project / "work.toml")
    (before,) = toolkit.runs.glob("*/*")
    (project / "train.sh").write_text("#!/bin/sh\necho edited\n")
    run = toolkit.run(toolkit.ok("rerun", before.name, "--parsable", "--wait").strip().partition(";")[2])
    assert toolkit("resume", run.run_id, "--wait").code == 0
    assert [run.attempt(number).log_file(0).read_text() for number in (0, 1)] == ["as submitted\n"] * 2


def test_the_site_counts_as_it_was_unless_it_is_named(toolkit, made, monkeypatch: pytest.MonkeyPatch) -> None:
    site = toolkit.folder / "here.toml"
    text = 'name = "here"\nextends = "local"\n[env.vars]\nWORD = "{}"\n'
    site.write_text(text.format("then"))
    monkeypatch.setenv("TOOLKIT_SITE", str(site))
    run = made("submit", toolkit.job("true"))
    site.write_text(text.format("now"))
    word = {words: record_of(made("rerun", run.run_id, *words))["job"]["site_env"]["vars"]["WORD"]
            for words in ((), ("--set", "train.seed=1"), ("--site", site))}  # fmt: skip
    assert list(word.values()) == ["then", "then", "now"]


def test_another_partition_is_a_question_to_the_site(toolkit, made, dev_cluster_conf, monkeypatch) -> None:
    monkeypatch.setenv("TOOLKIT_SITE", "devcluster")
    run = made("submit", toolkit.job("true"))
    said = toolkit("rerun", run.run_id, "-p", "high")
    assert said.code == 2
    assert (
        "-p high: cannot change the partition: the run recorded only the limits of main. Fix: add --site devcluster"
        in said.err
    )
    assert (
        record_of(made("rerun", run.run_id, "-p", "high", "--site", "devcluster"))["job"]["job"]["partition"] == "high"
    )
    assert record_of(made("rerun", run.run_id, "-N", 2))["job"]["job"]["partition"] == "main"


def test_without_a_copy_the_commit_and_its_changes_are_checked_out(toolkit, made, repository: Path) -> None:
    jobs = repository / "jobs"  # the job's folder lies within its repository
    jobs.mkdir()
    for name in ("helper.py", "train.py", "work.toml"):
        shutil.move(repository / name, jobs / name)
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "second")
    (jobs / "helper.py").write_text("WORD = 'not committed'\n")
    run = made("submit", jobs / "work.toml", "--set", "job.snapshot=none")
    git(repository, "checkout", "-q", ".")
    again = made("rerun", run.run_id)
    assert helper_of(again) == "WORD = 'not committed'\n"
    assert record_of(again)["job"]["code_directory"] == str(again.code(0) / "jobs")
    shutil.rmtree(repository / ".git")
    git(repository, "init", "-q")
    said = toolkit("rerun", run.run_id)
    assert said.code == 1
    assert "the repository lacks commit" in said.err and f"git -C {jobs} fetch origin" in said.err
    assert len(list(toolkit.runs.glob("*/*"))) == 2  # of the refused one nothing stays


def test_a_checkout_has_every_byte_whatever_git_is_told_for_people(toolkit, made, repository: Path) -> None:
    (repository / ".gitattributes").write_text("helper.py export-ignore\n*.nb diff=nb\n")
    for key, value in (("diff.noprefix", "true"), ("diff.context", "0"), ("diff.nb.textconv", "tr a-z A-Z <")):
        git(repository, "config", key, value)
    (repository / "dos.csv").write_bytes(b"one\r\ntwo\r\nthree\r\n")
    (repository / "a.nb").write_text("before\n")
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "second")
    edited = {"dos.csv": b"one\r\n2\r\nthree\r\n", "a.nb": b"after\n", "helper.py": b"WORD = '\xff'\n"}
    for name, data in edited.items():
        (repository / name).write_bytes(data)
    run = made("submit", repository / "work.toml", "--set", "job.snapshot=none")
    git(repository, "checkout", "-q", ".")
    (repository / "a.nb").chmod(0o600)
    again = Path(record_of(made("rerun", run.run_id))["job"]["code_directory"])
    assert {name: (again / name).read_bytes() for name in edited} == edited
    assert [(again / name).stat().st_mode & 0o777 for name in ("a.nb", "dos.csv")] == [0o600, 0o644]
    assert git(repository, "status", "--porcelain") == ""


def test_changes_that_git_did_not_tell_in_time_are_refused_not_left_out(
    toolkit, made, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "slow" / "git"
    slow.parent.mkdir()
    slow.write_text(f'#!/bin/sh\ncase " $* " in *" diff "*) sleep 9;; esac\nexec {shutil.which("git")} "$@"\n')
    slow.chmod(0o755)
    (repository / "helper.py").write_text("WORD = 'not committed'\n")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(slow.parent), prepend=":")
        patch.setattr("toolkit.runs.record.code_snapshot.ANSWER_S", 1.0)
        run = made("submit", repository / "work.toml", "--set", "job.snapshot=none")
    said = toolkit("rerun", run.run_id)
    assert said.code == 1 and "were not recorded (git did not respond within" in said.err


def test_what_nobody_kept_is_refused(toolkit, made, project: Path) -> None:
    run = made("submit", project / "work.toml", "--set", "job.snapshot=none")
    said = toolkit("rerun", run.run_id)
    assert said.code == 1
    assert "has no copy of its code (not asked for), and its folder is not in a git repository" in said.err


def test_a_copy_that_was_altered_is_refused(toolkit, made, project: Path) -> None:
    run = made("submit", project / "work.toml")
    (run.code(0) / "helper.py").write_text("WORD = 'forged'\n")
    said = toolkit("rerun", run.run_id)
    assert (said.code, "changed since the submission: helper.py" in said.err) == (1, True)


def test_diff_says_what_differs_and_where_it_came_from(toolkit, made, repository: Path) -> None:
    a = made("submit", repository / "work.toml")
    (repository / "helper.py").write_text("WORD = 'edited'\n")
    b = made("submit", repository / "work.toml", "--set", "train.lr=0.5", "--set", "env.vars.MY_TOKEN=hidden-word")
    said = toolkit.ok("diff", a.run_id, b.run_id)
    assert "train.lr" in said and "0.0003 (built-in)" in said and "0.5 (flag --set train.lr=0.5)" in said
    assert "helper.py" in said and "uncommitted changes" in said
    assert "hidden-word" not in said and "***" in said
    told = json.loads(toolkit.ok("diff", a.run_id, b.run_id, "--json"))
    assert {row["key"] for row in told["configuration"]} == {"train.lr", "env.vars.MY_TOKEN"}
    assert {row["key"] for row in told["code"]} == {"helper.py", "uncommitted changes"}
    assert {row["key"]: (row["a"], row["b"]) for row in told["result"]}["state"] == ("created", "created")
    lines = toolkit.ok("diff", a.run_id, b.run_id, "--code").splitlines()
    assert "-WORD = 'as submitted'" in lines and "+WORD = 'edited'" in lines
    same = json.loads(toolkit.ok("diff", a.run_id, made("rerun", a.run_id).run_id, "--json"))
    assert [same[part] for part in ("configuration", "code", "versions")] == [[], [], []]


def test_diff_names_no_origin_of_what_a_run_lacks_or_no_layer_sets(toolkit, made) -> None:
    a = made("submit", toolkit.job("true", more="[args]\nheads = 4\n"))
    b = made("submit", toolkit.job("true", name="other"))
    rows = {row["key"]: row for row in json.loads(toolkit.ok("diff", a.run_id, b.run_id, "--json"))["configuration"]}
    assert rows["args.heads"]["origin_a"].startswith("job ") and rows["args.heads"]["origin_b"] == ""
    assert {key for key, row in rows.items() if not row["origin_a"]} == {"job_file"}
    assert not [line for line in toolkit.ok("diff", a.run_id, b.run_id).splitlines() if "- (" in line]


def test_each_task_of_a_sweep_keeps_its_values(toolkit, made, dev_cluster_conf, monkeypatch) -> None:
    monkeypatch.setenv("TOOLKIT_SITE", "devcluster")
    run = made("submit", toolkit.job("true", more="[train]\nlr = 0.5\n"), "--sweep", "train.lr=1,2")
    again = made("rerun", run.run_id)
    assert read_sweep(again) == read_sweep(run) is not None
    assert '"train.lr":2' in again.script(0).read_text().replace(" ", "").replace("2.0", "2")
