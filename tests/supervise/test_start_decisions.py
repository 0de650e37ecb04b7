"""What a supervisor makes of its allocation, of signals, and of what Slurm says: in this process, without ranks."""

import os
import signal
import time
from datetime import datetime, timedelta

import pytest

from toolkit.errors import ToolkitError
from toolkit.metrics.training import TrainLog, TrainRecord
from toolkit.rundir.claims import claim_attempt, process_start_ticks
from toolkit.rundir.files import utc_now, write_json
from toolkit.rundir.states import Cause, EndDecision, Next, RunState
from toolkit.rundir.user_requests import ask_to_stop
from toolkit.supervise import continuation
from toolkit.supervise.allocation import Allocation, drop_memory, find_allocation, why_terminated
from toolkit.supervise.ending import earlier_ends, judge
from toolkit.supervise.environment import rank_environment
from toolkit.supervise.failures import AttemptEnd
from toolkit.supervise.launch import choose_launcher, is_unmanaged
from toolkit.supervise.progress import last_step
from toolkit.supervise.requests import StopRequest
from toolkit.supervise.shape import Component, Shape, check_components
from toolkit.supervise.supervisor import Supervisor


@pytest.fixture
def supervisor(run_directory):
    """A supervisor in a batch job with `left_s` seconds left."""

    def make(left_s=3600.0, in_slurm=True, warn_s=120):
        allocation = Allocation("7", 1, in_slurm, in_slurm, time.time() + left_s)
        job = {"restart": {"warn_s": warn_s}}
        return Supervisor(run_directory, job, 0, allocation, Shape.of(1, 1), run_directory.script(0), StopRequest())

    return make


@pytest.fixture
def slurm_says(fake_slurm, monkeypatch):
    """Set what squeue and scontrol do; a real Slurm cannot be made to answer so on demand."""
    monkeypatch.setenv("PATH", f"{fake_slurm.folder}:/bin")

    def set_answer(body):
        for command in ("squeue", "scontrol"):
            fake_slurm.script(command, body)

    return set_answer


@pytest.mark.parametrize(("left_s", "cause"), [(115, Cause.WALLTIME), (220, Cause.PREEMPTED), (3600, Cause.PREEMPTED)])
def test_usr2_is_walltime_near_the_end_and_preemption_before(supervisor, slurm_says, left_s, cause):
    slurm_says("exit 1")  # a Slurm that is silent: what was known counts
    one = supervisor(left_s)
    one.request.may_be_early = one.may_be_early
    one.request.on_signal(signal.SIGUSR2, None)
    assert one.request.came
    assert one.why_warned() is cause


@pytest.mark.parametrize(("preempted", "cause"), [("N/A", None), ("2026-11-21T03:00:00", Cause.PREEMPTED)])
def test_an_early_walltime_warning_waits_until_warn_s_but_a_preemption_does_not(
    supervisor, slurm_says, monkeypatch, preempted, cause
):
    passed_s, began_s, began = [0.0], time.time(), time.monotonic()
    monkeypatch.setattr(time, "time", lambda: began_s + passed_s[0])
    monkeypatch.setattr(time, "monotonic", lambda: began + passed_s[0])
    slurm_says(f'case "$*" in *PreemptTime*) echo {preempted};; *) exit 1;; esac')
    one = supervisor(150)
    one.request.may_be_early = one.may_be_early
    one.request.on_signal(signal.SIGUSR2, None)
    assert one.request.needs_reason
    assert not one.request.came  # the supervisor has time to find the reason
    assert one.why_warned() is cause
    if cause is None:
        assert not one.request.came
        assert not one.request.needs_reason
        passed_s[0] = 29.0
        assert not one.request.came
        passed_s[0] = 31.0
        assert one.request.came
        assert one.why_warned() is Cause.WALLTIME


