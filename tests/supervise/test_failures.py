"""Which of several failures is the first cause, and lines that are safe to quote."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit import supervise
from toolkit.rundir.claims import claim_attempt
from toolkit.rundir.files import read_json, write_json
from toolkit.rundir.states import Cause
from toolkit.supervise.failures import first_failure, silent_end
from toolkit.supervise.symptoms import symptom_named
from toolkit.terminal.talk import clean


@pytest.fixture
def attempt(run_directory):
    return claim_attempt(run_directory)


def fail(attempt, rank, reason, second, kind="exception", code=1):
    write_json(
        attempt.error_file(rank),
        {"rank": rank, "host": f"n{rank}", "kind": kind, "reason": reason, "exit_code": code,
         "time": f"2026-11-20T00:00:{second:02}.000Z"},
    )  # fmt: skip


def test_the_earliest_failure_is_the_cause(attempt):
    fail(attempt, 0, "ValueError: b", 9)
    fail(attempt, 1, "ValueError: a", 5)
    assert (first_failure(attempt).rank, first_failure(attempt).host) == (1, "n1")


def test_the_rank_whose_save_failed_is_named_not_the_first_that_received_its_error(attempt):
    for rank, second in ((0, 9), (1, 5)):
        fail(
            attempt, rank, "checkpoint of step 8 was not saved: rank 0: No space left on device", second, kind="failed"
        )
    assert first_failure(attempt).rank == 0


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (
            ["mean 0.2", "Error: no such column: weight", "Execution halted"],
            "exit code 3: Error: no such column: weight",
        ),
        (
            ["Error in f(x) : ", "  object 'y' not found", "Calls: f"],
            "exit code 3: Error in f(x) : object 'y' not found",
        ),
        (["ERROR: LoadError: x not defined", "Stacktrace:"], "exit code 3: ERROR: LoadError: x not defined"),
        (["12:00:01 a.out: fatal: no mesh"], "exit code 3: 12:00:01 a.out: fatal: no mesh"),
        (["step 3", "error: 0.25", "train error 0.3", "0 errors"], "exit code 3"),
        (["srun: error: node1: task 0: Exited with exit code 3"], "exit code 3"),
        (["1: " * 200 + "x"], "exit code 3"),  # the search is not exponential
    ],
)
def test_the_reason_of_a_program_quotes_the_line_that_names_its_error(attempt, lines, why):
    fail(attempt, 0, "exit code 3", 1, kind="exit", code=3)
    attempt.log_file(0).write_text("\n".join([*lines, ""]))
    end = first_failure(attempt)
    assert end.reason == why
    assert why == "exit code 3" or end.evidence[0] == ("logs/rank-0.log", why.removeprefix("exit code 3: "))


def test_a_message_that_a_rank_exited_with_is_quoted_once(attempt):
    fail(attempt, 0, "exit code 1: error: no data", 1, kind="exit")
    attempt.log_file(0).write_text("error: no data\n")
    end = first_failure(attempt)
    assert (end.reason, end.symptom) == ("exit code 1: error: no data", "exit_code")


def test_the_sender_of_a_signal_is_unknown(attempt):
    fail(attempt, 0, "killed by SIGKILL (out of memory?)", 1, kind="signal", code=137)
    known = symptom_named(first_failure(attempt).symptom)
    assert known.word == "killed" and "unknown" in known.means and "did not send" not in known.means


FRAMES = ["Traceback (most recent call last):", '  File "/job/ddp2.py", line 15, in main', "    x = batch['labels']"]
LABELLED = [f"[rank1]: {line}" for line in (*FRAMES, "KeyError: 'labels'")]
LOST = [
    f"[rank{rank}]: {line}" for rank in (0, 2) for line in (*FRAMES, "RuntimeError: [gloo] Connection closed by peer")
]
KILLED = "srun: error: node1: task 1: Killed"
WATCHDOG = "[rank0]:[E1128] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5)"


@pytest.mark.parametrize(
    ("lines", "code", "why"),
    [
        ([*LOST, *LABELLED, *LOST], 1, "rank 1: KeyError: 'labels' at ddp2.py:15"),
        ([*LABELLED, *LOST * 9], 1, "rank 1: KeyError: 'labels' at ddp2.py:15"),
        ([*LABELLED, WATCHDOG, *LOST], 1, "rank 1: KeyError: 'labels' at ddp2.py:15"),
        ([*LOST, KILLED], 137, f"rank 1: {KILLED}"),
        (["step 3", "error: no data"], 3, "error: no data"),
    ],
)
def test_a_script_is_not_a_rank_and_the_rank_that_failed_first_is_read_from_its_log(attempt, lines, code, why):
    attempt.run.batch_script.write_text("#!/bin/bash\nsrun python3 ddp2.py\n")
    fail(attempt, 0, f"exit code {code}", 1, kind="exit", code=code)
    attempt.log_file(0).write_text("\n".join([*lines, ""]))
    end = first_failure(attempt)
    assert (end.reason, end.rank, end.host) == (f"the script: exit code {code}: {why}", None, None)
    assert (end.symptom, end.exit_code) == ("exit_code", code)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("exception", "RuntimeError: [gloo] Connection closed by peer"),
        ("exception", "DistStoreError: Socket Timeout"),
        ("exception", "BrokenPipeError: [Errno 32] Broken pipe"),
        ("signal", "killed by SIGTERM"),
    ],
)
def test_a_consequence_is_not_the_cause_even_by_an_earlier_clock(attempt, kind, reason):
    fail(attempt, 0, reason, 1, kind=kind)
    fail(attempt, 1, "killed by SIGKILL (out of memory?)", 5, kind="signal", code=137)
    assert (first_failure(attempt).rank, first_failure(attempt).exit_code) == (1, 137)


def test_the_reason_says_where_the_users_code_was(attempt):
    fail(attempt, 0, "KeyError: 'lr'", 1)
    frames = (
        "/home/ada/train.py",
        "/home/ada/model.py",
        supervise.__file__,
        "/venv/lib/python3.12/site-packages/torch/nn.py",
    )
    lines = [
        line for number, name in enumerate(frames, 7) for line in (f'  File "{name}", line {number}, in f', "    f()")
    ]
    file = attempt.error_file(0)
    for told, said in ((lines, " at model.py:8"), (lines[4:], ""), ([], "")):
        write_json(
            file, {**read_json(file), "traceback": ["Traceback (most recent call last):", *told, "KeyError: 'lr'"]}
        )
        assert first_failure(attempt).reason == f"KeyError: 'lr'{said}"


def test_consequences_alone_are_still_told(attempt):
    fail(attempt, 0, "RuntimeError: Connection reset", 1)
    assert first_failure(attempt).reason == "RuntimeError: Connection reset"


def test_a_rank_that_was_killed_with_its_guard_is_the_one_that_the_others_met(attempt):
    for rank in range(2):
        write_json(attempt.rank_file(rank), {"rank": rank, "host": f"n{rank}", "pid": 1, "time": ""})
    fail(attempt, 0, "RuntimeError: [gloo] Connection closed by peer", 3)
    end = first_failure(attempt)
    assert (end.rank, end.host, end.exit_code) == (1, "n1", 137)
    assert end.reason == "rank 1 was killed without reporting an error; rank 0 lost its connection to it"


def test_no_error_is_no_failure_and_a_half_written_one_neither(attempt):
    (attempt.errors / ".rank-00001.json.17.tmp").write_text("{")
    assert first_failure(attempt) is None


def test_ranks_that_vanish_silently_are_named(attempt):
    for rank in range(12):
        write_json(attempt.rank_file(rank), {"rank": rank, "host": f"n{rank}", "pid": 1, "time": ""})
    attempt.done_marker(0).write_text("done\n")
    end = silent_end(attempt, 12, -9)
    assert (end.rank, end.host, end.exit_code) == (None, None, 137)  # eleven are missing: nobody is the culprit
    assert "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 3 more exited without reporting an error" in end.reason


def test_a_rank_that_srun_names_is_the_culprit(attempt):
    for rank in range(3):
        write_json(attempt.rank_file(rank), {"rank": rank, "host": f"n{rank}", "pid": 1, "time": ""})
    (attempt.logs / "launcher.log").write_text("srun: error: n2: task 2: Killed\n")
    end = silent_end(attempt, 3, 137)
    assert (end.rank, end.host) == (2, "n2")


def test_a_rank_file_that_a_lost_node_left_empty_hides_no_failure(attempt, capsys):
    """Ranks do not wait for it to be on the disk; its first bytes may never come there."""
    begin(attempt, 2)
    attempt.done_marker(0).write_text("done\n")
    attempt.rank_file(1).write_bytes(b"")
    end = silent_end(attempt, 2, 1)
    assert (end.cause, end.rank, end.host) == (Cause.CRASHED, 1, None)
    attempt.done_marker(0).unlink()
    fail(attempt, 0, CLOSED, 3)
    assert (first_failure(attempt).rank, first_failure(attempt).host) == (1, None)
    fail(attempt, 0, TIMED_OUT, 3)
    assert (first_failure(attempt).rank, first_failure(attempt).host) == (1, None)
    assert "the host of rank 1 is unknown" in capsys.readouterr().out


@given(st.text())
def test_a_cleaned_line_holds_no_control_character(text):
    left = clean(text)
    assert not [letter for letter in left if unicodedata.category(letter) == "Cc" and letter not in "\t\n"]


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\x1b[1;31mred\x1b[0m", "red"), ("\x1b]0;title\x07text", "text"), ("\x1b]8;;http://x\x1b\\link", "link"),
        ("a\x08b\x00c", "abc"), ("tab\tkept", "tab\tkept"), ("ünï → ok", "ünï → ok"), ("\x9b31mred", "red"),
    ],
)  # fmt: skip
def test_terminal_escapes_are_removed_whole(raw, shown):
    assert clean(raw) == shown


TIMED_OUT = "RuntimeError: [gloo] Timed out waiting 6000ms for recv operation to complete"
CLOSED = "RuntimeError: [gloo] Connection closed by peer"


def begin(attempt, ranks):
    write_json(
        attempt.start_file,
        {"start": 0, "job_id": "7", "host": "n0", "launcher": "srun", "nodes": 1, "ranks": ranks, "time": ""},
    )
    for rank in range(ranks):
        write_json(attempt.rank_file(rank), {"rank": rank, "host": f"n{rank}", "pid": 1, "time": ""})


@pytest.mark.parametrize("late", [None, 5])
def test_the_rank_that_did_not_join_is_named_when_the_others_time_out(attempt, late):
    """It left no error at all, or came later than the others' patience and lost their connection to it."""
    begin(attempt, 3)
    fail(attempt, 0, TIMED_OUT, 1)
    fail(attempt, 2, TIMED_OUT, 1)
    if late is not None:
        fail(attempt, 1, CLOSED, late)
    attempt.log_file(1).write_text("reading a slow disk\n")
    end = first_failure(attempt)
    assert (end.symptom, end.rank, end.host) == ("collective_timeout", 1, "n1")
    assert "rank 1 did not join" in end.reason and "ranks 0, 2 waited" in end.reason
    assert end.last_lines == ["reading a slow disk"]
    assert end.evidence == [("errors/rank-00000.json", TIMED_OUT)]


