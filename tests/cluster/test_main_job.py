"""The main path on a real Slurm: submit, by hand, inside an allocation; crashes, cancels, requeues, preemption."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from on_slurm import TOOLKIT, Site, is_stepping, make_site, mpi_of, wait_for

from toolkit.rundir.layout import RunDirectory

pytestmark = pytest.mark.cluster

SHIPPED = Path(__file__).parents[2] / "jobs"


def hello_lines(text: str, ranks: int = 8) -> dict[int, tuple[str, str]]:
    """By rank: the host and the rest of what mpi_hello says."""
    found = re.findall(rf"rank (\d+) of {ranks}, local rank \d on (\S+) (.*)", text)
    return {int(rank): (host, rest) for rank, host, rest in found}


def test_eight_ranks_on_four_nodes(here: Site) -> None:
    done = here.toolkit("submit", "mpi_hello", "-N", 4, "--ntasks-per-node", 2, "--wait")
    assert done.returncode == 0, done
    said = hello_lines(here.ok("logs", "--rank", "all"))
    assert {rank: host for rank, (host, _) in said.items()} == {rank: f"node{rank // 2 + 1}" for rank in range(8)}
    library = "MPICH" if mpi_of(here.cluster.layout)[0] == "pmi2" else "Open MPI"
    for _, rest in said.values():
        assert "launcher srun" in rest and f"discovered by MPI ({library}" in rest
    (status,) = json.loads(here.ok("history", "--json"))
    assert (status["state"], status["ranks"], status["exit_code"]) == ("completed", 8, 0)


def test_the_rendered_script_by_hand_and_twice(here: Site) -> None:
    """The same script again is refused, and its log says which job has the run."""
    job = here.job("sleep 3", '[args]\nname = "a b"\n')
    text = here.ok("render", job, "--runs", here.folder / "50% of 'my' \"runs\" #1")
    script = here.folder / "by hand.sbatch"
    script.write_text(text)
    (path,) = (here.folder / "50% of 'my' \"runs\" #1").glob("work/*")
    run = RunDirectory(path)
    assert script.read_text() == run.script(0).read_text()
    first = here.command(["sbatch", "--parsable", str(script)]).stdout.strip()
    wait_for(lambda: run.start_numbers())
    second = here.command(["sbatch", "--parsable", str(script)]).stdout.strip()
    wait_for(lambda: "ExitCode=125:0" in here.command(["scontrol", "show", "job", second]).stdout)
    assert f"belongs to job {first}" in (path / f"slurm-{second}.out").read_text()
    assert here.toolkit("wait", path).returncode == 0
    status = json.loads(here.ok("status", path, "--json"))
    assert (status["state"], status["job_id"]) == ("completed", first)
    # A resume of a run that was submitted by hand is known by its own job.
    submitted = here.ok("resume", path, "--parsable").partition(";")[0]
    assert json.loads(here.ok("status", path, "--json"))["job_id"] == submitted
    assert here.toolkit("wait", path).returncode == 0


def test_sbatch_reads_the_directives_as_we_wrote_them(here: Site) -> None:
    """Blanks, quotes, % and # in values, under an environment that would overrule the script."""
    comment = "a \"b\" 'c' \\d #e %j $HOME"
    job = here.job("true")
    settings = "job.sbatch=" + json.dumps([f"--comment={comment}", "--hold"])
    job_id, run = here.submit(
        job, "--set", settings, "-p", "debug", "-J", "work.1", SBATCH_PARTITION="low", SBATCH_TIMELIMIT="3"
    )
    shown = here.command(["squeue", "-h", "-j", job_id, "-o", "%j|%P|%l|%k"]).stdout.strip()
    here.command(["scancel", job_id])
    assert shown == f"work.1|debug|3:00|toolkit:{run.run_id}:0 {comment}"
    assert here.status(run)["state"] == "cancelled"


def test_ranks_get_their_variables_after_sbatch_export_none(here: Site) -> None:
    script = here.folder / "work.sbatch"
    script.write_text(here.ok("render", here.job('echo "have $MINE"', '[env]\nvars = { MINE = "x" }\n')))
    (path,) = (here.folder / "runs").glob("work/*")
    here.command(["sbatch", "--export=NONE", str(script)])
    wait_for(lambda: (path / "starts" / "000").exists())
    assert here.wait(RunDirectory(path)).returncode == 0
    assert here.ok("logs", path.name, "--rank", 0).strip() == "have x"