@pytest.mark.parametrize(
    ("warn_s", "within", "left_s", "grace_s"),
    [(120, None, 3600, 120), (15, None, 3600, 60), (120, 600, 3600, 600), (120, None, 70, 60), (120, 600, 5, 1)],
)
def test_a_stop_gives_the_time_of_a_walltime_within_the_allocation(supervisor, warn_s, within, left_s, grace_s):
    one = supervisor(left_s, warn_s=warn_s)
    ask_to_stop(one.run, within)
    assert one.grace_s(Cause.STOPPED) == pytest.approx(grace_s, abs=1)
    one.request.terminated = True  # Slurm ends the job, and waits for KillWait only
    assert one.grace_s(Cause.STOPPED) == one.stop_grace_s


@pytest.mark.parametrize("content", [b"x within", b"x within 10m", b"x within nan s", b"\xff within \xff s", b""])
def test_a_damaged_request_to_stop_gives_the_usual_time(supervisor, content):
    one = supervisor()
    (one.run.control / "stop").write_bytes(content)
    assert one.grace_s(Cause.STOPPED) == 120


def test_ranks_that_have_received_a_warning_are_not_left_without_its_cause(supervisor, slurm_says):
    """The supervisor assumed a later end, so that it passed the warning on as that of a preemption."""
    end = datetime.now() + timedelta(seconds=180)
    slurm_says(f"echo {end:%Y-%m-%dT%H:%M:%S}")
    one = supervisor(3600)
    one.request.may_be_early = one.may_be_early
    one.request.on_signal(signal.SIGUSR2, None)
    assert one.request.came
    assert one.why_warned() is Cause.WALLTIME


def test_an_end_that_was_moved_is_seen_before_usr2_is_judged(supervisor, slurm_says, run_directory):
    end = datetime.now() + timedelta(seconds=100)
    slurm_says(f"echo {end:%Y-%m-%dT%H:%M:%S}")
    one = supervisor(90_000)
    assert one.why_warned() is Cause.WALLTIME
    attempt = claim_attempt(run_directory)
    one.refresh_end(attempt)  # nothing has moved since
    assert not attempt.ends_at.exists()
    one.allocation.ends_at += 1000
    one.refresh_end(attempt)
    assert float(attempt.ends_at.read_text()) == pytest.approx(end.timestamp(), abs=1)


@pytest.mark.parametrize(("restarts", "cause"), [(1, Cause.WALLTIME), (0, Cause.PREEMPTED)])
def test_a_walltime_stays_one_if_a_program_has_requeued_the_job_before_the_query(
    supervisor, slurm_says, restarts, cause
):
    slurm_says(f'case "$*" in *EndTime*) echo N/A ;; *) echo {restarts} ;; esac')
    one = supervisor(100)
    assert one.why_warned() is cause


@pytest.mark.parametrize(
    ("restarts", "walltimes", "before", "after"),
    [
        (1, -1, Cause.WALLTIME, Cause.WALLTIME), (0, -1, Cause.WALLTIME, Cause.WALLTIME), (1, -1, Cause.STOPPED, Cause.STOPPED),
        (1, 0, Cause.WALLTIME, Cause.PREEMPTED),  # toolkit does not count walltimes, so the script decides
    ],
)  # fmt: skip
def test_a_script_that_requeues_its_job_keeps_its_progress(supervisor, slurm_says, restarts, walltimes, before, after):
    """As Lightning does on SIGUSR1; Slurm then ends the job by TERM."""
    slurm_says(f"echo {restarts}")
    one = supervisor()
    one.job |= {"job": {"entry": "train.py"}, "restart": {"walltimes": walltimes}}
    one.request.on_signal(signal.SIGTERM, None)
    end = one._unless_requeued(AttemptEnd(before, "", step=7, changed_files=True, new_files=True, files="1 new"))
    assert (end.cause, end.step, end.new_files, end.files) == (after, 7, True, "1 new")
    assert one.is_requeued is bool(restarts)
    if after is Cause.PREEMPTED:  # not by Slurm, and not without end
        assert end.reason.startswith("the script requeued its job; with restart.walltimes = -1, restart.blind_requeues")


