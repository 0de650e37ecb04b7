"""How attempts end, and what the run makes of it. The ranks are small shell programs, started one by one.

The fixture asserts after each test that no process of the run is left.
"""

import os
import shutil
import signal
import sys
import time

import pytest

from toolkit.rundir.claims import claim_start, read_claim
from toolkit.rundir.files import read_json


def shell(text):
    return ["bash", "-c", text]


# Two processes a rank: bash, and a child that nobody tells when bash is killed.
SLEEP = "sleep 100; true"


def test_a_run_is_completed_by_every_ranks_marker(supervise, local_job):
    job = supervise(local_job(shell('echo "I am $RANK of $WORLD_SIZE"; echo "oh $RANK" >&2')))
    assert job.wait() == 0
    end = job.end()
    assert (end["cause"], end["state"], end["final"], end["exit_code"]) == ("completed", "completed", True, 0)
    assert [job.rank_log(rank) for rank in (0, 1)] == ["I am 0 of 2\noh 0\n", "I am 1 of 2\noh 1\n"]
    assert read_json(job.run.start(0) / "end.json")["state"] == "completed"
    assert job.events() == ["started", "ended"]


def test_one_ranks_success_does_not_hide_anothers_death(supervise, local_job):
    job = supervise(local_job(shell("if [ $RANK = 1 ]; then sleep 0.3; kill -9 $$; fi")))
    assert job.wait() == 137
    end = job.end()
    assert (end["cause"], end["state"], end["rank"], end["exit_code"]) == ("crashed", "failed", 1, 137)
    assert "SIGKILL" in end["reason"]
    assert job.run.attempt(0).done_marker(0).exists()
    assert not job.run.attempt(0).done_marker(1).exists()


def test_a_rank_that_dies_ends_the_attempt_and_all_that_the_others_started(supervise, local_job):
    began = time.monotonic()
    job = supervise(
        local_job(
            shell(f"if [ $RANK = 1 ]; then printf 'a\\n\\033[31mlast \\007words\\033[0m\\n'; exit 3; fi; {SLEEP}")
        )
    )
    assert job.wait() == 3
    assert time.monotonic() - began < 60
    assert eventually_gone(job)
    end = job.end()
    assert (end["rank"], end["reason"], end["exit_code"]) == (1, "exit code 3", 3)
    assert end["host"] and end["last_lines"] == ["a", "last words"]  # terminal escapes are gone
    assert "rank 1" in job.log and "    | last words" in job.log


@pytest.mark.parametrize("code", [75, 255])
def test_every_exit_code_of_a_program_is_a_failure(supervise, local_job, code):
    job = supervise(local_job(shell(f"exit {code}"), ranks=1))
    assert job.wait() == code
    assert job.end()["cause"] == "crashed"


def test_a_program_that_cannot_be_run_says_so(supervise, local_job):
    job = supervise(local_job(["/nowhere/program"], ranks=1))
    assert job.wait() == 2
    end = job.end()
    assert "cannot run" in end["reason"] and "program: No such file" in end["reason"]
    assert "executable on the nodes" in end["fix"]
    assert "Traceback" not in job.rank_log(0)


def test_a_launcher_that_is_not_here_ends_the_run_as_our_failure(supervise, local_job):
    settings = local_job(shell("true"), launcher="mpirun", restart="crashes = 5")
    settings["launcher"]["mpirun"] = "no-such-mpirun"
    job = supervise(settings)
    assert job.wait() == 125
    end = job.end()
    assert (end["cause"], end["state"]) == ("launch_failed", "failed")
    assert "no-such-mpirun not found on PATH" in end["reason"]
    assert end["fix"]


def test_a_launcher_that_starts_nobody_is_a_launch_failure(supervise, local_job, tmp_path):
    broken = tmp_path / "mpirun"
    broken.write_text("#!/bin/bash\necho 'no such fabric'\nexit 9\n")
    broken.chmod(0o755)
    settings = local_job(shell("true"), launcher="mpirun", restart="crashes = 5")
    settings["launcher"]["mpirun"] = str(broken)
    job = supervise(settings)
    assert job.wait() == 125
    assert job.end()["last_lines"] == ["no such fabric"]
    assert "code 9" in job.end()["reason"]
    assert [job.end(number)["next"] for number in job.run.attempt_numbers()] == ["restart", "restart", "end"]
    assert job.end(2)["decision"] == "the same failure occurred three times without a new step"


