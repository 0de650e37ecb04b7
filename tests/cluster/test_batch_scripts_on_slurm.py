"""Batch scripts on a real Slurm: what toolkit runs is what sbatch runs."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from on_slurm import Site, mpi_of, wait_for

pytestmark = pytest.mark.cluster

# Variables whose values differ between any two jobs.
OF_ONE_JOB = (
    "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_TASK_PID", "SLURM_ARRAY_JOB_ID", "SLURM_TOPOLOGY_ADDR", "SLURM_JOB_START_TIME",
    "SLURM_JOB_END_TIME", "SLURM_JOB_SLUID",
)  # fmt: skip


def write(here: Site, name: str, lines: str) -> Path:
    path = here.folder / name
    path.write_text(f"#!/bin/bash\n{lines}\n")
    return path


def sbatch(here: Site, *argv: object) -> str:
    done = here.command(["sbatch", "--parsable", *map(str, argv)])
    assert done.returncode == 0, done
    return done.stdout.strip()


def environment_in(path: Path) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in path.read_text().split("\0") if pair]
    return {name: value for name, _, value in pairs if not name.startswith(OF_ONE_JOB)}


@pytest.mark.parametrize(
    "directives",
    [
        "#SBATCH -N2 --ntasks-per-node=2 -c 1",
        "#SBATCH -n 3 --mem=300M --export=ALL,EXTRA='a b'",
        "#SBATCH -N1 --export=NONE --gpus-per-node=2 --open-mode=append",
        "#SBATCH -N1\n#SBATCH hetjob\n#SBATCH -N2 --mem-per-cpu=200M",
    ],
)
def test_the_environment_is_that_of_sbatch(here: Site, directives: str) -> None:
    script = write(here, "job.sh", f"{directives}\n#SBATCH --time=5\nenv -0 > $1")
    real, ours = here.folder / "real", here.folder / "ours"
    variables = {"LINES": "two\nlines", "LC_ALL": "C", "BASH_FUNC_f%%": "() {  echo f\n}"}
    done = here.command(["sbatch", "--wait", str(script), str(real)], **variables)
    assert done.returncode == 0, done
    assert here.toolkit("submit", script, "--wait", "--", ours, **variables).returncode == 0
    assert environment_in(ours) == environment_in(real) | {"TOOLKIT_RESTART": "0"}


def test_srun_and_mpirun_start_ranks_in_a_script(here: Site) -> None:
    mpi, _ = mpi_of(here.cluster.layout)
    rank = "PMI_RANK" if mpi == "pmi2" else "PMIX_RANK"
    script = write(
        here, "job.sh",
        f"#SBATCH -N2 --ntasks-per-node=2 -t 5\nsrun --mpi={mpi} sh -c 'echo srun ${rank} $SLURM_PROCID'\n"
        "mpirun --allow-run-as-root -n 4 sh -c 'echo mpirun $OMPI_COMM_WORLD_RANK'",
    )  # fmt: skip
    here.ok("submit", script, "--wait")
    expected = [f"mpirun {rank}" for rank in range(4)] + [f"srun {rank} {rank}" for rank in range(4)]
    assert sorted(here.ok("logs", "--rank", 0).splitlines()) == expected


def test_output_goes_to_the_files_of_the_script_and_to_the_log(here: Site) -> None:
    (here.folder / "out").mkdir()
    script = write(
        here,
        "my job.sh",
        "#SBATCH -o out/%x-%j.out -e out/%x-%j.err -t 5\n#SBATCH -J 'my job'\necho fine; echo wrong >&2; exit 4",
    )
    said = here.toolkit("submit", script, "--wait")
    assert said.returncode == 4
    (out,), (err,) = here.folder.glob("out/my job-*.out"), here.folder.glob("out/my job-*.err")
    assert ("fine" in out.read_text().splitlines(), "wrong" in out.read_text().splitlines()) == (True, False)
    assert err.read_text().splitlines() == ["wrong"]
    assert sorted(here.ok("logs", "--rank", 0).split()) == ["fine", "wrong"]
    assert json.loads(here.ok("explain", "last", "--json"))["symptom"] == "exit_code"


def test_a_step_that_fails_inside_a_script_is_reported_and_can_fail_the_run(here: Site) -> None:
    step = "srun -n1 --exact --mem=100"
    script = write(here, "job.sh", f"#SBATCH -n2 -t 5\n{step} sleep 1 &\n{step} sh -c 'exit 3' &\nwait")
    said = here.toolkit("submit", script, "--wait")
    reported = re.compile(r"the script exited with 0, but (?:step \d|a step) failed \(3\)")
    assert said.returncode == 0 and reported.search(said.stderr) and "set -eo pipefail" in said.stderr
    assert reported.search(here.ok("status")) and reported.search(here.ok("explain"))
    assert json.loads(here.ok("explain", "last", "--json"))["symptom"] == "step_failed"
    strict = here.toolkit("submit", script, "--wait", "--set", "restart.steps_must_succeed=true")
    assert strict.returncode == 3
    assert json.loads(here.ok("status", "--json"))["state"] == "failed"
    assert here.toolkit("submit", script, "--after", "last:ok").returncode != 0


def test_a_script_without_output_finds_its_log(here: Site) -> None:
    name = "slurm-${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}.out"
    script = write(
        here,
        "job.sh",
        f"#SBATCH -a 0-1 -t 5\nmkdir -p out; echo begun\ngrep -q begun {name} && mv {name} out/ && echo moved",
    )
    assert here.toolkit("submit", script, "--wait").returncode == 0
    logs = sorted(here.folder.glob("out/slurm-*_*.out"))
    assert [log.read_text() for log in logs] == ["begun\nmoved\n"] * 2


def test_no_daemon_of_a_script_is_there_in_the_next_attempt(here: Site) -> None:
    script = write(
        here, "job.sh",
        "#SBATCH -t 5\n[ -e pid ] && { grep -q '^State:.[SR]' /proc/$(cat pid)/status && echo alive; echo second; exit 0; }\n"
        "setsid sh -c 'echo $$ > pid; exec sleep 600' > /dev/null 2>&1 &\nuntil [ -s pid ]; do sleep 0.1; done; exit 3",
    )  # fmt: skip
    assert here.toolkit("submit", script, "--wait", "--set", "restart.crashes=1").returncode == 0
    assert here.ok("logs", "--rank", 0, "--attempt", 1).split()[-1] == "second"
    assert "alive" not in here.ok("logs", "--rank", 0, "--attempt", 1)


@pytest.mark.evidence
def test_a_script_that_requeues_itself_on_its_signal(here: Site) -> None:
    script = write(
        here, "job.sh",
        "#SBATCH -N1 -t 2 --signal=B:USR1@100\n"
        "trap 'echo got USR1; scontrol requeue $SLURM_JOB_ID; exit 0' USR1\n"
        "[ -n \"$SLURM_RESTART_COUNT\" ] && { echo again; exit 0; }\nsleep 110 & wait",
    )  # fmt: skip
    job_id, run = here.submit(script)
    wait_for(lambda: "got USR1" in here.toolkit("logs", run.run_id, "--rank", 0).stdout)
    here.command(["scontrol", "update", f"JobId={job_id}", "StartTime=now"])
    assert here.wait(run).returncode == 0
    status = json.loads(here.ok("status", run.run_id, "--json"))
    assert (status["state"], status["starts"]) == ("completed", 2)


def test_a_signal_from_scancel_reaches_the_shell(here: Site) -> None:
    script = write(here, "job.sh", "#SBATCH -t 5\ntrap 'echo got it; exit 7' USR1\necho ready\nsleep 60 & wait")
    job_id, run = here.submit(script)
    wait_for(lambda: "ready" in here.toolkit("logs", run.run_id, "--rank", 0).stdout)
    here.command(["scancel", "--batch", "--signal=USR1", job_id])
    assert here.wait(run).returncode == 7


SAVES = """
import os, signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
asked, rank = [], os.environ["SLURM_PROCID"]
Path("ready" + rank).touch()
while not asked:
    time.sleep(0.1)