def calls(line, code, function, error):
    """A traceback of a rank in a collective of torch."""
    torch = '  File "/v/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", line 2806, in '
    return ["Traceback (most recent call last):", f'  File "/job/ddp.py", line {line}, in main', f"    {code}",
            f"{torch}{function}", "    work.wait()", error]  # fmt: skip


REDUCE, BROADCAST = (21, "dist.all_reduce(x)", "all_reduce"), (25, "dist.broadcast(x, 0)", "broadcast")


@pytest.mark.parametrize(
    ("of_0", "of_1", "error", "where"),
    [
        (BROADCAST, REDUCE, TIMED_OUT, ": ranks 0, 2 at ddp.py:25: dist.broadcast(x, 0); rank 1 at ddp.py:21: dist.all_reduce(x)"),
        (BROADCAST, REDUCE, CLOSED, ": ranks 0, 2 at ddp.py:25: dist.broadcast(x, 0); rank 1 at ddp.py:21: dist.all_reduce(x)"),
        (REDUCE, REDUCE, TIMED_OUT, ": ranks 0, 1, 2 at ddp.py:21: dist.all_reduce(x)"),  # of different sizes
        (REDUCE, (29, *REDUCE[1:]), CLOSED, ""),  # the same collective in another branch, but too late
        (BROADCAST, (21, "dist.recv(x, 0)", "recv"), CLOSED, ""),
    ],
)  # fmt: skip
def test_ranks_that_wait_in_different_collectives_are_no_late_ranks(attempt, of_0, of_1, error, where):
    begin(attempt, 3)
    for rank, call, reason, second in ((0, of_0, TIMED_OUT, 1), (1, of_1, error, 5), (2, of_0, TIMED_OUT, 1)):
        fail(attempt, rank, reason, second)
        path = attempt.error_file(rank)
        write_json(path, {**read_json(path), "traceback": calls(*call, reason)})
    end = first_failure(attempt)
    if where:
        assert (end.symptom, end.rank) == ("collective_mismatch", None)
        assert end.reason.partition(" or types")[2] == where
    else:
        assert (end.symptom, end.rank) == ("collective_timeout", 1)


