"""Every job state of Slurm, and its meaning for a run. A state that is not listed here stays unknown."""

from __future__ import annotations

from toolkit.rundir.states import RunState

# Source: slurm.schedmd.com/squeue.html and sacct.html, "JOB STATE CODES", Slurm 22.05 to 24.11.
STATES: dict[str, RunState] = {
    "PENDING": RunState.PENDING,
    "CONFIGURING": RunState.PENDING,
    "REQUEUED": RunState.PENDING,
    "REQUEUE_FED": RunState.PENDING,
    "REQUEUE_HOLD": RunState.PENDING,
    "RESV_DEL_HOLD": RunState.PENDING,
    "SPECIAL_EXIT": RunState.PENDING,
    "RUNNING": RunState.RUNNING,
    "COMPLETING": RunState.RUNNING,
    "SIGNALING": RunState.RUNNING,
    "STAGE_OUT": RunState.RUNNING,
    "STOPPED": RunState.RUNNING,
    "SUSPENDED": RunState.RUNNING,
    "RESIZING": RunState.RUNNING,
    "COMPLETED": RunState.COMPLETED,
    "CANCELLED": RunState.CANCELLED,
    "FAILED": RunState.FAILED,
    "BOOT_FAIL": RunState.FAILED,
    "LAUNCH_FAILED": RunState.FAILED,
    "RECONFIG_FAIL": RunState.FAILED,
    "NODE_FAIL": RunState.FAILED,
    "OUT_OF_MEMORY": RunState.FAILED,
    "REVOKED": RunState.FAILED,
    "TIMEOUT": RunState.TIMEOUT,
    "DEADLINE": RunState.TIMEOUT,
    "PREEMPTED": RunState.PREEMPTED,
}


def base_state(text: str) -> str:
    """The state without its details: `CANCELLED by 1000` and `CANCELLED+` are CANCELLED."""
    words = text.split()
    return words[0].rstrip("+").upper() if words else ""


def run_state(slurm_state: str) -> RunState:
    """The meaning of a Slurm state for a run; UNKNOWN if Slurm's manual does not list it."""
    return STATES.get(base_state(slurm_state), RunState.UNKNOWN)