@pytest.mark.parametrize(("follows", "is_canceled"), [(Next.END, True), (Next.REQUEUE, False)])
def test_a_job_that_its_program_requeued_is_canceled_if_the_run_has_ended(
    supervisor, fake_slurm, monkeypatch, follows, is_canceled
):
    monkeypatch.setenv("PATH", f"{fake_slurm.folder}:/bin")
    fake_slurm.script("scancel", "exit 0")
    one = supervisor()
    decision = EndDecision(Cause.STOPPED, follows, RunState.STOPPED, 130, "")
    assert one._leave_requeued(decision) == 130
    assert any("7" in call for call in fake_slurm.calls("scancel")) is is_canceled


@pytest.mark.parametrize("first", [None, signal.SIGTERM, signal.SIGUSR2])
def test_ctrl_c_asks_and_the_second_one_kills_whatever_was_asked_before(supervisor, first):
    one = supervisor()
    if first:
        one.request.on_signal(first, None)
    one.request.on_signal(signal.SIGINT, None)
    assert not one.request.kill
    one.request.on_signal(signal.SIGINT, None)
    assert one.request.kill
    assert one.request.cause is (None if first else Cause.STOPPED)  # the first request counts


def test_slurm_ends_a_preempted_job_by_its_own_clock(supervisor):
    assert supervisor(3600).grace_s(Cause.PREEMPTED) > 3000
    assert supervisor(100).grace_s(Cause.WALLTIME) == pytest.approx(90, abs=1)
    assert supervisor(5).grace_s(Cause.WALLTIME) == 1
    for one, cause in ((supervisor(in_slurm=False), Cause.PREEMPTED), (supervisor(), Cause.CANCELLED)):
        assert one.grace_s(cause) < 30  # Slurm's KillWait


IN_THE_END, LONG_BEFORE = 20, 3600


@pytest.mark.parametrize(
    ("said", "left_s", "is_batch", "cause"),
    [
        ("CANCELLED|0|N/A|", LONG_BEFORE, True, Cause.CANCELLED),
        ("TIMEOUT|0|N/A|", LONG_BEFORE, True, Cause.WALLTIME),
        ("RUNNING|0|N/A|", LONG_BEFORE, True, Cause.PREEMPTED),  # its grace time has begun
        ("NODE_FAIL|0|N/A|", LONG_BEFORE, True, Cause.NODE_LOST),
        ("COMPLETING|1|N/A|", LONG_BEFORE, True, Cause.PREEMPTED),  # it was requeued, for the second time
        ("COMPLETING|0|2026-11-21T03:00:00|", LONG_BEFORE, True, Cause.PREEMPTED),
        ("COMPLETING|0|N/A|", LONG_BEFORE, True, Cause.CANCELLED),
        ("COMPLETING|0|N/A|", IN_THE_END, True, Cause.WALLTIME),
        ("COMPLETING|0|N/A|", LONG_BEFORE, False, Cause.STOPPED),  # salloc gave it back
    ],
)
def test_slurm_says_why_it_sent_term(slurm_says, said, left_s, is_batch, cause):
    slurm_says(f"echo '{said}'")
    assert why_terminated(Allocation("7", 1, True, is_batch, time.time() + left_s)) is cause


@pytest.mark.parametrize(
    ("preempted", "exit_code", "asked", "cause"),
    [
        ("2026-11-21T03:00:00", 143, None, Cause.PREEMPTED),
        ("N/A", 143, None, Cause.CRASHED),  # somebody killed it
        ("", 143, None, Cause.CRASHED),  # Slurm does not say
        ("2026-11-21T03:00:00", 1, None, Cause.CRASHED),  # of its own
        ("2026-11-21T03:00:00", 143, signal.SIGINT, Cause.CRASHED),
    ],
)
def test_a_program_that_died_of_a_grace_time_was_preempted(supervisor, slurm_says, preempted, exit_code, asked, cause):
    """Slurm sends that TERM to the ranks alone. A crash would spend its budget, and end the run in the end."""
    slurm_says(f"echo '{preempted}'")
    one = supervisor()
    if asked:
        one.request.on_signal(asked, None)
    assert one._cause_in_slurm(AttemptEnd(Cause.CRASHED, "killed by SIGTERM", exit_code)) is cause


