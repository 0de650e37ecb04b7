"""`toolkit completion`: what TAB offers, in the shells themselves, at a cost that a prompt can bear."""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm

from toolkit.rundir.files import write_json
from toolkit.rundir.layout import create_run

PROGRAM = str(Path(sys.executable).with_name("toolkit"))


@pytest.fixture
def tab(toolkit, monkeypatch: pytest.MonkeyPatch):
    """What bash is offered for a line as it is typed."""
    monkeypatch.setenv("HOME", str(toolkit.folder / "home"))
    monkeypatch.chdir(toolkit.folder)

    def offered(typed: str, breaks: str = " :=", kind: str = "plain") -> list[str]:
        with monkeypatch.context() as patch:
            patch.setenv("_TOOLKIT_COMPLETE", "bash_complete")
            patch.setenv("COMP_TYPED", typed)
            patch.setenv("COMP_BREAKS", breaks)
            said = toolkit()
        assert said.err == "", said
        return [value for of, _, value in (line.partition(",") for line in said.out.splitlines()) if of == kind]

    return offered


@pytest.fixture
def saved(toolkit):
    """A run that has ended, with checkpoints of two steps."""
    run = toolkit.submit(toolkit.job("true"), "--wait")
    for step in (200, 1000):
        (run.checkpoints / f"step-{step:08}").mkdir()
    return run


def test_commands_options_and_choices(tab) -> None:
    assert tab("toolkit st") == ["status", "stop", "stacks"]
    assert tab("toolkit session st") == ["start", "stop"]
    assert "--print-cmd" in tab("toolkit status --")
    assert tab("toolkit history --state comp") == ["completed"]


def test_runs_and_their_steps(tab, saved, toolkit) -> None:
    assert tab("toolkit status ") == ["last", saved.run_id]
    assert tab("toolkit diff last 2") == [saved.run_id]
    assert tab(f"toolkit resume {saved.run_id} --from ") == ["1000", "200"]
    # bash cuts words at a colon, and then replaces what stands behind it.
    assert tab("toolkit ckpt show last:") == ["1000", "200"]
    assert tab("toolkit ckpt show last:1", breaks=" =") == ["last:1000"]
    other = create_run(toolkit.folder / "other", "work")
    write_json(other.record, {})
    assert tab(f"toolkit status --runs {toolkit.folder / 'other'} ") == ["last", other.run_id]
    assert tab("toolkit ckpt ls nothing:") == []
    toolkit.submit(toolkit.job("true"), "--wait")  # the last one has none
    assert tab(f"toolkit resume {saved.run_id} -n 2 --from 2") == ["200"]
    assert tab("toolkit resume last --from ") == []