def test_inside_an_allocation_and_without_the_command_line(here: Site) -> None:
    done = here.command(
        ["salloc", "-N2", "--ntasks-per-node=2", *TOOLKIT, "run", "mpi_hello", "--ntasks-per-node", "2"]
    )
    assert done.returncode == 0, done
    said = [line.partition(",")[0] for line in done.stdout.splitlines()]
    assert {f"[{rank}] rank {rank} of 4" for rank in range(4)} <= set(said), done
    mpi, library = mpi_of(here.cluster.layout)
    # One rank per node: with more, Open MPI 4 can crash in MPI_Init on a busy machine (toolkit/world/discover.py).
    alone = here.command(
        ["srun", "-N4", "-n4", "--ntasks-per-node=1", f"--mpi={mpi}", sys.executable, str(SHIPPED / "mpi_hello.py")],
        MPI4PY_LIBMPI=library,
    )  # fmt: skip
    assert sorted(hello_lines(alone.stdout, ranks=4)) == list(range(4)), alone
    wrong = here.command(["salloc", "-N2", *TOOLKIT, "run", "mpi_hello", "-N", "1"])
    assert wrong.returncode == 2 and "omit -N" in wrong.stderr


def test_a_cancel_of_a_foreground_run_leaves_the_allocation(here: Site) -> None:
    here.job("sleep 60")
    started = f"until {TOOLKIT[0]} status last --json | grep -q '\"running\"'; do sleep 0.5; done"
    shell = f"{TOOLKIT[0]} run work.toml & {started}; {TOOLKIT[0]} cancel last; wait $!; echo run=$?; squeue -h -j $SLURM_JOB_ID -o %T"
    done = here.command(["salloc", "-N1", "bash", "-c", shell])
    assert done.stdout.splitlines()[-2:] == ["run=143", "RUNNING"], done


@pytest.mark.parametrize(
    ("command", "code", "reason"),
    [
        ("test $RANK != 3 || { echo oh no; exit 9; }; sleep 60", 9, "exit code 9"),
        ("test $SLURM_PROCID != 3 || { echo oh no; kill -9 $$; }; sleep 60", 137, "killed by SIGKILL"),
    ],
)
def test_a_crash_names_rank_host_and_code(here: Site, command: str, code: int, reason: str) -> None:
    job = here.job(command, "nodes = 2\nranks_per_node = 2\n[restart]\ncrashes = 0\n")
    done = here.toolkit("submit", job, "--wait")
    assert done.returncode == code, done
    assert f"rank 3 on node2: {reason}" in done.stderr
    assert "    | oh no" in done.stderr
    assert here.wait(here.run(json.loads(here.ok("status", "--json"))["run_id"])).returncode == code


def test_cancel(here: Site) -> None:
    _, run = here.submit(here.job("sleep 60"))
    wait_for(lambda: run.attempt_numbers() and list(run.attempt(0).ranks.glob("*.json")))
    began = time.monotonic()
    here.ok("cancel", run.run_id)
    assert here.status(run)["state"] in ("cancelling", "cancelled")
    assert time.monotonic() - began < 40
    assert here.wait(run).returncode == 143
    assert here.status(run)["state"] == "cancelled"
    again = here.toolkit("cancel", run.run_id)
    assert (again.returncode, "nothing to cancel" in again.stderr) == (1, True)


def test_cancel_in_the_queue(here: Site) -> None:
    _, run = here.submit(here.job("true"), "--set", 'job.sbatch=["--hold"]')
    assert here.status(run)["state"] == "pending"
    here.ok("cancel", run.run_id)
    assert here.wait(run).returncode == 143
    # Its start was never claimed; the next one may be.
    assert here.toolkit("resume", run.run_id, "--set", "job.sbatch=[]", "--wait").returncode == 0


def test_a_refused_submission_leaves_the_run_as_it_was(here: Site) -> None:
    _, run = here.submit(here.job("true"))
    assert here.wait(run).returncode == 0
    refused = here.toolkit("resume", run.run_id, "-w", "node9", "--force")
    assert refused.returncode == 3, refused
    assert refused.stderr.splitlines()[-1].startswith("toolkit: sbatch: Invalid node name")
    assert here.status(run)["state"] == "completed"
    assert here.toolkit("resume", run.run_id, "--wait").returncode == 0
    # A resume that waits in the queue lives, though the last attempt's word was final.
    held = here.ok("resume", run.run_id, "--set", 'job.sbatch=["--hold"]', "--parsable").partition(";")[0]
    assert [one["state"] for one in json.loads(here.ok("history", "--json"))] == ["pending"]
    here.command(["scancel", held])


