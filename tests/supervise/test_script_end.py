"""Steps and commands that failed inside a batch script that exited with 0: from accounting, or from the lines of its log."""

import time

import pytest

from toolkit.rundir.layout import create_run
from toolkit.rundir.states import Cause
from toolkit.supervise import script_end
from toolkit.supervise.allocation import Allocation
from toolkit.supervise.failures import AttemptEnd
from toolkit.supervise.script_end import end_of_script

SEGV = "/r/job.sh: line 5:   356 Segmentation fault      (core dumped) python train.py"
MEMORY = "slurmstepd-node1: error: StepId=7.2 exceeded memory limit (203636736 > 62914560), being killed"
CANCELLED = "slurmstepd-node1: error: *** STEP 7.0 ON node1 CANCELLED AT 2026-11-28T05:08:01 ***"


@pytest.fixture
def attempt(tmp_path):
    attempt = create_run(tmp_path, "job").attempt(0)
    attempt.logs.mkdir(parents=True, exist_ok=True)
    return attempt


def end_with(attempt, log="", *, in_slurm=False, began=0.0, must_succeed=False):
    attempt.log_file(0).write_text(log)
    allocation = Allocation("7" if in_slurm else "local-1", 1, in_slurm=in_slurm, is_batch=in_slurm, ends_at=0.0)
    done = AttemptEnd(Cause.COMPLETED, "every rank is done")
    return end_of_script(done, attempt, allocation, began=began, must_succeed=must_succeed)


def without_prefix(end):
    return end.reason.removeprefix("the script exited with 0").removeprefix(", but ")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (SEGV, "a command failed (139)"),
        ("job.sh: line 9: 12 Killed                  ./solve", "a command failed (137)"),
        ("Bus error (core dumped)", "a command failed (135)"),  # dash
        ("job.sh:5: abort      ./solve", "a command failed (134)"),  # zsh
        ("job.sh:5: segmentation fault (core dumped)  ./solve", "a command failed (139)"),
        ("job.sh: line 3: 977: Memory fault", "a command failed (139)"),  # ksh
        ("srun: error: node1: tasks 0-1: Exited with exit code 7", "a step failed (7)"),
        ("srun: error: node1: task 1: Segmentation fault (core dumped)", "a step failed (139)"),
        ("srun: error: node1: task 0: Out Of Memory", "a step failed (137)"),
        ("srun: error: Unable to create step for job 7: More processors requested than permitted", "a step failed (1)"),
        (MEMORY, "step 2 failed (137)"),
        (CANCELLED + "\n" + MEMORY + "\nsrun: error: node1: task 0: Killed", "step 2 failed (137)"),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=7.batch. Some of the step tasks have been OOM Killed.",
         "a command failed (137)"),
        ("  Process name: [[4,1],1]\n  Exit code:    7", "mpirun failed (7)"),
        ("=   RANK 1 PID 30 RUNNING AT n1\n=   EXIT CODE: 9", "mpirun failed (9)"),
        ("mpirun noticed that process rank 1 with PID 4 on node n1 exited on signal 11 (Segmentation fault).", "mpirun failed (139)"),
        ("  exitcode  : 3 (pid: 77)", "torchrun failed (3)"),
        ("srun: error: node1: task 1: Exited with exit code 7\n" + SEGV, "a step failed (7) and a command failed (139)"),
    ],
)  # fmt: skip
def test_a_failure_in_the_log_is_reported_with_its_line_and_the_fix(attempt, line, said):
    end = end_with(attempt, f"begin\n{line}\nPipeline finished\n")
    assert without_prefix(end) == said
    is_memory = any(part in line for part in ("memory limit", "Out Of Memory", "OOM Killed"))
    assert (end.cause, end.exit_code) == (Cause.COMPLETED, 0)
    assert end.symptom == ("out_of_memory" if is_memory else "step_failed")
    fixes = ("mem_gb_per_node",) if is_memory else ("set -eo pipefail", "steps_must_succeed")
    assert all(part in end.fix for part in fixes)
    ((file, quoted), *_) = end.evidence
    assert file == "logs/rank-0.log" and quoted in line


