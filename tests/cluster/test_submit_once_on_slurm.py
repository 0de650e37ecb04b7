"""slurmctld stopped at the worst moment: sbatch times out, the job is taken all the same, and stays the only one."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from on_slurm import TOOLKIT, Site, make_site, stopped_slurmctld, wait_for

from toolkit.rundir.layout import RunDirectory

pytestmark = pytest.mark.cluster

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def here(cluster: Any, shared_path: Path) -> Site:
    """The cluster for clients that lose their patience after 2 s."""
    impatient = shared_path / "slurm.conf"
    impatient.write_text(cluster.slurm_conf.read_text() + "\nMessageTimeout=2\n")
    site = make_site(cluster, shared_path)
    site.file.write_text(site.file.read_text().replace(str(cluster.slurm_conf), str(impatient)))
    return site


def start_submit(here: Site, **variables: str) -> subprocess.Popen[str]:
    """Start `toolkit submit`, whose messages go to the file `submit.err`."""
    environment = {**here.cluster.env, "TOOLKIT_SITE": str(here.file), "TOOLKIT_RUNS": str(here.folder / "runs")}
    with (here.folder / "submit.err").open("w") as messages:
        return subprocess.Popen(
            [*TOOLKIT, "submit", str(here.job("true"))], env={**environment, **variables}, text=True,
            stdout=subprocess.PIPE, stderr=messages,
        )  # fmt: skip


def the_run(here: Site) -> RunDirectory:
    (path,) = (here.folder / "runs").glob("work/*")
    return RunDirectory(path)


def jobs_of(here: Site, run: RunDirectory) -> list[str]:
    rows = here.command(["squeue", "--me", "--noheader", "--states=all", "--format=%i %k"]).stdout.splitlines()
    return [row.split()[0] for row in rows if f"toolkit:{run.run_id}:" in row]


def test_a_submit_that_times_out_ends_with_its_one_job(here: Site) -> None:
    with stopped_slurmctld(here.cluster):
        submit = start_submit(here)
        wait_for(lambda: list((here.folder / "runs").glob("work/*/submitting-000.json")))
        messages = here.folder / "submit.err"
        wait_for(lambda: "Socket timed out" in messages.read_text())  # sbatch has given up
    out, _ = submit.communicate(timeout=120)
    assert submit.returncode == 0, messages.read_text()
    run = the_run(here)
    (job_id,) = jobs_of(here, run)
    assert f"is job {job_id}," in out
    assert not list(run.path.glob("submitting-*"))
    assert here.wait(run).returncode == 0


def test_status_finds_the_job_of_a_killed_submit(here: Site) -> None:
    with stopped_slurmctld(here.cluster):
        submit = start_submit(here)
        wait_for(lambda: list((here.folder / "runs").glob("work/*/submitting-000.json")))
        time.sleep(0.5)  # the request lies in slurmctld's socket
        submit.kill()
        submit.communicate()
        run = the_run(here)
        schema = json.loads((DOCS / "schemas" / "run-directory.schema.json").read_text())
        record = json.loads((run.path / "submitting-000.json").read_text())
        jsonschema.validate(record, {**schema, "$ref": "#/$defs/submitting"})
        unknown = here.status(run)
        assert unknown["state"] == "unknown" and "cannot determine" in unknown["reason"]
    wait_for(lambda: here.status(run)["job_id"])
    assert [here.status(run)["job_id"]] == jobs_of(here, run)
    assert here.wait(run).returncode == 0


@pytest.mark.evidence
def test_resume_submits_what_never_reached_slurm(here: Site) -> None:
    hanging = here.folder / "bin" / "sbatch"
    hanging.parent.mkdir()
    hanging.write_text("#!/bin/bash\nexec sleep 60\n")
    hanging.chmod(0o755)
    submit = start_submit(here, PATH=f"{hanging.parent}:{os.environ['PATH']}")
    wait_for(lambda: list((here.folder / "runs").glob("work/*/submitting-000.json")))
    run = the_run(here)
    under_way = here.status(run)
    assert under_way["state"] == "unknown" and "is being submitted by process" in under_way["reason"]
    submit.kill()
    submit.communicate()
    early = here.status(run)
    assert early["state"] == "unknown" and "retry after" in early["reason"]
    assert here.toolkit("resume", run.run_id).returncode == 1
    path = run.path / "submitting-000.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "absent_since": record["absent_since"] - 11}))
    lost = here.status(run)
    assert lost["state"] == "lost" and "Slurm has no job" in lost["reason"]
    assert here.wait(run).returncode == 125  # at once: nothing more happens by itself
    here.ok("resume", run.run_id)
    assert here.wait(run).returncode == 0
    assert len(jobs_of(here, run)) == 1


@pytest.mark.evidence
def test_a_script_that_was_given_to_sbatch_is_waited_for_while_it_is_pending(here: Site) -> None:
    here.ok("render", here.job("true"))
    run = the_run(here)
    assert here.wait(run).returncode == 1  # it is rendered only
    job_id = here.command(["sbatch", "--parsable", "--begin=now+2", str(run.script(0))]).stdout.strip()
    assert here.wait(run).returncode == 0
    assert here.status(run)["job_id"] == job_id