@pytest.mark.parametrize("is_in_its_exit", [True, False])
def test_a_rank_that_finished_before_the_others_is_named_as_such(attempt, is_in_its_exit):
    begin(attempt, 3)
    for rank in (0, 2):
        fail(attempt, rank, TIMED_OUT, 1)
        path = attempt.error_file(rank)
        write_json(path, {**read_json(path), "traceback": calls(30, "dist.all_reduce(x)", "all_reduce", TIMED_OUT)})
    if is_in_its_exit:
        frame = '  File "/v/toolkit/rank/entry.py", line 137 in _leave_well'
        attempt.stack_file(1).write_text(f"Thread 0x1 (most recent call first):\n{frame}\n")
    else:
        attempt.done_marker(1).write_text("done\n")
    end = first_failure(attempt)
    assert (end.symptom, end.rank) == ("collective_timeout", 1)
    assert end.reason == (
        "rank 1 has already finished (exit 0); ranks 0, 2 wait for it at ddp.py:30: dist.all_reduce(x)"
    )


LATE = "barrier number 3 did not finish in 60.0 s; rank 1 did not join (alive, last in barrier number 2); joined: 0, 2"
DEAD = "barrier number 3 failed after 0.1 s; rank 1 did not join (no heartbeat, last in barrier number 2); joined: 0, 2"
TOO_LATE = "barrier number 3 failed after 0.0 s; 0, 2 joined and timed out; joined: 0, 1, 2"


