"""Programs that know nothing of us, under srun: they are told to end before they are killed, and may end when they like."""

from __future__ import annotations

import pytest
from on_slurm import Site, wait_for

from toolkit.rundir.layout import RunDirectory

pytestmark = pytest.mark.cluster

SAVES = 'trap "sleep 2; echo saved; exit 0" TERM; echo ready; for i in $(seq 600); do sleep 0.1; done'


def said(run: RunDirectory, text: str, rank: int = 0) -> bool:
    log = run.attempt(0).log_file(rank)
    return log.exists() and text in log.read_text()


def start(here: Site) -> tuple[str, RunDirectory]:
    job_id, run = here.submit(here.job(SAVES, "nodes = 2\nranks_per_node = 1\n"))
    wait_for(lambda: said(run, "ready") and said(run, "ready", 1))
    return job_id, run


def test_a_program_may_save_when_its_run_is_stopped(here: Site) -> None:
    _, run = start(here)
    here.ok("stop", run.run_id)
    assert here.wait(run).returncode == 130
    assert said(run, "saved") and said(run, "saved", 1)
    assert here.status(run)["state"] == "stopped"
    assert run.attempt(0).done_marker(1).read_text() == "stopped\n"


def test_a_program_may_save_when_the_job_is_warned(here: Site) -> None:
    job_id, run = start(here)
    here.cluster.run("scancel", "--batch", "--signal=USR2", job_id)
    wait_for(lambda: said(run, "saved") and said(run, "saved", 1))
    here.ok("cancel", run.run_id)


def test_a_program_may_work_long_after_another_has_ended(here: Site) -> None:
    """Where a site or a user has srun end the rest some seconds after the first end."""
    work = "[ $SLURM_PROCID = 1 ] || { sleep 7; echo finished; }"
    tables = 'nodes = 2\nranks_per_node = 1\n[env]\nvars = { SLURM_WAIT = "3" }\n'
    _, run = here.submit(here.job(work, tables))
    assert here.wait(run).returncode == 0
    assert said(run, "finished")
