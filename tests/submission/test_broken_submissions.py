"""A submission without an answer: what `submit`, `status` and `resume` say of it agrees."""

import json
import time

import pytest
from queued_runs import submitted

from toolkit.rundir.files import read_json, write_json
from toolkit.slurm.submit import SETTLE_S

pytestmark = pytest.mark.usefixtures("dev_cluster_conf")


def test_a_resume_that_comes_too_early_says_when_it_may_come(toolkit, sbatch, fake_slurm):
    run = submitted(toolkit, "8", "broken")
    run.submitted(0).unlink()
    record = {"start": 0, "token": f"toolkit:{run.run_id}:0", "host": "elsewhere", "pid": 1, "process_started": 1}
    write_json(run.submitting(0), {**record, "time": "2026-11-21T02:48:01.000Z"})
    fake_slurm.respond("squeue")  # an empty queue
    assert json.loads(toolkit.ok("status", run.run_id, "--json"))["state"] == "unknown"
    said = toolkit("resume", run.run_id)
    assert said.code == 1
    assert f"Fix: repeat `toolkit status {run.run_id}` after 10 s" in said.err
    opened = read_json(run.submitting(0))
    write_json(run.submitting(0), {**opened, "absent_since": time.time() - SETTLE_S})
    told = json.loads(toolkit.ok("status", run.run_id, "--json"))
    assert told["state"] == "lost", told
    toolkit.ok("resume", run.run_id)


def test_nothing_is_asked_of_a_slurm_whose_configuration_is_not_there(toolkit, sbatch, tmp_path, monkeypatch):
    site = tmp_path / "away.toml"
    site.write_text("name = 'away'\n[scheduler]\nkind = 'slurm'\n")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "nowhere.conf"))
    said = toolkit("submit", toolkit.job("true"), "--site", site)
    assert (said.code, f"SLURM_CONF={tmp_path}/nowhere.conf: file not found" in said.err) == (2, True), said
    assert not list(toolkit.runs.glob("work"))
    toolkit.ok("render", toolkit.job("true"), "--site", site)