def in_old_words(message: str) -> str:
    """As earlier releases wrote it: a run that was upgraded in place has errors in both forms."""
    message = message.replace("did not join", "did not come").replace(
        "joined and timed out", "came and gave up waiting"
    )
    return message.replace("no heartbeat", "no sign of life").replace("joined:", "there:")


@pytest.mark.parametrize("worded", [str, in_old_words])
@pytest.mark.parametrize(("words", "symptom"), [(LATE, "collective_timeout"), (DEAD, "silent_end")])
def test_who_names_the_rank_that_did_not_join_is_not_to_blame(attempt, words, symptom, worded):
    begin(attempt, 3)
    for rank in (0, 2):
        fail(attempt, rank, worded(words), 1, kind="failed")
    assert (first_failure(attempt).symptom, first_failure(attempt).rank) == (symptom, 1)
    if words is LATE:
        fail(attempt, 1, worded(TOO_LATE), 5, kind="failed")
    else:
        fail(attempt, 1, "killed by SIGKILL", 5, kind="signal", code=137)
        symptom = "killed"
    assert (first_failure(attempt).symptom, first_failure(attempt).rank) == (symptom, 1)


def test_a_neighbour_that_hears_of_a_time_out_is_not_the_late_one(attempt):
    """Rank 2 waited, too: the first that gave up closed its connections a moment before its own time was over."""
    begin(attempt, 3)
    fail(attempt, 0, TIMED_OUT, 1)
    fail(attempt, 2, CLOSED, 1)
    assert first_failure(attempt).rank == 1
    fail(attempt, 1, CLOSED, 5)
    assert first_failure(attempt).rank == 1


