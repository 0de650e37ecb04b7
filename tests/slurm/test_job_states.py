"""Slurm's words for a job's state."""

import pytest

from toolkit.rundir.states import RunState
from toolkit.slurm.job_facts import base_state, run_state

# squeue(1), "JOB STATE CODES", and sacct(1), in the order of the manual of Slurm 26.05.
MANUAL = """BOOT_FAIL CANCELLED COMPLETED CONFIGURING COMPLETING DEADLINE EXPEDITING FAILED NODE_FAIL OUT_OF_MEMORY PENDING
PREEMPTED RUNNING RESV_DEL_HOLD REQUEUE_FED REQUEUE_HOLD REQUEUED RESIZING REVOKED SIGNALING SPECIAL_EXIT STAGE_OUT
STOPPED SUSPENDED TIMEOUT LAUNCH_FAILED RECONFIG_FAIL""".split()  # noqa: SIM905
# Submitit takes some of these for an end; the job goes on.
NOT_AN_END = ["SUSPENDED", "RESIZING", "CONFIGURING", "COMPLETING", "REQUEUED", "REQUEUE_HOLD", "STAGE_OUT", "STOPPED"]


@pytest.mark.parametrize("state", MANUAL)
def test_every_state_of_the_manual_is_known(state):
    assert run_state(state) is not RunState.UNKNOWN


@pytest.mark.parametrize("state", NOT_AN_END)
def test_a_job_that_goes_on_is_not_over(state):
    assert not run_state(state).final


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("CANCELLED by 1000", RunState.CANCELLED), ("CANCELLED+", RunState.CANCELLED), ("completed", RunState.COMPLETED),
        ("OUT_OF_ME+", RunState.UNKNOWN), ("TIMEOUT", RunState.TIMEOUT), ("DEADLINE", RunState.TIMEOUT),
        ("NODE_FAIL", RunState.FAILED), ("PREEMPTED", RunState.PREEMPTED),
    ],
)  # fmt: skip
def test_what_a_state_means_to_a_run(text, state):
    assert run_state(text) is state


@pytest.mark.parametrize("text", ["", "  ", "EXPLODED", "RUNNIN", "RUNNINGG", "FAIL"])
def test_an_unknown_word_stays_unknown(text):
    assert run_state(text) is RunState.UNKNOWN
    assert not run_state(text).final


def test_the_base_word():
    assert base_state("CANCELLED by 0") == "CANCELLED"
    assert base_state("") == ""