@pytest.mark.parametrize(
    "log",
    [
        "", "loss 0.3\nAborted!\nKilled 3 idle workers\nepoch 3: killed\nno exit code: 3\n",
        "aborted\nkilled\n12:30:01: killed\nupload.py:33: aborted\nAborted  the old upload\nStep 3: 12 Killed  x\n",
        "job.sh: line 9: 12 Terminated              ./server\n",  # the script or a stop ended it
        "srun: error: node1: task 0: Terminated\nsrun: error: node1: task 0: Exited with exit code 143\n",
        f"{CANCELLED}\nsrun: error: node1: task 0: Exited with exit code 1\nsrun: error: node1: task 0: Killed\n",
    ],
)  # fmt: skip
def test_what_a_stop_or_the_script_itself_ended_is_no_failure(attempt, log):
    end = end_with(attempt, log, must_succeed=True)
    assert (end.cause, end.reason, end.fix) == (Cause.COMPLETED, "the script exited with 0", "")


SCRIPT = """#!/bin/bash
./server & S=$!
python train.py
kill -9 $S; wait $S
timeout -s KILL 2 ./probe
./worker &
wait
$PROGRAM in.txt
python evaluate.py \\
  --fast
"""


@pytest.mark.parametrize(
    ("line", "is_failure"),
    [
        ("job.sh: line 3:   71 Killed                  python train.py", True),
        ("job.sh: line 8:   71 Killed                  $PROGRAM in.txt", True),
        ("job.sh: line 10:   71 Killed                 python evaluate.py --fast", True),
        ("job.sh: line 7:   71 Segmentation fault      ./worker", True),
        ("job.sh: line 4:   71 Killed                  ./server", False),
        ("job.sh: line 5:   71 Killed                  timeout -s KILL 2 ./probe", False),
        ("job.sh: line 7:   71 Killed                  ./worker", False),  # its sender is unknown
        ("Killed", False),  # of a program, because bash names the line
        ("Segmentation fault", False),
    ],
)
def test_processes_that_the_script_kills_are_no_failures(attempt, line, is_failure):
    attempt.run.batch_script.write_text(SCRIPT)
    end = end_with(attempt, f"begin\n{line}\nend\n", must_succeed=True)
    assert (end.cause is Cause.CRASHED) is is_failure


def test_the_fix_fits_a_script(fake_slurm, attempt):
    attempt.run.batch_script.write_text("#!/bin/bash\nset -eo pipefail\nsrun ./solve || echo failed\n")
    fix = end_with(attempt, "srun: error: node1: tasks 0-1: Exited with exit code 7\n").fix
    assert "begin the script" not in fix and "steps_must_succeed" in fix
    for log, answer in ((MEMORY, ""), ("", sacct(("7.0", 1, "OUT_OF_MEMORY|0:125|a")))):
        fake_slurm.respond("sacct", answer)
        end = end_with(attempt, log, in_slurm=True)
        assert end.symptom == "out_of_memory" and "`--mem`" in end.fix and "train." not in end.fix
        assert "bench batch" not in end.fix


def test_accounting_is_not_queried_for_a_script_without_steps(fake_slurm, attempt):
    fake_slurm.respond("sacct", sacct(("7.0", 1, "FAILED|3:0|a")))
    attempt.run.batch_script.write_text("#!/bin/bash\npython train.py\n")
    assert end_with(attempt, in_slurm=True).reason == "the script exited with 0"
    attempt.run.batch_script.write_text("#!/bin/bash\nmpiexec ./solve\n")
    assert without_prefix(end_with(attempt, in_slurm=True)) == "step 0 failed (3)"


