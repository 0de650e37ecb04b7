"""`train_lm` with a pause in each step, so that a test can hit one, and with a rank that kills itself on request.

It hears of both by its environment: PACE_S, MORTAL_RANK, STEPS_PER_LIFE and MORTAL_BY (SIGKILL, or asleep: it stays
alive and steps no more).
"""

from __future__ import annotations

import os
import signal
import time
from itertools import count

from toolkit.jobs import train_lm


def end_this_rank():
    if os.environ.get("MORTAL_BY") == "asleep":
        time.sleep(600)
    os.kill(os.getpid(), signal.SIGKILL)


def main(world, config):
    pace_s = float(os.environ.get("PACE_S", "0"))
    mortal = world.rank == int(os.environ.get("MORTAL_RANK", "-1"))
    last_step = int(os.environ.get("STEPS_PER_LIFE", "0"))
    plain, steps = train_lm.loss_of, count()  # step 0 is the loop's rehearsal

    def loss_of(logits, following):
        time.sleep(pace_s)
        if next(steps) > last_step and mortal:
            end_this_rank()
        return plain(logits, following)

    train_lm.loss_of = loss_of
    train_lm.main(world, config)
