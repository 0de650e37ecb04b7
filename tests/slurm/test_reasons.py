"""Every pending reason that users meet has words, an answer to "can it ever start", and a fix that can be typed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.slurm.reasons import CanStart, pending_reason, reason_name

# squeue(1), "JOB REASON CODES", Slurm 22.05, with one name for each pattern of the accounting limits.
_NAMES = """
AssocGrpCpuLimit AssocGrpGRES AssocGrpNodeLimit AssocGrpJobsLimit AssocGrpMemLimit AssocGrpWallLimit AssocGrpBilling
AssocGrpCPUMinutesLimit AssocGrpGRESRunMinutes AssocMaxJobsLimit AssocMaxCpuPerJobLimit AssocMaxNodePerJobLimit
AssocMaxWallDurationPerJobLimit AssociationJobLimit AssociationResourceLimit AssociationTimeLimit BadConstraints
BeginTime Cleaning Dependency DependencyNeverSatisfied FrontEndDown InactiveLimit InvalidAccount InvalidQOS
JobHeldAdmin JobHeldUser JobLaunchFailure JobArrayTaskLimit Licenses NodeDown PartitionDown PartitionInactive
PartitionNodeLimit PartitionTimeLimit Priority Prolog QOSGrpCpuLimit QOSGrpGRES QOSGrpNodeLimit QOSJobLimit
QOSMaxCpuPerUserLimit QOSMaxGRESPerUser QOSMaxJobsPerUserLimit QOSMaxNodePerUserLimit QOSMaxWallDurationPerJobLimit
QOSMaxMemoryPerNode QOSMinGRES QOSMinCpuNotSatisfied QOSResourceLimit QOSTimeLimit QOSUsageThreshold ReqNodeNotAvail
Reservation Resources SystemFailure MaxGRESPerAccount MaxJobsPerAccount QOSNotAllowed AccountNotAllowed DeadLine
JobHoldMaxRequeue ReservationDeleted PartitionConfig BurstBufferResources MaxMemPerLimit None
"""
MANUAL = _NAMES.split()


@pytest.mark.parametrize("name", MANUAL)
def test_no_reason_of_the_manual_is_unknown(name: str) -> None:
    reason = pending_reason(name)
    assert "does not list" not in reason.words
    if reason.can_start is CanStart.NEVER:
        assert reason.fix, "nothing happens by itself, so that somebody must do something"
    assert "{" not in reason.fix.format(job="7", run="20261120-142233-9f3a", partition="main")


@pytest.mark.parametrize(
    ("said", "can_start", "word"),
    [
        ("PartitionTimeLimit", CanStart.NEVER, "more time"),
        ("Priority", CanStart.YES, "priority"),
        ("(ReqNodeNotAvail, UnavailableNodes:node3)", CanStart.NOT_BEFORE, "node"),
        ("Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions", CanStart.NOT_BEFORE, "down"),
        ("AssocGrpJobsLimit", CanStart.NOT_BEFORE, "has as many jobs"),
        ("QOSMaxGRESPerUser", CanStart.NOT_BEFORE, "GPUs"),
        ("QOSMaxWallDurationPerJobLimit", CanStart.NEVER, "more time"),
        ("QOSMinGRES", CanStart.NEVER, "less GPUs"),
        ("AssocGrpCPUMinutesLimit", CanStart.NOT_BEFORE, "used up"),
        ("AssocGrpGRESRunMinutes", CanStart.NOT_BEFORE, "when other jobs finish"),
        ("FluxCapacitorLimit", CanStart.UNKNOWN, "FluxCapacitorLimit"),
    ],
)  # fmt: skip
def test_whether_it_can_ever_start(said: str, can_start: CanStart, word: str) -> None:
    reason = pending_reason(said)
    assert (reason.can_start, word in reason.words) == (can_start, True), reason


def test_who_asks_for_no_node_by_name_is_not_told_to_leave_one_out() -> None:
    said = "ReqNodeNotAvail, Reserved for maintenance"
    assert "-w" in pending_reason(said).fix
    unnamed = pending_reason(said, names_nodes=False)
    assert ("-w" in unnamed.fix, "scontrol show reservation" in unnamed.fix) == (False, True)


@given(st.text())
def test_any_text_is_a_reason(said: str) -> None:
    """What a later Slurm invents must not end in a traceback, nor be taken for something known."""
    assert pending_reason(said).words
    assert "," not in reason_name(said)