def test_a_time_out_that_follows_from_a_crash_is_not_the_cause(attempt):
    begin(attempt, 2)
    fail(attempt, 0, TIMED_OUT, 1)
    fail(attempt, 1, "ValueError: labels out of range", 5)
    assert (first_failure(attempt).rank, first_failure(attempt).symptom) == (1, "exception")


@pytest.mark.parametrize(("second", "culprit"), [(32, 1), (31, 1), (1, 2)])
def test_a_crash_beside_a_time_out_is_its_consequence_and_one_long_before_it_the_cause(attempt, second, culprit):
    begin(attempt, 3)
    fail(attempt, 0, TIMED_OUT, 31)
    fail(attempt, 2, "killed by SIGSEGV", second, kind="signal", code=139)
    end = first_failure(attempt)
    assert (end.rank, end.symptom) == (culprit, "collective_timeout" if culprit == 1 else "native_crash")


def test_what_the_launcher_knows_explains_ranks_that_only_saw_others_vanish(attempt):
    begin(attempt, 2)
    fail(attempt, 0, CLOSED, 1)
    line = "slurmstepd: error: Detected 1 oom_kill event in StepId=16.0. Some of the step tasks have been OOM Killed."
    (attempt.logs / "launcher.log").write_text(line + "\n")
    end = first_failure(attempt)
    assert (end.symptom, end.rank) == ("out_of_memory", None)
    assert end.evidence == [("logs/launcher.log", line)]
    assert "mem_gb_per_node" in end.fix


EXCEEDED = "slurmstepd-n2: error: StepId=16.0 exceeded memory limit (3347798528 > 3221225472), being killed"


@pytest.mark.parametrize(
    "lines", [[EXCEEDED, "srun: error: n0: tasks 0-1: Killed"], ["srun: error: n2: tasks 2-3: Out Of Memory"]]
)
@pytest.mark.parametrize("met", [None, (0, "killed by SIGKILL (out of memory?)", "signal"), (1, CLOSED, "exception")])
def test_after_an_out_of_memory_kill_the_node_is_the_one_that_slurm_names(attempt, met, lines):
    """Slurm kills the ranks of all nodes, so the first one that ended is not to blame; the largest on that node is."""
    begin(attempt, 4)
    for rank in range(4):
        write_json(attempt.rank_file(rank), {"rank": rank, "host": f"n{rank // 2 * 2}", "pid": 1, "time": ""})
    used = {
        rank: {
            "time_s": 1.0,
            "host": f"n{rank // 2 * 2}",
            "rank": rank,
            "pool": "host",
            "free_bytes": 0,
            "used_bytes": 9e9 if rank in (0, 3) else 1e9,
        }
        for rank in range(4)
    }
    for first in (0, 2):
        memory = [used[first], used[first + 1]]
        write_json(
            attempt.node_state(first), {"host": f"n{first}", "time_s": 1.0, "memory": memory, "gpus": [], "links": []}
        )
    if met is not None:
        fail(attempt, met[0], met[1], 1, kind=met[2], code=137)
    (attempt.logs / "launcher.log").write_text("\n".join(lines) + "\n")
    end = first_failure(attempt) or silent_end(attempt, 4, 137)
    assert (end.symptom, end.host, end.rank) == ("out_of_memory", "n2", 3)
    assert end.reason.endswith("on node n2")