def test_a_shell_with_room_for_help_says_name_and_state(saved, toolkit, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_TOOLKIT_COMPLETE", "fish_complete"), ("COMP_WORDS", "toolkit status "), ("COMP_CWORD", "")):
        monkeypatch.setenv(name, value)
    assert toolkit().out.splitlines() == ["plain,last", f"plain,{saved.run_id}\twork completed"]


def test_jobs_and_their_files(tab, toolkit) -> None:
    (toolkit.folder / "train_mine.toml").touch()
    (toolkit.folder / "train_mine.py").touch()
    (toolkit.folder / "folder").mkdir()
    (toolkit.folder / "folder" / "deep.toml").touch()
    assert tab("toolkit submit train_") == ["train_image", "train_lm", "train_moe", "train_mine.py", "train_mine.toml"]
    assert tab("toolkit run folder/d") == ["folder/deep.toml"]
    # bash itself completes a folder, without a blank behind it, and quotes what must be.
    assert (tab("toolkit run fol"), tab("toolkit run fol", kind="file")) == ([], ["fol"])
    assert tab("toolkit jobs copy mpi") == ["mpi_hello"]


def test_sites_partitions_and_sessions(tab, toolkit, fake_slurm: FakeSlurm) -> None:
    assert tab("toolkit submit mpi_hello --site=lum") == ["lumi"]
    (toolkit.folder / "ours.toml").write_text('name = "ours"\n[partitions.gpu]\n[partitions.debug]\n')
    assert tab("toolkit submit mpi_hello --site ./ours.toml -p ") == ["gpu", "debug", "auto"]
    assert tab("toolkit session stop ") == []
    sessions = toolkit.folder / "home" / ".toolkit" / "sessions"
    (sessions / "dev.json").touch()
    assert tab("toolkit session stop ") == tab("toolkit session exec d") == ["dev"]
    fake_slurm.respond("sinfo", "long\nshort\nlong\n")
    assert tab("toolkit submit mpi_hello -p ") == ["long", "short", "auto"]
    fake_slurm.script("sinfo", "exec sleep 20")  # a controller that does not answer
    assert tab("toolkit submit mpi_hello -p ") == ["auto"]


def test_the_sites_folder_of_runs_is_remembered_while_its_file_stays(
    tab, toolkit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TOOLKIT_RUNS")
    sites = toolkit.folder / "sites"
    sites.mkdir()
    monkeypatch.setenv("TOOLKIT_SITES", str(sites))
    monkeypatch.setenv("TOOLKIT_SITE", "ours")
    runs = []
    for place in ("one", "other"):
        text = f'name = "ours"\n[scheduler]\nkind = "local"\n[paths]\nruns = "{toolkit.folder}/{place}"\n'
        (sites / "ours.toml").write_text(text + "#" * len(runs))
        run = create_run(toolkit.folder / place, "work")
        write_json(run.record, {})
        runs.append(run.run_id)
        assert tab("toolkit status ") == ["last", run.run_id]
    with monkeypatch.context() as patch:
        patch.setattr("toolkit.runs.named_runs.runs_of_site", lambda: pytest.fail("it is known"))
        assert tab("toolkit status ") == ["last", runs[-1]]


def environment(toolkit) -> dict[str, str]:
    return {**os.environ, "PATH": f"{Path(PROGRAM).parent}:{os.environ['PATH']}", "TERM": "dumb"}


@pytest.mark.parametrize("argv", [["bash", "--norc", "--noprofile", "-i"], ["zsh", "-f", "-i"]], ids=["bash", "zsh"])
def test_tab_in_the_shell_itself(toolkit, saved, terminal, argv: list[str]) -> None:
    if shutil.which(argv[0]) is None:
        pytest.skip(f"{argv[0]} is not installed")
    shell = terminal(argv, cwd=toolkit.folder, env=environment(toolkit))
    begin = "autoload -U compinit; compinit -D; " if argv[0] == "zsh" else ""
    shell.type(f'PS1=; {begin}eval "$(toolkit completion {argv[0]})"; echo is re""ady\n')
    shell.until("is ready")
    shell.type("toolkit status --js\tlast\n")
    shell.until('"exit_code": 0')
    shell.type(f"toolkit logs {saved.run_id[:12]}\t\n")
    shell.until(f"toolkit logs {saved.run_id}")
    shell.hang_up()


def test_fish_itself(toolkit, saved) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    line = f'toolkit completion fish | source; complete -C "toolkit status {saved.run_id[:10]}"'
    done = subprocess.run(["fish", "--no-config", "-c", line], env=environment(toolkit), capture_output=True, text=True)
    assert done.stdout == f"{saved.run_id}\twork completed\n", done


def test_it_costs_little_more_than_click_and_imports_nothing_heavy(toolkit) -> None:
    for name in range(60):
        write_json(create_run(toolkit.runs, f"job{name % 7}").record, {})
    asked = {**os.environ, "_TOOLKIT_COMPLETE": "zsh_complete", "COMP_WORDS": "toolkit status ", "COMP_CWORD": "2"}
    probe = (
        "import sys, atexit; from toolkit.cli.main import main; heavy = {'torch', 'numpy', 'pydantic', 'rich', 'submitit'};"
        " atexit.register(lambda: print(heavy & set(sys.modules), file=sys.stderr)); main()"
    )
    done = subprocess.run([sys.executable, "-c", probe], env=asked, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "set()\n")
    assert len(done.stdout.split("plain")) == 1 + 1 + 50  # `last`, and the newest
    spent: dict[str, list[float]] = {"click": [], "ours": []}
    for _ in range(5):
        for name, argv in (("click", [sys.executable, "-c", "import click"]), ("ours", [PROGRAM])):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(argv, env=asked, check=True, capture_output=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            spent[name].append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    ours, base = (statistics.median(spent[name]) for name in ("ours", "click"))
    assert ours <= 3 * base, f"{ours:.3f} s of CPU, import click {base:.3f} s"
