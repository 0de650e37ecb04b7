"""Wait while slurmctld is down: srun cannot start a step without it, but running steps do not need it."""

import math
import os
import time
from collections.abc import Callable

from toolkit.slurm.commands import Slurm
from toolkit.slurm.records import for_cluster
from toolkit.slurm.submit import is_silence
from toolkit.supervise.allocation import ANSWER_S, Allocation
from toolkit.supervise.commands import run_command
from toolkit.supervise.log import say
from toolkit.supervise.requests import StopRequest

PAUSE_S = 2.0


def await_controller(
    allocation: Allocation, request: StopRequest, reason: str, *, kept_s: float, is_asked_to_end: Callable[[], bool]
) -> bool:
    """Wait until slurmctld responds, and return True. Return False if a stop is requested, or once only `kept_s` seconds
    of the allocation are left. `reason` is the error message of the command that got no response.
    """
    most_s = max(0.0, allocation.left_s() - kept_s)
    limit = f"for up to {most_s:.0f} s" if math.isfinite(most_s) else "without a time limit"
    say(f"Slurm's controller does not respond ({reason}); retrying {limit}")
    began = time.monotonic()
    while not is_asked_to_end():
        if _answers(allocation, request):
            say(f"Slurm's controller responds again after {time.monotonic() - began:.0f} s")
            return True
        if allocation.left_s() <= kept_s:
            break
        time.sleep(PAUSE_S)
    return False


def _answers(allocation: Allocation, request: StopRequest) -> bool:
    """Return whether slurmctld responds to squeue, even with an error."""
    argv = for_cluster(["squeue", "--noheader", f"--jobs={allocation.job_id}"], allocation.cluster)
    done = run_command(argv, Slurm().environment(os.environ), timeout_s=ANSWER_S, request=request)
    return done.has_ended and not is_silence(done.problem)