def test_a_slurm_that_is_silent_or_missing_does_not_end_the_supervisor(slurm_says, capsys, monkeypatch, tmp_path):
    slurm_says("exit 1")
    assert why_terminated(Allocation("7", 1, True, True, 0.0)) is None
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert why_terminated(Allocation("7", 1, True, True, 0.0)) is None
    assert find_allocation({"SLURM_JOB_ID": "7"}, 1).ends_at == 0
    assert capsys.readouterr().out.count("Slurm query failed") == 3


def test_a_slurm_that_hangs_is_waited_for_once(slurm_says, monkeypatch, capsys):
    """Each question would take 10 of the 30 s between TERM and KILL, and the record of the end would be lost."""
    monkeypatch.setattr("toolkit.supervise.allocation.ANSWER_S", 2.0)
    slurm_says("sleep 60")
    allocation = Allocation("7", 2, True, True, time.time() + LONG_BEFORE, node_list="node[1-2]")
    began = time.monotonic()
    assert [why_terminated(allocation) for _ in range(4)] == [None] * 4
    assert time.monotonic() - began < 7
    assert capsys.readouterr().out.count("did not respond") == 1


def test_a_question_that_was_killed_is_asked_again_at_once(slurm_says, tmp_path):
    """scancel sends its TERM to a squeue of ours, too; the reason for it is still to be had."""
    slurm_says(f"[ -e {tmp_path}/once ] || {{ : > {tmp_path}/once; kill $$; }}; echo 'CANCELLED|0||'")
    allocation = Allocation("7", 1, True, True, time.time() + LONG_BEFORE)
    assert why_terminated(allocation) is None  # nobody said anything
    assert why_terminated(allocation) is Cause.CANCELLED


def test_an_allocation_is_what_slurm_gave_and_not_what_was_asked():
    batch = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_END_TIME": "1800000000"}
    assert find_allocation(batch, 2) == Allocation("7", 3, True, True, 1800000000.0)
    task = find_allocation(batch | {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"}, 2)
    assert (task.job_id, task.task) == ("5_2", 2)  # its raw id 7 may be the array's, and mean all of its tasks
    assert not find_allocation(batch | {"TOOLKIT_IN_ALLOCATION": "1"}, 2).is_batch
    here = find_allocation(batch | {"TOOLKIT_LOCAL": "1"}, 2)
    assert (here.in_slurm, here.nodes, here.left_s()) == (False, 2, float("inf"))
    assert here.next_start(by_requeue=True) is None


HETEROGENEOUS = {
    "SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1", "SLURM_HET_SIZE": "2", "SLURM_JOB_NUM_NODES": "1",
    "SLURM_JOB_NODELIST": "node3", "SLURM_JOB_NUM_NODES_HET_GROUP_0": "1", "SLURM_JOB_NUM_NODES_HET_GROUP_1": "2",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "node3", "SLURM_JOB_NODELIST_HET_GROUP_1": "node[1-2]",
}  # fmt: skip


def test_the_components_of_a_heterogeneous_job_are_one_allocation():
    allocation = find_allocation(HETEROGENEOUS, 1)
    assert (allocation.nodes, allocation.node_list) == (3, "node3,node[1-2]")
    check_components(Shape((Component(1, 1), Component(2, 4))), allocation)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (Shape.of(1, 1), r"node counts 1, but job 7 has components with 1, 2\. Fix: `scancel"),
        (Shape((Component(2, 1), Component(1, 1))), "node counts 2, 1, but job 7 has components with 1, 2"),
    ],
)
def test_components_that_the_run_does_not_have_are_refused(asked, message):
    with pytest.raises(ToolkitError, match=message):
        check_components(asked, find_allocation(HETEROGENEOUS, 1))


