"""`toolkit run` on a terminal inside salloc: Ctrl-C saves, the run goes on here or in the queue, a lost terminal ends it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from on_slurm import TOOLKIT, Site, make_site, wait_for

from toolkit.rundir.layout import RunDirectory

pytestmark = pytest.mark.cluster

TINY = (
    "train_lm -n 2 --set args.layers=1 --set args.width=16 --set args.heads=1 --set args.context=16 "
    "--set args.max_bytes=100000 --set checkpoint.every_steps=0 --set train.micro_batch=0 --set train.steps=100000"
)


@pytest.fixture
def here(cluster, shared_path: Path) -> Site:
    return make_site(cluster, shared_path)


@pytest.fixture
def window(here: Site, terminal):
    """A shell on a terminal, in an allocation; `argv` is what brings it there."""

    def open_shell(*argv: str):
        environment = {
            **here.cluster.env, "TOOLKIT_SITE": str(here.file), "TOOLKIT_RUNS": str(here.folder / "runs"),
            "OMP_NUM_THREADS": "1", "PS1": "$ ",
        }  # fmt: skip
        opened = terminal([*argv, "bash", "--norc", "--noprofile"], cwd=here.folder, env=environment)
        opened.until("$ ")
        opened.type("stty -echo\n")
        return opened

    yield open_shell
    here.cluster.run("scancel", "--name=interactive")  # salloc is killed, and would keep its nodes


def steps(run: RunDirectory) -> int:
    log = run.metrics / "train.jsonl"
    return log.read_text().count("\n") if log.exists() else 0


def saved(run: RunDirectory) -> list[str]:
    return sorted(path.name for path in run.checkpoints.glob("step-????????"))


def the_run(here: Site) -> RunDirectory:
    wait_for(lambda: list((here.folder / "runs").glob("*/*/record.json")))
    (path,) = (here.folder / "runs").glob("*/*")
    return RunDirectory(path)


@pytest.mark.parametrize("launcher", ["srun", pytest.param("mpirun", marks=pytest.mark.evidence)])
def test_ctrl_c_in_a_step_saves_and_the_run_goes_on_there(here: Site, window, launcher: str) -> None:
    """In `srun --pty`, which holds the CPUs that the ranks need, and whose own number of tasks is one."""
    with here.file.open("a") as site:  # with Open MPI's mpirun ranks hear of a stop by a file
        site.write(f'[launcher]\nkind = "{launcher}"\nmpirun = "/usr/bin/mpirun"\n')
    shell = window("salloc", "-N1", "--ntasks-per-node=2", "srun", "-n1", "--pty")
    shell.type(f"{TOOLKIT[0]} run {TINY}; echo code=$? of it\n")
    run = the_run(here)
    wait_for(lambda: steps(run) > 3)
    shell.interrupt()
    shell.until("code=130 of it")
    (checkpoint,) = saved(run)
    assert here.status(run)["state"] == "stopped"
    enough = int(checkpoint.removeprefix("step-")) + 5
    shell.type(f"{TOOLKIT[0]} resume last --here --set train.steps={enough}; echo code=$? of it again\n")
    shell.until("code=0 of it again")
    assert saved(run)[-1] == f"step-{enough:08}"
    assert f"resumed at step {int(checkpoint[5:])} from" in shell.screen
    status = here.status(run)
    assert (status["state"], status["starts"], status["step"]) == ("completed", 2, enough)


def test_ctrl_c_twice_ends_ranks_that_do_not_listen(here: Site, window) -> None:
    """The first one is a TERM, which leaves them alive."""
    going_on = "for i in $(seq 600); do sleep 0.1; [ $heard ] && echo still here; done"
    here.job(f"trap heard=yes TERM; echo deaf; {going_on}", "requeue = false\n")
    shell = window("salloc", "-N2")
    shell.type(f"{TOOLKIT[0]} run work.toml; echo code=$? of it; squeue -h -s -j $SLURM_JOB_ID | wc -l\n")
    shell.until("[1] deaf")
    shell.interrupt()
    shell.until("Ctrl-C again")
    shell.until("[1] still here")
    shell.interrupt()
    shell.until("code=130 of it", 30)
    assert here.status(the_run(here))["state"] == "stopped"
    for node in ("node1", "node2"):
        assert "still here" not in here.cluster.exec(node, ["ps", "-eo", "args"]).stdout


def test_a_terminal_that_is_lost_takes_its_allocation_along(here: Site, window) -> None:
    """salloc gives the nodes back; ranks save within Slurm's grace time, and no process stays."""
    (here.folder / "stop.py").write_text(
        "import time\ndef main(world, config):\n"
        "    for step in range(600):\n        if world.should_stop(step): return print('saved', step, flush=True)\n        time.sleep(0.1)\n"
    )
    (here.folder / "stop.toml").write_text('[job]\nentry = "stop.py:main"\n')
    shell = window("salloc", "-N2")
    shell.type(f"{TOOLKIT[0]} run stop.toml\n")
    run = the_run(here)
    wait_for(lambda: run.attempt_numbers() and run.attempt(0).heartbeat.exists())
    shell.hang_up()
    wait_for(lambda: (run.attempt(0)).exit_file.exists())
    end = json.loads(run.attempt(0).exit_file.read_text())
    assert end["final"] and end["state"] != "completed"
    assert "saved" in run.attempt(0).log_file(0).read_text()
