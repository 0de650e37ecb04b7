"""Slurm's commands as a site's jobs need them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit.rundir.find import typed_path
from toolkit.slurm.commands import Slurm
from toolkit.slurm.silence import prints_commands, silences_of_this_command

if TYPE_CHECKING:
    from toolkit.config.site import SchedulerTable
    from toolkit.rundir.run_files import RecordedScheduler


def slurm_of_site(scheduler: SchedulerTable | RecordedScheduler, *, cluster: str = "") -> Slurm:
    """With the site's slurm.conf, for `cluster`, else for the one that the site names."""
    conf = scheduler.conf
    return Slurm(
        configuration=str(typed_path(conf)) if conf else "",
        cluster=cluster or scheduler.cluster,
        echo=prints_commands(),
        silences=silences_of_this_command(),
    )
