"""The table [restart]: how often a run may start again, and when it is warned."""

from __future__ import annotations

from typing import Literal

from toolkit.config.table import Table, key


class RestartTable(Table):
    """Each budget counts its own cause."""

    crashes: int = key(2, "Restarts after a crash of a rank; -1 is unlimited.", ge=-1)
    walltimes: int = key(-1, "Requeues at walltime; -1 is unlimited.", ge=-1)
    preemptions: int = key(-1, "Requeues after preemption; -1 is unlimited.", ge=-1)
    warn_s: int = key(120, "Seconds before walltime at which the ranks are signalled to save.", ge=1, le=65535)
    stall_s: int = key(900, "Seconds without a step after which the attempt counts as stalled.", ge=1)
    collective_timeout_s: int = key(
        1800,
        "Seconds that a rank of a function waits in a collective for the others before it fails. A smaller `stall_s` takes "
        "effect first.",
        ge=1,
    )
    health: Literal["requeue", "warn", "off"] = key(
        "requeue",
        "A check of the nodes before a start's first attempt. A node that fails it is excluded for a day; `requeue` also "
        "ends this start and begins another one without the node, from the budget of `crashes`.",
    )