def test_of_several_components_slurm_is_asked_for_the_first(slurm_says):
    slurm_says("echo 2026-11-21T03:00:00; echo 2026-11-21T03:00:00")
    allocation = find_allocation(HETEROGENEOUS, 1)
    assert allocation.refresh_end()
    assert allocation.ends_at > 1


def test_memory_of_components_is_not_srun_s_to_read():
    environ = {"SLURM_MEM_PER_CPU": "1", "SLURM_MEM_PER_NODE_HET_GROUP_1": "1", "SLURM_JOB_ID": "7"}
    drop_memory(environ)
    assert environ == {"SLURM_JOB_ID": "7"}


def test_slurm_is_asked_for_an_allocation_on_another_cluster_by_its_name(slurm_says, tmp_path):
    salloc = {"SLURM_JOB_ID": "7", "SLURM_WORKING_CLUSTER": "far:10.0.0.2:6817:9728:109", "TOOLKIT_IN_ALLOCATION": "1"}
    slurm_says('[ "$1" = --clusters=far ] && echo 2026-11-21T02:48:01')
    assert find_allocation(salloc, 1).ends_at > 0
    assert find_allocation({**salloc, "SLURMD_NODENAME": "n1"}, 1).ends_at == 0


def test_a_follow_up_script_names_no_cluster_since_it_is_submitted_there(run_directory):
    script = run_directory.script(0)
    script.write_text("#!/bin/bash\n#SBATCH --clusters=far\n#SBATCH --nodes=1\nexport TOOLKIT_START=0\n")
    following = continuation._script_of(run_directory, script, 1)
    assert following.read_text() == "#!/bin/bash\n#SBATCH --nodes=1\nexport TOOLKIT_START=1\n"


def test_a_follow_up_job_takes_the_place_of_a_requeue_that_nobody_can_ask_for(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    batch = Allocation("7", 1, True, True, 0.0)
    assert batch.next_start(by_requeue=True) is None
    (tmp_path / "sbatch").touch(mode=0o755)
    assert batch.next_start(by_requeue=True) is Next.FOLLOW_UP
    (tmp_path / "scontrol").touch(mode=0o755)
    assert batch.next_start(by_requeue=True) is Next.REQUEUE
    assert batch.next_start(by_requeue=False) is Next.FOLLOW_UP  # the site's users may not
    assert Allocation("7", 1, True, False, 0.0).next_start(by_requeue=True) is None  # salloc's shell is no script


@pytest.mark.parametrize(
    ("cause", "can_requeue", "follows"),
    [
        (Cause.WALLTIME, True, Next.FOLLOW_UP),
        (Cause.PREEMPTED, True, Next.AWAIT),
        (Cause.PREEMPTED, False, Next.FOLLOW_UP),
    ],
)
def test_a_preempted_job_that_slurm_requeues_gets_no_follow_up_job_beside_it(
    supervisor, tmp_path, monkeypatch, cause, can_requeue, follows
):
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "sbatch").touch(mode=0o755)  # and no scontrol
    one = supervisor()
    budgets = {"crashes": 0, "walltimes": -1, "preemptions": -1}
    one.job = {
        "scheduler": {"can_requeue": can_requeue},
        "job": {"requeue": True, "entry": "a.py:main"},
        "restart": budgets,
    }
    assert one._decision(AttemptEnd(cause, "")).next is follows


