"""Sessions: what is asked of Slurm, what is remembered, and what is said when a session waits, ends or is gone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from fake_slurm import FakeSlurm

from toolkit.session.files import sessions_folder
from toolkit.session.session import enter


class Slurm(FakeSlurm):
    """A Slurm that grants allocation 42 on two nodes, and holds it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.respond("scancel")
        self.respond("sacct", code=1)
        self.respond("sinfo", "localhost\n")  # the name that Slurm has for the node
        self.script("srun", "env | grep -E '^(MPI4PY_LIBMPI|SLURM_JOB_ID|WORD)='; exit 7")
        self.respond("salloc", stderr="salloc: Granted job allocation 42\n")
        self.comments(("8",))  # for the query of NumCPUs
        self.hold("RUNNING")

    def hold(self, state: str, *, reason: str = "None", left: str = "30:00") -> None:
        """Make squeue report job 42 in `state`."""
        self.queue(("42", state, reason), nodes="n[1-2]", time_left=left)

    def forget(self) -> None:
        self.respond("squeue", stderr="slurm_load_jobs error: Invalid job id specified\n", code=1)

    @property
    def actions(self) -> list[str]:
        """All calls but the queries of the queue."""
        return [call for call in self.calls() if not call.startswith("squeue ")]


@pytest.fixture
def slurm(toolkit, fake_slurm: FakeSlurm, dev_cluster_conf, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    monkeypatch.setenv("TOOLKIT_SITE", "devcluster")
    return Slurm(fake_slurm.folder)


def start(toolkit, *words: object) -> str:
    return toolkit.ok("session", "start", "--name", "dev", "-N", 2, "--ntasks-per-node", 2, *words)


def test_what_is_asked_and_remembered(toolkit, slurm: Slurm) -> None:
    said = start(toolkit, "-t", "1:00:00", "-c", 2)
    assert said.startswith("session dev is job 42 on n1,n2, until ")
    assert slurm.actions[0] == (
        "salloc --no-shell --job-name=dev --comment=toolkit:session:dev --nodes=2 --ntasks-per-node=2 --cpus-per-task=2 "
        "--time=1:00:00 --partition=main"
    )
    assert sessions_folder().stat().st_mode & 0o777 == 0o700
    assert (sessions_folder() / "dev.json").stat().st_mode & 0o777 == 0o600
    (told,) = json.loads(toolkit.ok("session", "ls", "--json"))
    assert (told["name"], told["state"], told["nodes"], told["left_s"]) == ("dev", "running", ["n1", "n2"], 1800)
    said = toolkit("session", "start", "--name", "dev")
    assert said.code == 1 and "`toolkit session stop dev`" in said.err
    assert toolkit.ok("session", "stop", "dev") == "session dev: released job 42\n"
    assert slurm.actions[-1] == "scancel --full 42"
    assert not list(sessions_folder().iterdir())


def test_a_session_on_another_cluster(toolkit, slurm: Slurm, tmp_path: Path) -> None:
    assert start(toolkit, "-M", "far").startswith("session dev is job 42;far on n1,n2")
    assert slurm.actions[0].startswith("salloc --clusters=far --no-shell")
    (told,) = json.loads(toolkit.ok("session", "ls", "--json"))
    assert (told["job_id"], told["cluster"]) == ("42", "far")
    command = [str(Path(sys.executable).with_name("toolkit")), "session", "exec", "dev", "--", "a"]
    subprocess.run(command, capture_output=True, check=False)
    assert slurm.actions[-1].startswith("srun --clusters=far --jobid=42 --overlap")
    environ = dict(os.environ)
    enter("dev", environ)
    assert environ["SLURM_CLUSTERS"] == "far"  # for the srun of a run in it
    toolkit.ok("session", "stop", "dev")
    assert slurm.actions[-1] == "scancel --clusters=far --full 42"


def test_a_job_lends_its_shape(toolkit, slurm: Slurm) -> None:
    job = toolkit.job("true", more="")
    job.write_text(job.read_text() + "nodes = 3\ngpus_per_node = 1\n")
    toolkit.ok("session", "start", job)
    assert (
        "--job-name=work" in slurm.actions[0]
        and "--nodes=3" in slurm.actions[0]
        and "--gpus-per-node=1" in slurm.actions[0]
    )


def test_a_command_gets_the_tasks_of_the_session_and_its_exit_code_back(toolkit, slurm: Slurm, tmp_path: Path) -> None:
    start(toolkit)
    command = [str(Path(sys.executable).with_name("toolkit")), "session", "exec", "dev"]
    environment = {**os.environ, "WORD": "mine", "SLURM_JOB_ID": "7"}
    done = subprocess.run([*command, "--", "a", "b c"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 7
    # The site's MPI, this shell's own variables, nothing of another job that it is in.
    assert set(done.stdout.splitlines()) == {"MPI4PY_LIBMPI=/usr/lib/x86_64-linux-gnu/libmpi.so.40", "WORD=mine"}
    shape = "--nodes=2 --ntasks=4 --ntasks-per-node=2 --cpus-per-task=1 --mpi=pmix"
    assert slurm.actions[-1] == f"srun --jobid=42 --overlap {shape} a b c"
    subprocess.run([*command, "-n", "1", "--", "a"], env=environment, capture_output=True, check=False)
    assert slurm.actions[-1] == "srun --jobid=42 --overlap --nodes=1 --ntasks=1 --cpus-per-task=1 --mpi=pmix a"
    said = toolkit("session", "exec", "dev", "-N", 3, "--", "a")
    assert (said.code, "-N 3: the session has only 2 nodes. Fix: use -N 2, or omit -N" in said.err) == (2, True)


def test_an_end_that_is_near_is_warned_of(toolkit, slurm: Slurm) -> None:
    start(toolkit)
    assert "ends in" not in toolkit("session", "ls").err
    slurm.hold("RUNNING", left="8:10")
    assert "session dev ends in 8 min, at " in toolkit("session", "ls").err


def test_one_that_has_ended_is_shown_once_more(toolkit, slurm: Slurm) -> None:
    start(toolkit)
    slurm.forget()
    assert "lost (forgotten)" in toolkit.ok("session", "ls")
    assert len(toolkit.ok("session", "ls").splitlines()) == 1
    slurm.hold("RUNNING")
    start(toolkit)
    slurm.hold("TIMEOUT")
    said = toolkit("session", "exec", "dev", "--", "true")
    assert said.code == 1
    assert "session dev has ended (Slurm: TIMEOUT). Fix: `toolkit session start --name dev`" in said.err
    assert toolkit("session", "exec", "dev", "--", "true").code == 4


def test_while_slurm_is_silent_nothing_is_forgotten(toolkit, slurm: Slurm) -> None:
    start(toolkit)
    slurm.script("squeue", "echo 'squeue: error: Unable to contact slurm controller' >&2; exit 1")
    assert "unknown" in toolkit.ok("session", "ls")
    assert toolkit("session", "exec", "dev", "--", "true").code == 1
    slurm.hold("RUNNING")
    assert "running" in toolkit.ok("session", "ls")


def test_why_it_waits_is_said_and_ctrl_c_gives_it_up(toolkit, slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    from toolkit.session import session

    slurm.script("salloc", "echo 'salloc: Pending job allocation 42' >&2; exec sleep 20")
    slurm.hold("PENDING", reason="Resources")
    sleeps = iter(range(10))

    def sleep(seconds: float) -> None:
        time.sleep(seconds)
        if next(sleeps) == 5:  # Ctrl-C
            raise KeyboardInterrupt

    monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    said = toolkit("session", "start")
    assert said.code == 130
    assert "job 42 waits: Slurm: PENDING (Resources): it is the next job, and is waiting for free nodes" in said.err
    assert said.err.endswith("toolkit: interrupted; cancelled session session, job 42\n")
    assert slurm.actions[-1] == "scancel --full 42"
    assert not list(sessions_folder().glob("*.json"))


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--name", ".x"), 2, "is not a valid session name"),
        (("-a", "0-3"), 2, "a session cannot be an array: it is a single allocation"),
        (("-o", "x"), 2, "is an sbatch option"),
        (("--site", "local"), 2, "expected a site with Slurm, got 'local', which has no scheduler"),
        (("-t", "2-00:00:00"), 2, "partition main of devcluster allows at most"),
        (("-p", "nope"), 2, "partition 'nope' not found at site devcluster"),
    ],
)
def test_what_cannot_be_a_session_is_refused(
    toolkit, slurm: Slurm, words: tuple[str, ...], code: int, said: str
) -> None:
    refused = toolkit("session", "start", *words)
    assert refused.code == code and said in refused.err and "Fix: " in refused.err
    assert not any(call.startswith("salloc") for call in slurm.actions)


def test_what_salloc_refuses_is_said_with_the_fix(toolkit, slurm: Slurm) -> None:
    slurm.script("salloc", "echo 'salloc: error: Job submit/allocate failed: Invalid node name specified' >&2; exit 1")
    said = toolkit("session", "start", "-w", "n77")
    assert said.code == 3
    assert "toolkit: salloc: Invalid node name specified. Fix: `sinfo -N` lists the nodes; fix -w or -x" in said.err
    assert not list(sessions_folder().iterdir())


def test_a_run_in_a_session_has_its_allocation(toolkit, slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    from toolkit.submission import foreground

    start(toolkit)
    seen = {}

    class CaughtError(Exception):
        pass

    def catch(_run, job, _start):
        seen.update(os.environ)
        seen["shape"] = (job.job.nodes, job.job.ranks_per_node, job.site.name)
        raise CaughtError

    monkeypatch.setattr(foreground, "start_here", catch)
    monkeypatch.delenv("TOOLKIT_SITE")
    with patch.dict(os.environ), pytest.raises(CaughtError):
        toolkit("run", toolkit.job("true"), "--session", "dev")
    assert seen["shape"] == (2, 2, "devcluster")
    assert (seen["SLURM_JOB_ID"], seen["SLURM_JOB_NODELIST"], seen["SLURM_OVERLAP"]) == ("42", "n1,n2", "1")
    assert (seen["SLURM_TASKS_PER_NODE"], seen["SLURM_JOB_CPUS_PER_NODE"]) == ("2(x2)", "4(x2)")


def test_the_notebooks_token_is_in_a_file_alone(toolkit, slurm: Slurm) -> None:
    """srun runs its command here; a small server stands for Jupyter, and says where it listens as Jupyter does."""
    slurm.script("srun", 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"')
    (slurm.folder / "jupyter-server").write_text(
        f"#!{sys.executable}\nimport json, os, socket, sys\n"
        f"open({str(slurm.folder / 'calls')!r}, 'a').write(' '.join(sys.argv) + '\\n')\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "place = os.environ['JUPYTER_RUNTIME_DIR'] + '/jpserver-1.json'\n"
        "token = open(os.environ['JUPYTER_TOKEN_FILE']).read()\n"
        "assert len(token) == 48\n"
        "json.dump({'port': server.getsockname()[1], 'token': token}, open(place, 'w'))\n"
        "server.settimeout(10)\nfor _ in range(3): server.accept()\n"
    )
    (slurm.folder / "jupyter-server").chmod(0o755)
    start(toolkit)
    tunnel, url = toolkit.ok("session", "notebook", "dev", "--login", "login1").splitlines()
    token = (sessions_folder() / "dev.token").read_text()
    assert url.endswith(f"/?token={token}") and (sessions_folder() / "dev.token").stat().st_mode & 0o777 == 0o600
    port = url.partition("localhost:")[2].partition("/")[0]
    assert tunnel.startswith(f"ssh -N -L {port}:127.0.0.1:{port} ") and tunnel.endswith("@login1")
    assert not any(token in call for call in slurm.actions)
    assert any("--ServerApp.ip=127.0.0.1" in call for call in slurm.actions)
    assert toolkit.ok("session", "notebook", "dev", "--login", "login1").splitlines() == [tunnel, url]  # the same one
    other = toolkit.ok("session", "notebook", "dev", "--login", "login1", "--node", "n2").splitlines()
    assert other[1] != url  # of another node, be its port taken there or not
    assert toolkit.ok("session", "notebook", "dev", "--login", "login1").splitlines() == [tunnel, url]


def test_no_jupyter_is_said_with_the_fix(toolkit, slurm: Slurm) -> None:
    slurm.script("srun", "exit 9")
    start(toolkit)
    said = toolkit("session", "notebook", "dev")
    assert said.code == 1
    assert "Jupyter is not on PATH on n1. Fix: `" in said.err and "-m pip install jupyterlab`" in said.err


def test_the_cost_is_told_for_one_walltime(toolkit, slurm: Slurm) -> None:
    cost = "toolkit: requests at most 2 node-hours, 4 CPU-hours (2 nodes x 0-01:00:00)\n"
    words = ("session", "start", "--name", "dev", "-N", 2, "--ntasks-per-node", 2, "-t", "1:00:00")
    assert toolkit(*words).err.endswith(cost)


def test_one_that_is_not_there_keeps_no_other_from_its_end(toolkit, slurm: Slurm) -> None:
    start(toolkit)
    said = toolkit("session", "stop", "nobody", "dev")
    assert (said.code, said.out) == (4, "session dev: released job 42\n")
    assert "session 'nobody' not found" in said.err and not list(sessions_folder().iterdir())
