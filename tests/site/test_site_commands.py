"""`toolkit config` and `toolkit site` as a user calls them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def toolkit(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TOOLKIT_SITE", "local")
    (tmp_path / "train.py").touch()
    (tmp_path / "job.toml").write_text('[job]\nentry = "train.py"\ntime = "90:00"\n')

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        code = (
            "import sys; from toolkit.cli.main import cli, main; "
            f"sys.argv = ['toolkit', *{list(words)!r}]; "
            "import atexit; atexit.register(lambda: 'torch' in sys.modules and print('TORCH', file=sys.stderr)); main()"
        )
        return subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)

    return run


def test_show_says_where_each_value_came_from(toolkit, tmp_path):
    answer = toolkit("config", "show", "job.toml", "--origin", "--set", "train.steps=5")
    assert (answer.returncode, answer.stderr) == (0, "")
    lines = {line.split(" ")[0]: line.split(" = ", 1)[1].split() for line in answer.stdout.splitlines()}
    assert lines["job.time"] == ['"90:00"', "job", f"{tmp_path}/job.toml:3"]
    assert lines["train.steps"] == ["5", "flag", "--set", "train.steps=5"]
    assert lines["train.batch"] == ["64", "built-in"]
    assert lines["scheduler.kind"][:2] == ['"local"', "site"]


def test_show_as_json_is_the_resolved_job(toolkit):
    from toolkit.config.resolved import ResolvedJob

    answer = toolkit("config", "show", "job.toml", "--json")
    assert ResolvedJob.from_json(answer.stdout).job.time_s == 5400


def test_a_mistake_is_one_line_and_code_2(toolkit, tmp_path):
    answer = toolkit("config", "show", "job.toml", "--set", "train.steps=0")
    assert answer.returncode == 2
    assert answer.stdout == ""
    assert answer.stderr == (
        "toolkit: --set train.steps=0:train.steps: 0 is rejected: input should be greater than or equal to 1. "
        "Fix: use a whole number, at least 1\n"
    )
    assert toolkit("config", "show", "nothing").returncode == 4
    assert toolkit("site", "show", "nothing").returncode == 4


def test_site_commands(toolkit):
    listed = json.loads(toolkit("site", "list", "--json").stdout)
    assert {
        "name": "lumi",
        "kind": "slurm",
        "checked": "rendered only, 2026-11-20",
        "docs": "https://docs.lumi-supercomputer.eu",
    } in listed
    assert toolkit("site", "list").stdout.splitlines()[1].split()[:2] == ["aion", "slurm"]
    assert toolkit("site", "detect").stdout == "local: TOOLKIT_SITE=local\n"
    assert json.loads(toolkit("site", "detect", "--json").stdout) == {"site": "local", "reason": "TOOLKIT_SITE=local"}
    shown = toolkit("site", "show", "lumi").stdout
    assert "network.interface" in shown
    assert "lumi.toml:" in shown
    assert json.loads(toolkit("site", "show", "lumi", "--json").stdout)["partitions"]["dev-g"]["max_nodes"] == 32


def test_schema_is_printed(toolkit):
    published = Path(__file__).parents[2] / "docs/schemas/job.schema.json"
    assert toolkit("config", "schema", "job").stdout == published.read_text()


def test_a_wrong_site_file_hides_no_other(toolkit, tmp_path, monkeypatch):
    (tmp_path / "broken.toml").write_text('name = "broken"\n[scheduler]\nkind = "pbs"\n')
    monkeypatch.setenv("TOOLKIT_SITES", str(tmp_path))
    listed = toolkit("site", "list", "--json")
    assert {"devcluster", "local"} <= {site["name"] for site in json.loads(listed.stdout)}
    errors = [line for line in listed.stderr.splitlines() if "broken.toml:3:scheduler.kind" in line]
    assert (listed.returncode, len(errors)) == (1, 1)
    monkeypatch.delenv("TOOLKIT_SITE")
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=devcluster\n")
    for command in ("sbatch", "scontrol"):
        (tmp_path / command).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / command).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_CONF", str(conf))
    found = toolkit("site", "detect")
    assert (found.returncode, found.stdout.split(":")[0]) == (0, "devcluster")
    assert "ignoring a site file" in found.stderr and "broken.toml:3" in found.stderr