def ended(run, cause, step, *, start=0, rank=None, reason=""):
    """One more attempt of the run, which has ended so."""
    attempt = claim_attempt(run)
    write_json(attempt.start_file, {"start": start, "job_id": "7", "nodes": 1, "ranks": 1, "time": utc_now()})
    write_json(
        attempt.exit_file,
        {"cause": cause, "next": "requeue", "final": False, "state": "timeout", "exit_code": 1 if cause == "crashed" else 140, "reason": reason, "decision": "",
         "rank": rank, "host": None, "fix": "", "last_lines": [], "step": step, "time": utc_now()},
    )  # fmt: skip
    return attempt


UNLIMITED = {"crashes": -1, "walltimes": -1, "preemptions": -1}


@pytest.mark.parametrize(
    ("walltimes", "again", "reason", "has_fix"),
    [
        (-1, Next.REQUEUE, "1 walltime without progress", True),
        (0, Next.REQUEUE, "restart.walltimes = 0 is spent", False),  # as a batch script
        (-1, None, "a requeue is not allowed (job.requeue, or no Slurm)", False),
    ],
)
def test_progress_is_asked_for_only_if_another_start_would_follow(run_directory, walltimes, again, reason, has_fix):
    restart = {**UNLIMITED, "walltimes": walltimes, "blind_requeues": 1}
    end = AttemptEnd(Cause.WALLTIME, "")
    decision = judge(run_directory, restart, 0, end, Cause.WALLTIME, again, tells_steps=False)
    assert (decision.next, decision.reason, bool(decision.fix)) == (Next.END, reason, has_fix)


@pytest.mark.parametrize(("argv", "follows"), [(["--resume"], Next.REQUEUE), ([], Next.END)])
def test_rewritten_files_are_progress_of_a_script_with_arguments_to_continue(run_directory, argv, follows):
    restart = {**UNLIMITED, "blind_requeues": 1, "argv": argv}
    ended(run_directory, "walltime", None)
    end = AttemptEnd(Cause.WALLTIME, "", changed_files=True, new_files=False)
    decision = judge(run_directory, restart, 0, end, Cause.WALLTIME, Next.REQUEUE, tells_steps=False)
    assert decision.next is follows


