"""Scripts that continue: after a crash, a walltime and a stop they get the arguments of `restart.argv`, on every node."""

from __future__ import annotations

import pytest
from on_slurm import Site, wait_for

from toolkit.rundir.layout import RunDirectory

pytestmark = pytest.mark.cluster

SAVES = """#!/bin/bash
echo "got $* restart $TOOLKIT_RESTART last ${TOOLKIT_LAST_PROGRESS##*/}"
[ $SLURM_PROCID = 1 ] || touch step-$TOOLKIT_ATTEMPT.pt
[ $TOOLKIT_ATTEMPT = 0 ] && { until [ -e step-0.pt ]; do sleep 0.1; done; exit 7; }
[ $TOOLKIT_ATTEMPT = 3 ] && exit 0
echo ready; sleep 300 & wait
"""


def got(run: RunDirectory, attempt: int, rank: int = 0) -> str:
    lines = run.attempt(attempt).log_file(rank).read_text().splitlines()
    return next(line.removeprefix("got ") for line in lines if line.startswith("got "))


def until_ready(run: RunDirectory, attempt: int) -> None:
    for rank in range(2):
        log = run.attempt(attempt).log_file(rank)
        wait_for(lambda log=log: log.exists() and "ready" in log.read_text())


def test_a_script_continues_after_a_crash_a_walltime_and_a_stop(here: Site) -> None:
    script = here.folder / "guest.sh"
    script.write_text(SAVES)
    script.chmod(0o755)
    job = here.folder / "guest.toml"
    keys = "entry = ['./guest.sh', '--from', 'scratch']\nnodes = 2\nranks_per_node = 1\ntime = '2'\n"
    job.write_text(f"[job]\n{keys}[restart]\nwarn_s = 100\nprogress = 'step-*.pt'\nargv = ['--from', '{{newest}}']\n")
    job_id, run = here.submit(job)
    until_ready(run, 1)
    here.command(["scancel", "--signal=USR2", "--batch", job_id])
    until_ready(run, 2)
    here.ok("stop", run.run_id)
    here.wait(run)
    here.ok("resume", run.run_id)
    assert here.wait(run).returncode == 0
    for rank in range(2):
        assert got(run, 0, rank) == "--from scratch restart 0 last "
        for attempt in (1, 2, 3):
            newest = here.folder / f"step-{attempt - 1}.pt"
            assert got(run, attempt, rank) == f"--from {newest} restart 1 last {newest.name}"


def test_a_batch_script_gets_them_as_its_arguments(here: Site) -> None:
    script = here.folder / "job.sh"
    script.write_text('#!/bin/bash\n#SBATCH --time=5\necho "got $* restart $TOOLKIT_RESTART"\ntouch a.pt\n[ $2 ]\n')
    keys = ("restart.progress='a.pt'", "restart.argv=['--from={newest}']")
    _, run = here.submit(script, *(word for key in keys for word in ("--set", key)), "--", "x")
    assert here.wait(run).returncode == 1
    here.ok("resume", run.run_id)
    assert here.wait(run).returncode == 0
    assert [got(run, attempt) for attempt in (0, 1)] == ["x restart 0", f"x --from={here.folder}/a.pt restart 1"]