def test_a_launch_that_cannot_pass_is_tried_once(supervise, local_job, tmp_path):
    broken = tmp_path / "mpirun"
    broken.write_text(
        "#!/bin/bash\necho 'slurmstepd: error: execve(): /no/python: No such file or directory'\nexit 2\n"
    )
    broken.chmod(0o755)
    settings = local_job(shell("true"), launcher="mpirun", restart="crashes = 5")
    settings["launcher"]["mpirun"] = str(broken)
    job = supervise(settings)
    assert job.wait() == 125
    assert (job.end()["symptom"], job.end()["decision"]) == (
        "no_interpreter",
        "another attempt would fail in the same way",
    )


def test_a_launch_that_fails_once_ends_nothing(supervise, local_job, tmp_path):
    """As where an old step on a node ends only now."""
    first = tmp_path / "mpirun"
    words = "srun: error: task 1 launch failed: Unspecified error"
    first.write_text(
        f"#!/bin/bash\ncase $1 in --version) exit;; esac\n"
        f"[ $TOOLKIT_ATTEMPT = 1 ] || {{ echo '{words}'; seq 20; exit 137; }}\n"
        f"PMI_RANK=0 PMI_SIZE=1 exec {sys.executable} -P -m toolkit.rank\n"
    )
    first.chmod(0o755)
    settings = local_job(shell("true"), ranks=1, launcher="mpirun", restart="crashes = 1")
    settings["launcher"]["mpirun"] = str(first)
    job = supervise(settings)
    assert job.wait() == 0, job.log
    end = job.end(0)
    assert (end["cause"], end["next"], end["symptom"]) == ("launch_failed", "restart", "launch_failed")
    assert end["last_lines"][0] == words and end["evidence"] == [["logs/launcher.log", words]]


def test_a_second_attempt_may_succeed(supervise, local_job):
    job = supervise(local_job(shell("[ $TOOLKIT_ATTEMPT = 1 ] || [ $RANK = 0 ] || exit 4"), restart="crashes = 1"))
    assert job.wait() == 0
    assert job.run.attempt_numbers() == [0, 1]
    first, second = job.end(0), job.end(1)
    assert (first["cause"], first["next"], first["final"]) == ("crashed", "restart", False)
    assert (second["cause"], second["final"]) == ("completed", True)


def test_the_same_failure_twice_ends_a_run_with_budget_left(supervise, local_job):
    files = {"four.py": "import sys\ndef main(world, config):\n    sys.exit(4)\n"}
    job = supervise(local_job("four.py:main", files=files, ranks=1, restart="crashes = 5"))
    assert job.wait() == 4
    assert job.run.attempt_numbers() == [0, 1]
    assert "same failure occurred twice" in job.end(1)["decision"]


def test_a_key_that_main_refuses_is_named_with_its_line(supervise, local_job):
    script = (
        "from toolkit.errors import ToolkitError\n"
        "def main(world, config):\n"
        "    raise ToolkitError('3 is odd', where='args.size', fix='give 4')\n"
    )
    job = supervise(
        local_job("odd.py:main", files={"odd.py": script}, ranks=1, restart="crashes = 0\n[args]\nsize = 3")
    )
    assert job.wait() == 2
    assert "sample.toml:7:args.size: 3 is odd. Fix: give 4" in job.rank_log(0)


def test_a_program_that_tells_no_steps_has_its_whole_budget(supervise, local_job):
    """It may have come far, and saved, between two failures that look the same."""
    job = supervise(local_job(shell("exit 4"), ranks=1, restart="crashes = 3"))
    assert job.wait() == 4
    assert job.run.attempt_numbers() == [0, 1, 2, 3]
    assert job.end(3)["decision"] == "restart.crashes = 3 is spent"


def test_different_failures_spend_the_budget(supervise, local_job):
    job = supervise(local_job(shell("exit $((TOOLKIT_ATTEMPT + 3))"), ranks=1, restart="crashes = 2"))
    assert job.wait() == 5
    assert job.run.attempt_numbers() == [0, 1, 2]
    assert job.end(2)["decision"] == "restart.crashes = 2 is spent"


