"""slurmctld is away when ranks are to be started: it is waited for, and the launch spends nothing."""

import re
import time

import pytest

from toolkit.rundir.claims import claim_attempt, claim_start
from toolkit.rundir.files import read_lines
from toolkit.rundir.states import Cause, Next
from toolkit.supervise.allocation import Allocation
from toolkit.supervise.requests import StopRequest
from toolkit.supervise.shape import Shape
from toolkit.supervise.supervisor import Supervisor

WARN_S = 60
JOB = {
    "job": {"requeue": True, "entry": ["true"]}, "scheduler": {}, "launcher": {"kind": "auto"}, "site": {"name": "s"},
    "restart": {"crashes": 0, "walltimes": -1, "preemptions": -1, "warn_s": WARN_S, "stall_s": 900, "health": "off"},
}  # fmt: skip
UNCONFIRMED = "srun: error: Unable to confirm allocation for job 7: Socket timed out on send/recv operation"
AWAY = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"


@pytest.fixture
def supervisor(run_directory, fake_slurm, tmp_path, monkeypatch):
    """A supervisor in an allocation whose commands of Slurm run lines of shell."""
    monkeypatch.setattr("toolkit.supervise.attempt.MARKER_PATIENCE_S", 0.1)
    monkeypatch.setenv("PATH", f"{fake_slurm.folder}:/bin")

    def make(*, left_s=3600.0, **commands):
        for command, body in ({"sinfo": "", "scontrol": ""} | commands).items():
            fake_slurm.script(command, f"cd {tmp_path}\n{body}")
        claim_start(run_directory, first=0, job_id="7", host="n1", pid=1, process_started=1)
        allocation = Allocation("7", 1, in_slurm=True, is_batch=True, ends_at=time.time() + left_s, node_list="n1")
        return Supervisor(run_directory, JOB, 0, allocation, Shape.of(1, 1), run_directory.script(0), StopRequest())

    return make


def test_a_launch_waits_for_it_and_is_judged_by_its_own_words(supervisor, run_directory, capfd):
    one = supervisor(
        srun=f"if [ -e tried ]; then echo 'srun: error: something else'; else echo '{UNCONFIRMED}'; touch tried; fi; exit 1",
        squeue=f"if [ -e asked ]; then echo R; else touch asked; echo '{AWAY}' >&2; exit 1; fi",
    )  # fmt: skip
    attempt = claim_attempt(run_directory)
    end = one._attempt(attempt)
    assert (end.cause, end.symptom, end.last_lines) == (Cause.LAUNCH_FAILED, "", ["srun: error: something else"])
    said = capfd.readouterr().out
    assert f"Slurm's controller does not respond ({UNCONFIRMED}); retrying for up to 35" in said
    assert said.count("Slurm's controller") == 2 and re.search(r"Slurm's controller responds again after \d+ s", said)
    assert [line["event"] for line in read_lines(attempt.events)] == ["started"]


def test_where_it_stays_away_until_the_walltime_is_near_the_next_start_goes_on(supervisor, run_directory):
    one = supervisor(left_s=WARN_S + 1, srun=f"echo '{UNCONFIRMED}'; exit 1", squeue=f"echo '{AWAY}' >&2; exit 1")
    decision = one._decision(end := one._attempt(claim_attempt(run_directory)))
    assert (end.symptom, decision.cause, decision.next) == ("controller_away", Cause.WALLTIME, Next.REQUEUE)
    assert (
        end.reason
        == "Slurm's controller did not respond, so srun could not start anything; toolkit retried until the walltime was near"
    )


def test_a_request_to_end_ends_the_wait(supervisor, run_directory):
    one = supervisor(srun=f"echo '{UNCONFIRMED}'; touch {run_directory.control}/stop; exit 1", squeue="sleep 100")
    assert one._attempt(claim_attempt(run_directory)).cause is Cause.STOPPED


def test_the_steps_of_a_script_are_signaled_although_slurm_is_busy(supervisor, monkeypatch, tmp_path, capfd):
    """After a query that timed out, others are skipped; without this signal, no rank would save."""
    monkeypatch.setattr("toolkit.supervise.allocation.SIGNAL_PERIOD_S", 0.01)
    one = supervisor(scancel=f"echo $* >> asked; [ $(wc -l < asked) = 3 ] || {{ echo '{AWAY}' >&2; exit 1; }}")
    one.allocation._silent_until = time.monotonic() + 1000
    one._terminate_steps(1, lambda: False)
    assert (tmp_path / "asked").read_text() == "--signal=TERM 7\n" * 3
    assert capfd.readouterr().out.count("cannot send TERM to the steps") == 1
    one.request.terminated = True  # Slurm has sent TERM itself
    one._terminate_steps(1, lambda: False)
    assert (tmp_path / "asked").read_text().count("\n") == 3