def test_a_script_whose_steps_must_succeed_fails_with_the_code_of_the_first(attempt):
    end = end_with(attempt, f"srun: error: node1: task 1: Exited with exit code 7\n{SEGV}\n", must_succeed=True)
    assert (end.cause, end.exit_code, end.symptom) == (Cause.CRASHED, 7, "step_failed")
    assert end.reason.startswith("the script exited with 0, but a step failed (7)")


def test_a_step_that_fails_while_it_saves_is_named_after_a_stop(attempt):
    attempt.log_file(0).write_text("srun: error: node1: task 1: Exited with exit code 1\n")
    allocation = Allocation("local-1", 1, in_slurm=False, is_batch=False, ends_at=0.0)
    stopped = AttemptEnd(Cause.STOPPED, "ended on request (stopped)")
    end = end_of_script(stopped, attempt, allocation, began=0.0, must_succeed=True)
    assert (end.cause, end.symptom) == (Cause.STOPPED, "")
    assert end.reason == "ended on request (stopped); a step failed (1) while it stopped"
    assert "whether it has saved" in end.fix and end.evidence[0][1].endswith("Exited with exit code 1")
    attempt.log_file(0).write_text("saved\n")
    assert end_of_script(stopped, attempt, allocation, began=0.0, must_succeed=True) == stopped


def sacct(*rows):
    return "".join(f"{step}|2026-11-28T05:00:00|2026-11-28T05:0{ended}:00|{rest}\n" for step, ended, rest in rows)


def test_accounting_numbers_the_steps_in_the_order_of_their_ends(fake_slurm, attempt):
    rows = [("7", 9, "COMPLETED|0:0|job"), ("7.batch", 9, "FAILED|1:0|batch"), ("7.extern", 9, "FAILED|1:0|extern"),
            ("7.0", 8, "FAILED|7:0|a|b"), ("7.1", 3, "FAILED|0:11|python"), ("7.2", 1, "CANCELLED by 0|0:9|server"),
            ("7.3", 2, "FAILED|0:15|server"), ("7.4", 5, "OUT_OF_MEMORY|0:125|big"), ("7.5", 1, "COMPLETED|0:0|ok")]  # fmt: skip
    fake_slurm.respond("sacct", sacct(*rows))
    end = end_with(
        attempt, f"srun: error: node1: task 0: Exited with exit code 7\n{SEGV}\n", in_slurm=True, must_succeed=True
    )
    assert without_prefix(end) == "step 1 failed (139), step 4 failed (137) and step 0 failed (7)"
    assert end.evidence[-1] == ("sacct", "7.0 a|b FAILED 7:0") and end.exit_code == 139


def test_steps_of_an_earlier_attempt_do_not_count(fake_slurm, attempt):
    fake_slurm.respond("sacct", sacct(("7.0", 1, "FAILED|7:0|a")))
    assert end_with(attempt, in_slurm=True, began=time.time()).reason == "the script exited with 0"


def test_the_log_counts_where_accounting_lacks_the_step_or_does_not_exist(fake_slurm, attempt, monkeypatch):
    line = "srun: error: node1: task 0: Exited with exit code 7\n"
    assert without_prefix(end_with(attempt, line, in_slurm=True)) == "a step failed (7)"  # without accounting
    monkeypatch.setattr(script_end, "ACCOUNTING_S", 0.1)
    fake_slurm.respond("sacct", sacct(("7.0", 1, "COMPLETED|0:0|a")))
    assert without_prefix(end_with(attempt, line, in_slurm=True)) == "a step failed (7)"


def test_a_step_that_accounting_has_not_finished_is_waited_for(fake_slurm, attempt, monkeypatch):
    fake_slurm.respond("sacct", sacct(("7.0", 1, "RUNNING|0:0|a")))
    ended = lambda _: fake_slurm.respond("sacct", sacct(("7.0", 1, "FAILED|3:0|a")))  # noqa: E731
    monkeypatch.setattr(script_end.time, "sleep", ended)
    assert without_prefix(end_with(attempt, in_slurm=True)) == "step 0 failed (3)"