def test_a_run_without_steps_for_long_is_stalled(supervise, local_job):
    beat = 'echo "{\\"step\\": 7}" > $TOOLKIT_RUN_DIR/attempts/000/heartbeat'
    job = supervise(local_job(shell(f"{beat}; touch -d '2 hours' $TOOLKIT_RUN_DIR/attempts/000/heartbeat; {SLEEP}"),
                              ranks=1, restart="crashes = 0\nstall_s = 1"))  # fmt: skip
    assert job.wait() == 125  # although the file server's clock is two hours ahead
    assert (job.end()["cause"], job.end()["step"]) == ("stalled", 7)


@pytest.mark.parametrize(
    ("number", "state", "code"),
    [(signal.SIGTERM, "cancelled", 143), (signal.SIGINT, "stopped", 130), (signal.SIGUSR2, "preempted", 143)],
)
def test_a_signal_to_the_supervisor_ends_the_run(supervise, local_job, number, state, code):
    job = supervise(local_job(shell(f"echo ready; {SLEEP}"), restart="crashes = 5"))
    job.until_log_says("ready")
    job.process.send_signal(number)
    assert job.wait() == code
    assert (job.end()["state"], job.end()["final"]) == (state, True)
    assert eventually_gone(job)


@pytest.mark.parametrize(("name", "state", "code"), [("stop", "stopped", 130), ("cancel", "cancelled", 143)])
def test_a_control_file_ends_the_run(supervise, local_job, name, state, code):
    job = supervise(local_job(shell(f"echo ready; {SLEEP}")))
    job.until_log_says("ready")
    (job.run.control / name).touch()
    assert job.wait() == code
    assert job.end()["state"] == state


def test_a_request_before_the_launch_starts_no_rank(supervise, local_job, run_directory):
    (run_directory.control / "stop").touch()
    job = supervise(local_job(shell("true")))
    assert job.wait() == 130
    assert job.end()["reason"] == "ended on request (stopped) before any rank was started"
    assert not any(job.run.attempt(0).ranks.iterdir())


def test_a_supervisor_killed_by_9_takes_ranks_and_their_children_along(supervise, local_job):
    job = supervise(local_job(shell(f"echo ready; {SLEEP}")))
    job.until_log_says("ready", rank=1)
    assert len(job.living()) >= 4
    job.process.kill()
    job.process.wait()  # the fixture's end finds orphans


def test_a_guard_killed_by_9_is_noticed_and_leaves_nothing(supervise, local_job):
    job = supervise(local_job(shell(f"echo ready; {SLEEP}")))
    job.until_log_says("ready", rank=1)
    os.kill(read_json(job.run.attempt(0).rank_file(1))["pid"], signal.SIGKILL)
    assert job.wait() == 137
    end = job.end()
    assert end["cause"] == "crashed" and "without reporting an error" in end["reason"]
    assert eventually_gone(job)


def test_foreign_programs_do_not_die_of_usr2(supervise, local_job):
    job = supervise(local_job(shell("kill -USR2 $$; sleep 0.2; echo survived"), ranks=1))
    assert job.wait() == 0
    assert job.rank_log(0) == "survived\n"


def test_usr2_to_the_guard_of_a_program_is_a_term_and_it_is_not_called_done(supervise, local_job):
    """It is all that srun passes on."""
    polite = (
        "trap 'echo saved; exit 0' TERM; kill -USR2 $PPID; kill -USR2 $PPID; for i in $(seq 50); do sleep 0.1; done"
    )
    job = supervise(local_job(shell(polite), ranks=1))
    assert job.wait() == 130
    assert job.rank_log(0).removeprefix("Terminated\n") == "saved\n"  # the shell's word on a sleep that was ended
    assert (job.end()["cause"], job.run.attempt(0).done_marker(0).read_text()) == ("stopped", "stopped\n")


def test_a_program_that_saves_on_term_is_not_hurried_by_one_that_does_not(supervise, local_job):
    save = "trap 'sleep 3; echo saved; exit 0' TERM"
    job = supervise(local_job(shell(f"[ $RANK = 1 ] || {save}; echo ready; sleep 100 & wait")))
    for rank in (0, 1):
        job.until_log_says("ready", rank=rank)
    (job.run.control / "stop").touch()
    assert job.wait() == 130
    assert job.rank_log(0) == "ready\nsaved\n"