@pytest.mark.parametrize(
    ("earlier", "then", "ends"),
    [
        ([None], None, True), ([7], 7, True), ([9], 7, True), ([7], None, True), ([9, 7], 8, True),
        ([7], 9, False), ([None], 7, False), ([None, 0], 1, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("cause", [Cause.WALLTIME, Cause.CRASHED, Cause.STALLED])
def test_a_failure_that_comes_again_before_a_new_step_ends_the_run(run_directory, cause, earlier, then, ends):
    """Also one that comes sooner: a run whose saves all fail begins at the same step again and again."""
    for step in earlier:
        ended(run_directory, cause.value, step, rank=1, reason="ValueError")
    end = AttemptEnd(cause, "ValueError", rank=1, step=then)
    decision = judge(run_directory, UNLIMITED, 0, end, cause, Next.REQUEUE, tells_steps=True)
    assert (decision.next is Next.END) is ends


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (("crashed", 1, "ValueError"), AttemptEnd(Cause.CRASHED, "ValueError", rank=1)),  # perhaps at another line
        (("launch_failed", None, ""), AttemptEnd(Cause.LAUNCH_FAILED, "")),  # that is one only at its third time
        (("crashed", 1, "ValueError"), AttemptEnd(Cause.CRASHED, "KeyError", rank=1)),
        (("crashed", 1, "ValueError"), AttemptEnd(Cause.CRASHED, "ValueError", rank=2)),
        (("stalled", None, ""), AttemptEnd(Cause.WALLTIME, "")),
        (("preempted", None, ""), AttemptEnd(Cause.PREEMPTED, "")),  # not of the program's making
    ],
)
def test_an_end_of_another_kind_is_no_repetition(run_directory, before, now):
    cause, rank, reason = before
    ended(run_directory, cause, None, rank=rank, reason=reason)
    decision = judge(run_directory, UNLIMITED, 0, now, now.cause, Next.REQUEUE, tells_steps=False)
    assert decision.next is not Next.END


def test_steps_before_a_resume_count_no_more(run_directory):
    """It may have gone back to an older checkpoint on purpose."""
    ended(run_directory, "walltime", 90)
    write_json(run_directory.resumed(1), {"job": {}})
    ended(run_directory, "walltime", 50, start=1)
    end = AttemptEnd(Cause.WALLTIME, "", step=60)
    assert judge(run_directory, UNLIMITED, 1, end, end.cause, Next.REQUEUE, tells_steps=True).next is Next.REQUEUE


def test_the_last_step_is_the_metrics_where_they_are_ahead_of_the_heartbeat(run_directory, capsys):
    """A heartbeat comes once a second: a loop of fast steps would seem to crash at another one each time."""
    attempt = claim_attempt(run_directory)
    assert last_step(attempt) is None
    write_json(attempt.heartbeat, {"step": 7})
    assert last_step(attempt) == 7
    record = TrainRecord(9, 20, 1.0, "0x1p0", 0.1, 1.0, 9, 9, 0.1, 1.0, utc_now(), attempt.number, 1)
    with TrainLog(run_directory.metrics / "train.jsonl") as log:
        log.write(record)
    assert last_step(attempt) == 9
    attempt.heartbeat.write_text("")  # the node was lost before it was on the disk
    assert last_step(attempt) == 9
    assert "cannot read the last heartbeat of attempt 0: " in capsys.readouterr().out
    write_json(attempt.heartbeat, {"step": 12})
    assert last_step(attempt) == 12
    assert last_step(claim_attempt(run_directory)) is None  # the metrics are of the attempt before


def test_budgets_outlive_a_requeue_and_a_follow_up_and_a_resume_refills_them(run_directory):
    for start in range(4):
        ended(run_directory, "walltime", None, start=start)
    (run_directory.path / "resumed-003.json").write_text("{}")
    assert [len(earlier_ends(run_directory, start)) for start in range(4)] == [1, 2, 3, 1]


def test_a_process_that_is_gone_has_no_start(run_directory):
    assert process_start_ticks(os.getpid()) > 0
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    with pytest.raises(ProcessLookupError):  # it has ended, and nobody has read its code
        process_start_ticks(child)
    os.waitpid(child, 0)
    with pytest.raises(ProcessLookupError):
        process_start_ticks(child)


@pytest.mark.parametrize(
    ("kind", "in_slurm", "chosen"),
    [("auto", True, "srun"), ("mpirun", True, "mpirun"), ("local", False, "local"), ("srun", True, "srun")],
)
def test_the_sites_launcher_is_taken(kind, in_slurm, chosen):
    allocation = Allocation("7", 1, in_slurm, in_slurm, 0.0)
    assert choose_launcher({"job": {}, "launcher": {"kind": kind}}, allocation) == chosen


def test_without_slurm_and_mpirun_the_ranks_are_started_one_by_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    here = Allocation("local-1", 1, False, False, 0.0)
    assert choose_launcher({"job": {}, "launcher": {"kind": "srun"}}, here) == "local"
    assert "without MPI" in capsys.readouterr().out


def test_the_ranks_environment_is_the_jobs_word_over_the_sites(run_directory, local_job):
    job = local_job(["true"])
    job["launcher"]["libmpi"] = "/opt/libmpi.so"
    job["network"]["vars"] = {"NCCL_DEBUG": "WARN", "FROM_SITE": "1"}
    job["env"]["vars"] = {"NCCL_DEBUG": "INFO"}
    environment = rank_environment(
        {"PATH": "/bin", "TOOLKIT_START": "0", "TOOLKIT_LAST_PROGRESS": "of another run"}, job, run_directory, claim_attempt(run_directory),
        start=0, shape=Shape.of(2, 3, 4), launcher="srun", ends_at=1800000000.0,
    )  # fmt: skip
    assert environment.keys().isdisjoint(("TOOLKIT_START", "TOOLKIT_LAST_PROGRESS"))
    assert (environment["NCCL_DEBUG"], environment["FROM_SITE"]) == ("INFO", "1")
    assert environment["MPI4PY_LIBMPI"] == "/opt/libmpi.so"
    assert (environment["TOOLKIT_WORLD_SIZE"], environment["TOOLKIT_ATTEMPT"]) == ("6", "0")
    assert environment["TOOLKIT_ENDS_AT"] == "1800000000"


def test_open_mpi_uses_the_interface_of_the_site_unless_another_is_set(run_directory, local_job, tmp_path):
    attempt = claim_attempt(run_directory)

    def interfaces(base=(), interface="ib0", **variables):
        job = local_job(["true"])
        job["network"] = {"interface": interface, "vars": variables}
        environment = rank_environment(
            {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path), **dict(base)}, job, run_directory, attempt,
            start=0, shape=Shape.of(2, 3), launcher="srun", ends_at=0.0,
        )  # fmt: skip
        return {name: value for name, value in environment.items() if "_if_" in name}

    names = ("OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_oob_tcp_if_include", "PRTE_MCA_prte_if_include")
    assert interfaces() == dict.fromkeys(names, "ib0") and interfaces(interface="") == {}
    exclude = {"OMPI_MCA_btl_tcp_if_exclude": "lo"}
    assert interfaces(**exclude) == {**dict.fromkeys(names[1:], "ib0"), **exclude}
    for folder, name in ((".openmpi", "mca-params.conf"), ("etc", "openmpi-mca-params.conf")):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / "mpirun").touch(0o755)
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text("# comment\n oob_tcp_if_exclude = docker0\n")
        assert interfaces() == {names[0]: "ib0", names[2]: "ib0"}
        (tmp_path / folder / name).unlink()


