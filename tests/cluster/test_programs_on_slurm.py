"""Programs that know nothing of us, under srun: they are told to end before they are killed, and may end when they like."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

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


def test_a_script_needs_no_job_file(here: Site) -> None:
    shows = "import os, sys\nprint('rank', os.environ['RANK'], 'node', os.environ['GROUP_RANK'], sys.argv[1:])\n"
    (here.folder / "plain.py").write_text(shows)
    options = ("-N", "2", "--ntasks-per-node", "2", "-t", "5", "--save-as", "plain.toml")
    _, run = here.submit("plain.py", *options, "--", "--lr", "0.1")
    assert here.wait(run).returncode == 0
    for rank in range(4):
        assert said(run, f"rank {rank} node {rank // 2} ['--lr', '0.1']", rank)
    assert (here.folder / "plain.toml").read_text() == run.job_file.read_text()
    _, again = here.submit("plain.toml")
    assert here.wait(again).returncode == 0
    assert said(again, "rank 3 node 1 ['--lr', '0.1']", 3)
    assert here.status(again)["run_id"] == again.run_id == json.loads(here.ok("status", "plain", "--json"))["run_id"]


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


# As Lightning on SIGUSR1: it saves, and requeues its job. The file has a new name only the first time.
REQUEUES = """
trap 'touch saved-1; scontrol requeue $SLURM_JOB_ID' USR1; echo ready; for i in $(seq 600); do sleep 0.1; done"""


def start_requeuing(here: Site) -> tuple[str, RunDirectory]:
    """With so little time that each warning is one of the walltime."""
    script = here.folder / "guest.sh"
    script.write_text(f"#!/bin/bash{REQUEUES}\n")
    script.chmod(0o755)
    job = here.folder / "guest.toml"
    table = "[job]\nentry = ['./guest.sh']\ntime = '2'\nsignal = 'USR1'\n"
    job.write_text(f"{table}[restart]\nwarn_s = 110\nprogress = 'saved-*'\n")
    job_id, run = here.submit(job)
    wait_for(lambda: said(run, "ready"))
    return job_id, run


def is_canceled(here: Site, job_id: str) -> bool:
    return here.cluster.run("squeue", "-h", "-t", "all", "-o", "%T", "-j", job_id).split() == ["CANCELLED"]


def test_a_stopped_run_does_not_return_if_its_program_requeues_the_job(here: Site) -> None:
    job_id, run = start_requeuing(here)
    here.ok("stop", run.run_id)
    assert here.wait(run).returncode == 130
    wait_for(lambda: is_canceled(here, job_id))
    assert (here.status(run)["state"], run.start_numbers()) == ("stopped", [0])
    explained = here.ok("explain", run.run_id)
    assert "it was asked to stop" in explained
    assert "matched 1 new (saved-1)" in explained


def test_walltimes_of_a_program_that_requeues_its_job_count(here: Site) -> None:
    """The first one shows progress; the second one only rewrites the file, as does the third."""
    job_id, run = start_requeuing(here)
    for attempt in range(3):
        log = run.attempt(attempt).log_file(0)
        wait_for(lambda log=log: log.exists() and "ready" in log.read_text())
        here.cluster.run("scancel", "--batch", "--signal=USR2", job_id)
        wait_for(run.attempt(attempt).exit_file.exists)
        if attempt < 2:
            wait_for(lambda: "PENDING" in here.cluster.run("squeue", "-h", "-o", "%T", "-j", job_id))
            time.sleep(2)  # slurmd rejects a credential of the second in which it revoked the earlier one
            here.cluster.run("scontrol", "update", f"JobId={job_id}", "StartTime=now")
    assert here.wait(run).returncode == 140
    wait_for(lambda: is_canceled(here, job_id))
    explained = here.ok("explain", run.run_id)
    assert (
        "2 consecutive walltimes without progress: restart.progress = 'saved-*' matched 1 only rewritten (saved-1)"
        in explained
    )
    assert "check that the program continues from these files" in explained


HELLO = """
#include <mpi.h>
#include <stdio.h>
int main(int argc, char **argv) {
  int rank, size;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  printf("process %d of %d\\n", rank, size);
  return MPI_Finalize();
}
"""


def test_a_compiled_program_of_mpich_gets_its_pmi_where_the_site_has_another_one(here: Site) -> None:
    mpicc = Path(sys.executable).with_name("mpicc")
    (here.folder / "hello.c").write_text(HELLO)
    subprocess.run([mpicc, "-o", "hello", "hello.c"], cwd=here.folder, check=True)
    (here.folder / "job.toml").write_text('[job]\nentry = ["./hello"]\nnodes = 2\nranks_per_node = 2\ntime = "5"\n')
    here.ok("submit", here.folder / "job.toml", "--wait")
    lines = [line.split("] ")[1] for line in here.ok("logs", "--rank", "all").splitlines() if "process" in line]
    assert sorted(lines) == [f"process {rank} of 4" for rank in range(4)]
