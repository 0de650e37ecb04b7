"""A requeue while Slurm does not respond. A scontrol of the test's own says what a real one says then, on demand."""

import threading
import time

import pytest

from toolkit.errors import SchedulerRefusedError
from toolkit.supervise import continuation
from toolkit.supervise.allocation import Allocation
from toolkit.supervise.requests import StopRequest

SILENT = "slurm_requeue error: Unable to contact slurm controller (connect failure)"
TIMED_OUT = "Unexpected message received for job 7"  # as scontrol of 22.05 says it
PENDING = "Job is pending execution for job 7"


@pytest.fixture
def scontrol(fake_slurm, monkeypatch):
    """Set the errors of the next calls of scontrol, the last one for all later calls; "" is a success."""
    monkeypatch.setattr(continuation, "_PAUSES_S", (0.05, 0.1))

    def set_answers(*answers):
        fake_slurm.respond_in_turn("scontrol", *(answer and f"{answer}\n" for answer in answers))
        return lambda: fake_slurm.calls("scontrol")

    return set_answers


def requeue(request):
    continuation.requeue(Allocation("7", 1, True, True, time.time() + 60), request)


def ended_after(seconds):
    """A request to which Slurm's TERM comes after a while."""
    request = StopRequest()
    timer = threading.Timer(seconds, setattr, [request, "terminated", True])
    timer.daemon = True
    timer.start()
    return request


def test_a_slurmctld_that_is_restarted_is_asked_again(scontrol, capsys):
    calls = scontrol(SILENT, TIMED_OUT, "")
    requeue(ended_after(1.5))
    assert [call.split()[-1] for call in calls()] == ["7"] * 3
    assert "Unable to contact slurm controller" in capsys.readouterr().out


def test_a_requeue_that_was_taken_without_an_answer_is_no_failure(scontrol):
    calls = scontrol(TIMED_OUT, PENDING)
    requeue(ended_after(1.5))
    assert len(calls()) == 2


@pytest.mark.parametrize(
    "refusal", ["Access/permission denied for job 7", "Requested operation is presently disabled", PENDING]
)
def test_a_refusal_is_raised_at_once(scontrol, refusal):
    calls = scontrol(refusal)
    with pytest.raises(SchedulerRefusedError, match=refusal[:20]):
        requeue(StopRequest())
    assert len(calls()) == 1


def test_a_job_that_slurm_ends_meanwhile_is_not_put_back(scontrol):
    """The TERM may be that of a cancel, which a requeue would undo."""
    calls = scontrol(SILENT)
    requeue(ended_after(0.5))
    asked = len(calls())
    assert asked >= 2
    time.sleep(0.5)
    assert len(calls()) == asked


def test_a_slurm_that_stays_away_is_given_up_in_the_end(scontrol, monkeypatch):
    monkeypatch.setattr(continuation, "PATIENCE_S", 0.5)
    scontrol(SILENT)
    with pytest.raises(SchedulerRefusedError, match="Unable to contact"):
        requeue(StopRequest())