def test_keys_of_the_store_begin_with_a_value_of_the_attempt(run_directory, local_job):
    def prefix(attempt):
        environment = rank_environment(
            {"PATH": "/bin"}, local_job(["true"]), run_directory, attempt,
            start=0, shape=Shape.of(1, 2), launcher="local", ends_at=0.0,
        )  # fmt: skip
        return environment.get("TOOLKIT_STORE_PREFIX")

    first, second = claim_attempt(run_directory), claim_attempt(run_directory)
    secret = run_directory.secret.read_text().strip()
    assert len(prefix(first)) == 32 and prefix(first) == prefix(first) != prefix(second)
    assert prefix(first) not in secret and secret not in prefix(first)
    run_directory.secret.unlink()  # a run of an older version
    assert prefix(first) is None


def test_the_variables_of_allocators_yield_to_the_users(run_directory, local_job, capsys):
    job = local_job(["true"])
    job["env"] |= {"malloc": "trimmed", "expandable_segments": True, "vars": {"MALLOC_ARENA_MAX": "2"}}

    def of(base):
        environment = rank_environment(
            {"PATH": "/bin", **base}, job, run_directory, claim_attempt(run_directory),
            start=0, shape=Shape.of(1, 1), launcher="local", ends_at=0.0,
        )  # fmt: skip
        return environment, capsys.readouterr().out

    environment, said = of({})
    assert (environment["MALLOC_ARENA_MAX"], environment["MALLOC_TRIM_THRESHOLD_"]) == ("2", "65536")
    assert environment["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert "MALLOC_ARENA_MAX=2 of the environment overrides 1 of [env]" in said
    environment, said = of({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"})
    assert "PYTORCH_ALLOC_CONF" not in environment and "expandable_segments has no effect" in said
    job["env"] = {}
    assert "MALLOC_TRIM_THRESHOLD_" not in of({})[0]


@pytest.mark.parametrize(
    ("entry", "foreign"), [("a.py:main", False), ("pkg.mod:main", False), ("a.py", True), (["./a.out", "x:y"], True)]
)
def test_only_functions_have_our_handlers(entry, foreign):
    assert is_unmanaged(entry) is foreign