@pytest.mark.parametrize("met", [None, "killed by SIGTERM", CLOSED])
def test_a_launch_that_failed_is_one_whether_or_not_another_rank_had_begun(attempt, met):
    write_json(attempt.rank_file(0), {"rank": 0, "host": "n0", "pid": 1, "time": ""})
    if met is not None:
        fail(attempt, 0, met, 1, kind="exception" if met is CLOSED else "signal")
    line = "srun: error: task 1 launch failed: Unspecified error"
    (attempt.logs / "launcher.log").write_text(f"{line}\nsrun: Job step aborted\nsrun: error: n0: task 0: Killed\n")
    end = first_failure(attempt) or silent_end(attempt, 2, 137)
    assert (end.cause, end.symptom, end.rank, end.host) == (Cause.LAUNCH_FAILED, "launch_failed", None, None)
    assert end.evidence == [("logs/launcher.log", line)] and end.last_lines[0] == line
    assert not end.cannot_pass


def test_ranks_that_nccl_aborts_are_read_by_what_their_watchdog_logged(attempt):
    """The words are those of torch's ProcessGroupNCCL; no NCCL runs on the machines that these tests know."""
    begin(attempt, 3)
    for rank in range(3):
        fail(attempt, rank, "killed by SIGABRT", 1, kind="signal", code=134)
    waits = "[rank{0}]: [Rank {0}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE)\n"
    told = "[rank1]: [PG ID 0] Received a dump signal due to a collective timeout from rank 0\n"
    for rank, text in ((0, waits.format(0)), (1, told), (2, waits.format(2))):
        attempt.log_file(rank).write_text(text)
    end = first_failure(attempt)
    assert (end.symptom, end.rank) == ("collective_timeout", 1)
    assert "Watchdog caught" in end.evidence[0][1]


def test_an_abort_that_has_nothing_to_do_with_others_is_the_cause(attempt):
    begin(attempt, 2)
    fail(attempt, 0, CLOSED, 1)
    fail(attempt, 1, "killed by SIGABRT", 2, kind="signal", code=134)
    attempt.log_file(1).write_text("free(): invalid pointer\n")
    assert (first_failure(attempt).rank, first_failure(attempt).symptom) == (1, "native_crash")


def test_what_the_machine_failed_at_is_not_laid_to_the_program(attempt):
    fail(attempt, 0, "checkpoint of step 5 was not saved: rank 0: Input/output error", 3, kind="failed")
    end = first_failure(attempt)
    assert (end.cause, end.symptom, end.fix) == (Cause.CRASHED, "failed", "")  # it may pass: restarted


def test_ranks_that_could_write_no_error_ended_on_a_full_disk(attempt, monkeypatch):
    begin(attempt, 1)
    assert silent_end(attempt, 1, 3).symptom == "silent_end"

    def refuse(*_args, **_kept):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("toolkit.rundir.files.write_bytes", refuse)
    end = silent_end(attempt, 1, 3)
    assert (end.symptom, end.exit_code, end.rank) == ("disk_full", 3, 0)
    assert end.reason.endswith("No space left on device, so no rank could record its error") and "free space" in end.fix
    assert not list(attempt.errors.iterdir())


def test_a_library_that_does_not_speak_the_launchers_pmi_is_named_and_not_tried_again(attempt):
    fail(attempt, 0, "exit code 16", 1, kind="exit", code=16)
    attempt.log_file(0).write_text(
        "MPIR_pmi_init(225)..............:\n"
        "check_MPIR_CVAR_PMI_VERSION(167):  Runtime environment uses unsupported PMI version PMIx. Aborting.\n"
    )
    end = first_failure(attempt)
    assert (end.symptom, end.cannot_pass) == ("wrong_pmi", True)
    assert 'launcher_options = ["--mpi=pmi2"] in [job] for MPICH' in end.fix