time.sleep(2)
Path(f"saved{rank}-" + os.environ.get("SLURM_RESTART_COUNT", "0")).touch()
"""


@pytest.mark.parametrize("request_an_end", ["stop", "requeue"])
def test_a_request_reaches_the_steps_of_a_script_and_not_srun(here: Site, request_an_end: str) -> None:
    """srun kills its step on TERM, within a second."""
    (here.folder / "saves.py").write_text(SAVES)
    script = write(here, "job.sh", "#SBATCH -N2 --ntasks-per-node=1 -t 5\nsrun python3 saves.py | tee log\ntouch next")
    job_id, run = here.submit(script)
    wait_for(lambda: len([*here.folder.glob("ready*")]) == 2)
    here.ok(request_an_end, run.run_id)
    if request_an_end == "stop":
        assert here.wait(run).returncode == 130
    wait_for(lambda: len([*here.folder.glob("saved*-0")]) == 2)
    assert not (here.folder / "next").exists()
    here.command(["scancel", job_id])


def test_explain_a_job_of_sbatch(here: Site) -> None:
    failing = write(here, "fails.sh", "echo begin; echo 'No space left on device' >&2; exit 3")
    sleeping = write(here, "sleeps.sh", "sleep 1000")
    fatal = write(
        here, "fatal.sh", "echo 'srun: fatal: no configuration source' >&2; seq 9; echo 'Error: a job failed'; exit 1"
    )
    failed, running, held = sbatch(here, failing), sbatch(here, sleeping), sbatch(here, "--hold", sleeping)
    with_cause = sbatch(here, "-o", "fatal-%j.out", "-e", "fatal-%j.err", fatal)

    def explained(job: str) -> dict[str, Any]:
        return json.loads(here.ok("explain", job, "--json"))

    wait_for(lambda: explained(failed)["state"] == "failed" and explained(running)["state"] == "running")
    assert explained(failed)["symptom"] == "disk_full"
    assert {"begin", "No space left on device"} <= {one["line"] for one in explained(failed)["evidence"]}
    wait_for(lambda: explained(with_cause)["state"] == "failed")
    told = explained(with_cause)
    assert told["why"] == "its script exited with code 1: srun: fatal: no configuration source"
    assert [one["line"] for one in told["evidence"][1:]] == ["srun: fatal: no configuration source"]
    assert told["evidence"][1]["source"].endswith(f"fatal-{with_cause}.err")
    assert "`scancel" in explained(running)["actions"][-1]
    assert explained(held) == explained(held) | {"symptom": "pending_JobHeldUser", "run_id": "", "status": None}
    assert explained(held)["actions"] == [f"`scontrol release {held}`"]
    subprocess.run(["scancel", running], env=here.cluster.env, check=True)
    wait_for(lambda: explained(running)["state"] == "cancelled")


def test_explain_a_job_of_salloc(here: Site) -> None:
    """It has no log, and `tail` of none would mislead."""
    granted = here.command(["salloc", "--no-shell", "-N1"])
    job_id = granted.stderr.split("job allocation ")[1].split()[0]
    explained = json.loads(here.ok("explain", job_id, "--json"))
    here.command(["scancel", job_id])
    assert explained["state"] == "running" and len(explained["evidence"]) == 1, explained
    assert [action.split()[0] for action in explained["actions"]] == ["`scancel"]
