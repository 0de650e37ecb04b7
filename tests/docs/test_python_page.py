"""The examples of docs/python.md, written into files as they stand there and run on two ranks."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from launch import launch, said_by

from toolkit.config.document import Flag
from toolkit.config.request import resolve_job
from toolkit.metrics.training import read_train_log
from toolkit.metrics.window_file import read_windows
from toolkit.world.facts import World

PAGE = (Path(__file__).parents[2] / "docs" / "python.md").read_text(encoding="utf-8")


@pytest.fixture
def examples(toolkit, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the page's files; each block begins with its file's name."""
    monkeypatch.chdir(toolkit.folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name, body in re.findall(r"^```\w+\n# (\w+\.\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        Path(name).write_text(body, encoding="utf-8")
    return toolkit.folder


def submitted(toolkit, entry: str | list[str]) -> None:
    Path("job.toml").write_text(f"[job]\nentry = {json.dumps(entry)}\nranks_per_node = 2\n", encoding="utf-8")
    said = toolkit("submit", "job.toml", "--wait")
    assert said.code == 0, said


@pytest.mark.evidence
@pytest.mark.timeout(300)
def test_fit_stops_when_asked_and_goes_on_with_another_number_of_ranks(toolkit, examples, wait_until) -> None:
    run = toolkit.submit("fit.toml", "--set", "train.steps=100_000_000")
    wait_until(lambda: list(run.checkpoints.glob("step-????????")))
    (run.control / "stop").touch()
    assert toolkit("wait", "last").code == 130
    assert json.loads(toolkit.ok("status", "--json"))["state"] == "stopped"
    stopped_at = max(int(path.name[5:]) for path in run.checkpoints.glob("step-????????"))
    said = toolkit("resume", "last", "-n", 1, "--set", f"train.steps={stopped_at + 5}", "--wait")
    assert said.code == 0, said
    assert f"begin at step {stopped_at}, saved by 2 ranks\n" in toolkit.ok("logs", "--rank", 0)
    assert (run.checkpoints / f"step-{stopped_at + 5:08}").is_dir()
    assert toolkit("resume", "last", "-n", 1, "--from", stopped_at, "--wait").code == 0
    assert f"begin at step {stopped_at}, saved by 2 ranks\n" in toolkit.ok("logs", "--rank", 0)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_plain_dcp_stores_what_the_page_shows(examples, capsys) -> None:
    for _ in range(2):  # the second save overwrites the first
        runpy.run_path("plain_dcp.py")
        assert capsys.readouterr().out == "True torch.bfloat16 (1, tensor([0., 0.]))\n"


def test_the_script_with_metrics_records_them_on_both_ranks(toolkit, examples) -> None:
    submitted(toolkit, "watched.py")
    (attempt,) = toolkit.runs.rglob("attempts/000")
    windows = read_windows(attempt / "windows" / "rank-00000.bin")
    assert {window.rank for window in windows} == {0, 1}
    assert all({"step_s", "loss", "reward", "exposed_s", "work_s"} <= window.metrics.keys() for window in windows)


def train(world, file: str, config) -> None:
    runpy.run_path(file)["main"](world, config)


def forked(file: str, ranks: int, *settings: str, run: str = "run", attempt: int = 0) -> Path:
    """Call the `main` of a file of the page on forked ranks: a submission costs the imports of all its ranks."""
    table = "[checkpoint]\nevery_steps = 4\n[train]\nsteps = 6\nlr = 0.01\n"
    Path("job.toml").write_text(f'[job]\nentry = "{file}:main"\n{table}', encoding="utf-8")
    flags = {"job.ranks_per_node": Flag(ranks, "test")}
    config = resolve_job(Path("job.toml").absolute(), site=None, environ={}, flags=flags, settings=settings)
    run_dir = Path(run).absolute()
    launch(train, ranks, run_dir, file, config, attempt=attempt)
    return run_dir


def test_sharded_goes_on_with_another_number_of_ranks_and_begins_with_anothers_weights(examples) -> None:
    run = forked("sharded.py", 3)
    forked("sharded.py", 2, "train.steps=8", attempt=1)
    assert "resumed at step 6 from " in said_by(run, 0, attempt=1)
    source = run / "checkpoints" / "step-00000008"
    settings = (f"checkpoint.source={source}", "checkpoint.take=weights", 'checkpoint.without=["2"]')
    begun = forked("sharded.py", 1, *settings, run="begun")
    assert f"starting at step 0 with the weights of {source}, saved at step 8, without 2" in said_by(begun, 0)


def test_logged_writes_its_record_and_says_how_gradients_are_summed(examples) -> None:
    run = forked("logged.py", 2)
    (record,) = read_train_log(run / "metrics" / "train.jsonl")
    assert (record.step, record.world) == (1, 2)
    assert "gradient reduction: flat" in said_by(run, 1)


def test_script_has_torchruns_variables(toolkit, examples) -> None:
    submitted(toolkit, "script.py")
    assert "rank 1 of 2: 2 ranks said 1\n" in toolkit.ok("logs", "--rank", 1)


def test_every_variable_of_the_tables_is_set(toolkit, examples) -> None:
    section = PAGE[PAGE.index("## An executable") : PAGE.index("## Without")]
    table = section[: section.index("The launcher adds")]
    table = "\n".join(line for line in table.splitlines() if "unset if" not in line)
    names = set(re.findall(r"`([A-Z]+_[A-Z_]+)`", table))
    assert "TOOLKIT_RANK" in names and len(names) == 10
    submitted(toolkit, ["env"])
    environment = dict(line.split("=", 1) for line in toolkit.ok("logs", "--rank", 1).splitlines() if "=" in line)
    assert names <= set(environment)
    assert (environment["TOOLKIT_RANK"], environment["TOOLKIT_WORLD_SIZE"]) == ("1", "2")
    title = f"`{environment['TOOLKIT_LAUNCHER']}`"
    if title == "`mpirun`":
        title += " of MPICH" if "PMI_RANK" in environment else " of Open MPI"
    (row,) = re.findall(rf"^\| {title} \| (.*) \|$", section, re.MULTILINE)
    assert [environment[name] for name in re.findall(r"`(\w+)`", row)] == ["1", "2", "1"]


def test_who_finds_itself_under_a_plain_mpirun(examples) -> None:
    mpirun = Path(sys.executable).with_name("mpirun")
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("TOOLKIT_", "SLURM_"))}
    done = subprocess.run(
        [mpirun, "-n", "2", sys.executable, "who.py"], env=plain, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    # Two ranks share a pipe, so that a line of one may stand within a line of the other.
    assert sorted(re.findall(r"rank \d of 2 on", done.stdout)) == ["rank 0 of 2 on", "rank 1 of 2 on"]


def test_the_page_names_every_field_and_method_of_the_world() -> None:
    table = PAGE[PAGE.index("### world") : PAGE.index("Call `should_stop`")]
    named = set(re.findall(r"`(\w+)(?:\(\w*\))?`", table))
    public = {field.name for field in fields(World)} - {"stop_watch"}
    methods = {name for name in vars(World) if not name.startswith("_")} - {field.name for field in fields(World)}
    assert public | methods <= named


def test_a_script_continues_from_its_newest_file(toolkit, examples) -> None:
    keys = 'entry = "continuing.py"\nranks_per_node = 1\n[restart]\nprogress = "out/step-*.txt"\n'
    Path("job.toml").write_text(f"[job]\n{keys}", encoding="utf-8")
    toolkit.ok("submit", "job.toml", "--wait")
    assert "begins at 0" in toolkit.ok("logs", "last", "--rank", "0")
    toolkit.ok("resume", "last", "--wait")
    assert "continues at 3" in toolkit.ok("logs", "last", "--rank", "0")