def test_a_second_supervisor_is_refused_in_one_line(supervise, local_job):
    job = supervise(local_job(shell(f"echo ready; {SLEEP}"), ranks=1))
    job.until_log_says("ready")
    second = supervise(local_job(shell("true")))
    assert second.wait() == 125
    assert "start 0 of this run belongs to job local-" in second.log
    assert second.log.count("\n") == 1
    job.process.terminate()
    assert job.wait() == 143


@pytest.mark.parametrize("holds_the_log", [False, True])  # since 23.02, Slurm makes the folder of the log
def test_a_run_that_is_gone_is_named(supervise, local_job, run_directory, holds_the_log):
    shutil.rmtree(run_directory.path)
    if holds_the_log:
        run_directory.path.mkdir()
    job = supervise(local_job(shell("true")))
    assert job.wait() == 125
    assert "the run directory does not exist" in job.log and "Traceback" not in job.log


def test_a_program_that_leaves_well_on_term_is_not_called_done(supervise, local_job):
    """It saved and left because it was told to: a walltime must requeue it, a cancel must say cancelled."""
    polite = shell("trap 'echo saved; exit 0' TERM; echo ready; while true; do sleep 0.1; done")
    job = supervise(local_job(polite))
    for rank in (0, 1):
        job.until_log_says("ready", rank=rank)
    job.process.terminate()
    assert job.wait() == 143
    assert (job.end()["cause"], job.end()["state"]) == ("cancelled", "cancelled")
    assert "saved" in job.rank_log(0)


def test_sys_exit_0_after_a_stop_is_a_stop(supervise, local_job):
    """`if world.should_stop(step): save(); sys.exit()` must not pass for a finished job."""
    script = (
        "import sys, time\n"
        "def main(world, config):\n"
        "    step = 0\n"
        "    print('ready', flush=True)\n"
        "    while not world.should_stop(step):\n"
        "        step += 1\n"
        "        time.sleep(0.05)\n"
        "    sys.exit()\n"
    )
    job = supervise(local_job("polite.py:main", ranks=1, files={"polite.py": script}))
    job.until_log_says("ready")
    (job.run.control / "stop").touch()
    assert job.wait() == 130
    assert (job.end()["cause"], job.run.attempt(0).done_marker(0).read_text()) == ("stopped", "stopped\n")


def test_a_supervisor_that_cannot_go_on_says_so_in_the_record(supervise, local_job):
    settings = local_job(shell("true"))
    settings["restart"]["stall_s"] = "soon"  # no job file can say this; it stands for any mistake of ours
    job = supervise(settings)
    assert job.wait() == 125
    end = job.end()
    assert (end["cause"], end["state"], end["final"]) == ("supervisor_failed", "failed", True)
    assert "ValueError" in end["reason"]
    assert "Traceback" in job.log  # our own mistake is told whole
    assert read_json(job.run.start(0) / "end.json")["exit_code"] == 125


def test_a_start_after_a_killed_one_writes_down_what_that_could_not(supervise, local_job):
    job = supervise(local_job(shell("echo ready; sleep 100")))
    job.until_log_says("ready")
    job.process.kill()
    job.process.wait()
    assert eventually_gone(job)
    run = job.run
    (run.start(0) / "lost.json").write_text("{}")  # as `resume` does
    run.attempt(0).heartbeat.write_text("")  # its node lost power before the disk had it
    again = supervise(local_job(shell("true")), start=1)
    assert again.wait() == 0
    first = job.end(0)
    assert (first["cause"], first["final"]) == ("supervisor_lost", False)
    assert again.end(1)["state"] == "completed"


def test_a_supervisor_whose_run_has_gone_on_without_it_leaves_it_alone(supervise, local_job):
    """Its node was cut off, and Slurm began the job again elsewhere."""
    job = supervise(local_job(shell("echo ready; sleep 100")))
    job.until_log_says("ready")
    other = claim_start(job.run, first=0, job_id=read_claim(job.run, 0).job_id, host="n2", pid=1, process_started=1)
    assert job.wait() == 125
    assert f"start {other.start} owns this run now" in job.log
    assert not job.living()
    assert not job.run.attempt(0).exit_file.exists()
    assert job.run.attempt_numbers() == [0]
    assert not (job.run.start(0) / "end.json").exists()


def eventually_gone(job):
    deadline = time.monotonic() + 10
    while job.living() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not job.living()
