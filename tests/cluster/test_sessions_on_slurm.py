"""Sessions on a real Slurm: they outlive the terminal that asked for them, and the one that a shell was opened on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest
from on_slurm import TOOLKIT, Site, await_idle_nodes, wait_for

pytestmark = pytest.mark.cluster


@pytest.fixture
def home(here: Site, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Sessions of this test alone."""
    variables = {"HOME": str(here.folder), "TOOLKIT_SITE": str(here.file), "TOOLKIT_RUNS": str(here.folder / "runs")}
    for name, value in {**here.cluster.env, **variables}.items():
        monkeypatch.setenv(name, value)
    yield variables


def session(here: Site, home: dict[str, str], *words: object) -> str:
    return here.ok("session", *words, **home)


def test_commands_and_jobs_run_on_its_nodes(here: Site, home) -> None:
    said = session(here, home, "start", "--name", "dev", "-N", 2, "--ntasks-per-node", 2, "-t", 20)
    assert said.startswith("session dev is job ")
    nodes = session(here, home, "exec", "dev", "--", "hostname").split()
    assert len(nodes) == 4 and len(set(nodes)) == 2
    assert here.toolkit("session", "exec", "dev", "-n", 1, "--", "sh", "-c", "exit 7", **home).returncode == 7
    done = here.toolkit("run", here.job("echo $SLURM_JOB_ID $SLURM_NTASKS"), "--session", "dev", **home)
    job_id = json.loads(session(here, home, "ls", "--json"))[0]["job_id"]
    assert done.returncode == 0, done
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {job_id} 4" for rank in range(4)]
    session(here, home, "stop", "dev")
    assert not (here.folder / ".toolkit" / "sessions" / "dev.json").exists()


def test_a_lost_terminal_ends_neither_the_request_nor_the_shell(here: Site, home, terminal) -> None:
    environment = {**os.environ, **home, "TERM": "xterm", "SHELL": "/bin/sh"}
    blocker = here.cluster.run(
        "sbatch", "--parsable", "--output=/dev/null", "-N4", "--exclusive", "--wrap", "sleep 600"
    ).strip()
    wait_for(lambda: here.cluster.run("squeue", "-h", "-j", blocker, "-o", "%T").strip() == "RUNNING")
    window = terminal([*TOOLKIT, "session", "start", "--name", "dev", "-t", "20"], cwd=here.folder, env=environment)
    window.until("waits: Slurm: PENDING (Resources)")
    window.hang_up()
    assert window.process.wait(20)
    here.cluster.run("scancel", blocker)
    wait_for(lambda: json.loads(session(here, home, "ls", "--json"))[0]["state"] == "running")
    for typed, shown in (("kept=it; echo is $((40 + 2))\n", "is 42"), ("echo still $kept\n", "still it")):
        window = terminal([*TOOLKIT, "session", "attach", "dev"], cwd=here.folder, env=environment)
        window.until("[dev]")
        window.type(typed)
        window.until(shown)
        window.hang_up()
    session(here, home, "stop", "dev")
    await_idle_nodes(here.cluster, 30)  # a step that Slurm cannot end would cost its node, as "Kill task failed"