def test_walltime_saves_requeues_and_goes_on(here: Site) -> None:
    """USR2 with less than warn_s left is the walltime's warning."""
    job, enough = here.stepping()
    job_id, run = here.submit(job)
    wait_for(is_stepping(run, 0))
    here.command(["scontrol", "update", f"JobId={job_id}", "TimeLimit=2"])
    here.command(["scancel", "--signal=USR2", "--batch", job_id])
    wait_for(run.attempt(0).exit_file.exists)
    end = json.loads(run.attempt(0).exit_file.read_text())
    assert (end["cause"], end["next"], end["final"]) == ("walltime", "requeue", False)
    # The limit outlives the requeue, so that Slurm could warn the second start, too.
    here.command(["scontrol", "update", f"JobId={job_id}", "TimeLimit=10"])
    assert "stopped at" in run.attempt(0).log_file(0).read_text()
    assert here.status(run)["state"] in ("pending", "running")
    wait_for(is_stepping(run, 1))
    enough.touch()
    assert here.wait(run).returncode == 0
    status = here.status(run)
    assert (status["state"], status["starts"], status["attempts"], status["job_id"]) == ("completed", 2, 2, job_id)


def test_preemption_requeues_and_goes_on(here: Site) -> None:
    tables = '[notify]\nmail = ["me@example.org"]\nmail_on = ["BEGIN", "REQUEUE"]\n'
    job, enough = here.stepping('nodes = 4\ncpus_per_rank = 8\npartition = "low"', tables=tables)
    here.await_empty()
    job_id, run = here.submit(job)
    wait_for(is_stepping(run, 0))
    urgent = here.command(
        ["sbatch", "--parsable", "-p", "high", "-N4", "-c8", "-o", "/dev/null", "--wrap", "sleep 1"]
    ).stdout.strip()
    wait_for(run.attempt(0).exit_file.exists)
    end = json.loads(run.attempt(0).exit_file.read_text())
    assert (end["cause"], end["next"]) == ("preempted", "await_slurm")
    wait_for(is_stepping(run, 1))
    assert "COMPLETED" in here.command(["squeue", "-h", "--states=all", "-j", urgent, "-o", "%T"]).stdout
    enough.touch()
    assert here.wait(run).returncode == 0
    assert here.status(run)["attempts"] == 2
    mails = (here.cluster.folder / "logs" / "mail.log").read_text().splitlines()
    mine = [mail.partition(f"Job_id={job_id} Name=stepping ")[2].split(",")[0] for mail in mails]
    # Slurm 24.11 mails "Requeued" again when a job ends that was preempted.
    assert list(filter(None, mine))[:3] == ["Began", "Requeued", "Began"]
    assert all(mail.startswith("me@example.org: Slurm ") for mail in mails)


@pytest.mark.evidence
def test_a_script_that_dies_of_a_preemptions_grace_time_spends_no_crash(here: Site) -> None:
    """Slurm sends that TERM to the ranks alone, long before it ends the job."""
    here.await_empty()
    _, run = here.submit(here.job("echo works; sleep 300"), "-p", "low", "-c", 8)
    wait_for(lambda: "works" in here.toolkit("logs", run.run_id, "--rank", "0").stdout)
    here.command(["sbatch", "-p", "high", "-N4", "-c8", "-o", "/dev/null", "--wrap", "sleep 1"])
    wait_for(run.attempt(0).exit_file.exists)
    end = json.loads(run.attempt(0).exit_file.read_text())
    assert (end["cause"], end["next"], end["rank"], end["fix"]) == ("preempted", "await_slurm", None, "")


def test_with_accounting_an_end_is_known_after_squeue_has_forgotten_it(
    accounting_cluster: Any, shared_path: Path
) -> None:
    """The supervisor of this job never got to write a result; sacct alone knows what became of it."""
    here = make_site(accounting_cluster, shared_path)
    job_id, run = here.submit(here.job("true"), "--set", 'job.sbatch=["--hold"]')
    here.command(["scancel", job_id])
    wait_for(lambda: "CANCELLED" in here.command(["sacct", "-nX", "-j", job_id, "-o", "State"]).stdout)
    # squeue that knows no job stands for MinJobAge seconds of waiting.
    blind = here.folder / "bin"
    blind.mkdir()
    (blind / "squeue").write_text("#!/bin/sh\necho 'slurm_load_jobs error: Invalid job id specified' >&2\nexit 1\n")
    (blind / "squeue").chmod(0o755)
    status = json.loads(here.ok("status", run.run_id, "--json", PATH=f"{blind}:{os.environ['PATH']}"))
    assert (status["state"], status["source"]) == ("cancelled", "sacct")
