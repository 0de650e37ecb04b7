"""Nodes that vanish under a run: the cable pulled, slurmd killed; and ranks that live on and must not commit."""

from __future__ import annotations

import time

import pytest
from place import attempts_of, longest_silence_s, losses, stepped, steps_lost, until
from process_table import processes_of

from toolkit.devcluster import cluster as devcluster
from toolkit.rundir.files import read_json_or_none

DETECTION_S = 60.0  # by Slurm, with SlurmdTimeout=5
HOLD_S = 12.0  # of a requeued job
SILENT_S = 60.0


def await_idle_nodes(place):
    """An earlier scenario may still be ending on some node."""
    until(lambda: set(devcluster.node_states(place.layout).values()) == {"idle"})


def starts_of(run):
    return [read_json_or_none(attempt.start_file) or {} for attempt in attempts_of(run)]


def history(run):
    """Each attempt as "nodes:cause"."""
    ends = [read_json_or_none(attempt.exit_file) or {"cause": "no end"} for attempt in attempts_of(run)]
    return [f"{begun.get('nodes')}:{end['cause']}" for begun, end in zip(starts_of(run), ends, strict=True)]


@pytest.mark.evidence
@pytest.mark.timeout(300)
@pytest.mark.parametrize("lost", ["node3", "node1"])
def test_node_lost_of_2_to_4(lost, slurm, ledger):
    """`-N 2-4` on 4 nodes: the run finishes on those that are left, also without the supervisor's own node."""
    await_idle_nodes(slurm)
    run = slurm.submit("-N", "2-4", "--ntasks-per-node", "1", steps=150, pace_s=0.2)
    until(stepped(run, 0, 12))
    struck = time.monotonic()
    devcluster.fail(slurm.layout, lost)
    try:
        until(lambda: devcluster.node_states(slurm.layout)[lost].startswith("down"), timeout_s=90)
        detected = time.monotonic() - struck
        until(lambda: len(run.start_numbers()) > 1, timeout_s=150)
        requeued = time.monotonic() - struck
        until(lambda: stepped(run, attempts_of(run)[-1].number)() and starts_of(run)[-1]["start"] > 0)
        stepping = time.monotonic() - struck
        state = slurm.wait(run, timeout_s=120)
    finally:
        devcluster.restore(slurm.layout, lost)
    ledger.note(
        0, state=state, losses_equal=None, seconds={"node down": detected, "next start": requeued, "next step": stepping},
        attempts=history(run), steps=len(losses(run)), steps_lost=steps_lost(run), silent_s=longest_silence_s(run),
    )  # fmt: skip
    until(lambda: not processes_of(run), timeout_s=60)  # also those on the node that was lost
    assert state == "completed"
    assert (starts_of(run)[0]["nodes"], starts_of(run)[-1]["nodes"]) == (4, 3)
    assert sorted(losses(run)) == list(range(1, 151))
    assert stepping < detected + HOLD_S + SILENT_S


@pytest.mark.evidence
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("where", ["supervisor", "other"])
def test_kill_of_slurmd(where, slurm, repeats, undisturbed, ledger):
    """On the supervisor's node or on the other one, where all live on. Half the repeats for each."""
    seen = []
    repeats = (repeats + 1) // 2
    for repeat in range(repeats):
        await_idle_nodes(slurm)
        run = slurm.submit("-N", "2", "--ntasks-per-node", "1", steps=200, pace_s=0.2)
        until(stepped(run, 0, 7))
        host = starts_of(run)[0]["host"]
        others = {slurm.node_of(process) for process in processes_of(run, "rank")} - {host}
        node = host if where == "supervisor" else others.pop()
        struck = time.monotonic()
        devcluster.kill_slurmd(slurm.layout, node)
        try:
            state = slurm.wait(run, timeout_s=DETECTION_S + HOLD_S + SILENT_S)
            ended = time.monotonic() - struck
        finally:
            devcluster.restore(slurm.layout, node)
        gone = until(lambda run=run: not processes_of(run))
        equal = losses(run) == {step: undisturbed[step] for step in range(1, 201)}
        seen.append((state, equal))
        ledger.note(
            repeat, state=state, losses_equal=equal, seconds={"run ended": ended, "all gone": gone}, attempts=history(run),
            steps_lost=steps_lost(run), silent_s=longest_silence_s(run),
        )  # fmt: skip
    assert seen == [("completed", True)] * repeats


@pytest.mark.evidence
@pytest.mark.timeout(300)
def test_ranks_that_were_given_up_on_cannot_commit(slurm, undisturbed, ledger):
    """node1 is cut off with the whole attempt on it, which steps and saves on; another node takes the run over."""
    await_idle_nodes(slurm)
    run = slurm.submit("-w", "node1", "--set", "checkpoint.every_steps=1", steps=400, pace_s=0.3)
    until(stepped(run, 0, 7))
    devcluster.fail(slurm.layout, "node1")
    struck = time.monotonic()
    try:
        # It asked for node1; what the new start gets is Slurm's to say, so the wish is taken back.
        job_id = slurm.status(run)["job_id"]
        until(lambda: "PENDING" in slurm.command("squeue", "-h", "-j", job_id, "-o", "%T").stdout, timeout_s=90)
        slurm.command("scontrol", "update", f"JobId={job_id}", "ReqNodeList=")
        until(lambda: len(run.attempt_numbers()) > 1, timeout_s=60)
        claimed = time.monotonic() - struck
        late = late_commits(run, until_step=stepped(run, run.attempt_numbers()[-1], 20))
        alive = sorted({process.attempt for process in processes_of(run, "rank")})
    finally:
        devcluster.restore(slurm.layout, "node1")
    state = slurm.wait(run, timeout_s=180)
    equal = losses(run) == {step: undisturbed[step] for step in range(1, 401)}
    said = [line for rank in (0, 1) for line in run.attempt(0).log_file(rank).read_text().splitlines()[-2:]]
    ledger.note(
        0, state=state, losses_equal=equal, seconds={"new attempt": claimed}, late_commits=late, attempts=history(run),
        attempts_alive_then=alive, silent_s=longest_silence_s(run), old_ranks_said=said,
    )  # fmt: skip
    assert late == []
    assert {begun["start"] for begun in starts_of(run)[1:]} == {1}, "the supervisor that was given up on went on"
    assert state == "completed" and equal


def late_commits(run, until_step):
    """Checkpoints that attempt 0 committed after the next one was claimed, looked for until that one is well on its way."""
    known = {path.name for path in run.checkpoints.glob("step-????????")}
    late = []
    deadline = time.monotonic() + 60
    while not until_step() and time.monotonic() < deadline:
        for path in run.checkpoints.glob("step-????????"):
            manifest = read_json_or_none(path / "manifest.json")
            if manifest is not None and path.name not in known:
                known.add(path.name)
                late += [path.name] if manifest["attempt"] == 0 else []
        time.sleep(0.02)
    return late
