"""The small parent of each rank: what it writes down, whatever happens to the rank or to itself."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.errors import ToolkitError
from toolkit.rank.guard import rank_by_launcher
from toolkit.rundir.claims import claim_attempt
from toolkit.rundir.files import read_json
from toolkit.supervise.launchers import LocalRanks

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from toolkit.rank import guard as guard_module
from toolkit.rundir.layout import AttemptDirectory
attempt = AttemptDirectory(Path(sys.argv[1]))
{more}
def body():
{body}
sys.exit(guard_module.guard(attempt, {rank}, body, foreign={foreign}))
"""


@pytest.fixture
def guarded(run_directory):
    """Run `body` as a rank under a guard; returns (its exit code, the attempt)."""
    attempt = claim_attempt(run_directory)

    def run(body, more="", foreign=False, rank=2):
        indented = "\n".join("    " + line for line in body.splitlines())
        program = PROGRAM.format(body=indented, more=more, foreign=foreign, rank=rank)
        done = subprocess.run(
            [sys.executable, "-c", program, str(attempt.path)], timeout=240, check=False, start_new_session=True,
        )  # fmt: skip
        return done.returncode, attempt

    return run


def test_success_is_a_done_marker(guarded):
    code, attempt = guarded("print('working', flush=True); return 0")
    assert code == 0
    assert attempt.done_marker(2).read_text() == "done\n"
    assert attempt.log_file(2).read_text() == "working\n"
    assert read_json(attempt.rank_file(2))["rank"] == 2
    assert not list(attempt.errors.iterdir())


# A daemon: in a session of its own, with a parent that exits at once.
DAEMON = "os.system('''(setsid sh -c \"{trap}echo \\$\\$ > {file}; exec sleep 600\" > /dev/null 2>&1 &)''')"
UNTIL = "\nwhile not Path('{file}').exists() or not Path('{file}').read_text().strip(): time.sleep(0.05)"


def daemon(file, trap=""):
    return (DAEMON + UNTIL).format(file=file, trap=trap)


def is_running(file):
    try:
        return " Z " not in Path(f"/proc/{int(file.read_text())}/stat").read_text()
    except FileNotFoundError:
        return False


def test_no_daemon_outlives_its_rank(guarded, tmp_path):
    files = [tmp_path / "plain", tmp_path / "deaf"]
    body = daemon(files[0]) + "\n" + daemon(files[1], trap="trap '' TERM; ") + "\nreturn 0"
    code, attempt = guarded(body, more="guard_module.GRACE_S = 0.5")
    assert code == 0 and attempt.done_marker(2).exists()
    assert [is_running(file) for file in files] == [False, False]


@pytest.mark.parametrize("trap", ["", "trap '' TERM; "])
def test_a_guard_does_not_await_a_daemon_that_does_not_act_on_the_request_to_exit(guarded, tmp_path, trap):
    exits = (
        "signal.signal(signal.SIGTERM, lambda *_: os._exit(0))\nos.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(600)"
    )
    body = daemon(tmp_path / "pid", trap) + "\n" + exits
    briefly = "from toolkit.supervise import process_tree\nprocess_tree.GRACE_S = guard_module.GRACE_S = 0.5"
    _, attempt = guarded(body, more=briefly, foreign=True)
    assert attempt.done_marker(2).read_text() == "stopped\n" and not is_running(tmp_path / "pid")


def test_the_death_of_a_rank_is_recorded_before_its_daemons_end(guarded):
    """A peer that fails because of it must not be the first one with an error."""
    ends = "guard_module.end_descendants = lambda *_, **__: print(attempt.error_file(2).exists(), flush=True)"
    code, attempt = guarded("os.kill(os.getpid(), 9)", more=ends)
    assert (code, attempt.log_file(2).read_text()) == (137, "True\n")


def test_a_local_run_that_a_rank_has_submitted_continues(guarded, tmp_path):
    file = tmp_path / "pid"
    code, _ = guarded("os.environ['TOOLKIT_LOCAL'] = '1'\n" + daemon(file) + "\nreturn 0")
    assert code == 0 and is_running(file)
    os.kill(int(file.read_text()), signal.SIGKILL)


def test_a_guard_collects_the_orphans_of_its_rank(guarded, tmp_path):
    orphan = f"os.system('(true & echo $! > {tmp_path}/pid)')"
    wait = (
        f"number = Path('{tmp_path}/pid').read_text().strip()\nwhile Path('/proc/' + number).exists(): time.sleep(0.05)"
    )
    assert guarded(f"{orphan}\n{wait}\nreturn 0")[0] == 0


def test_the_heartbeat_says_that_the_reader_of_steps_has_died(guarded):
    body = """
print("toolkit: step 7", flush=True)
while not attempt.heartbeat.exists(): time.sleep(0.05)
guard = os.getppid()
for pid in Path(f"/proc/{guard}/task/{guard}/children").read_text().split():
    if int(pid) != os.getpid(): os.kill(int(pid), 9)
while '"steps_per_s": null' not in attempt.heartbeat.read_text(): time.sleep(0.05)
return 0"""
    code, attempt = guarded(body, foreign=True, rank=0)
    assert (code, read_json(attempt.heartbeat)["step"]) == (0, 7)
    assert "the process that reads the steps of rank 0 ended with status 9" in attempt.log_file(0).read_text()


def test_no_daemon_outlives_the_kill_of_its_rank(run_directory, tmp_path, wait_until):
    attempt, file = claim_attempt(run_directory), tmp_path / "pid"
    body = "\n".join("    " + line for line in f"{daemon(file)}\ntime.sleep(600)".splitlines())
    program = PROGRAM.format(body=body, more="", foreign=True, rank=2)
    ranks = LocalRanks([subprocess.Popen([sys.executable, "-c", program, str(attempt.path)], start_new_session=True)])
    wait_until(lambda: file.exists() and file.read_text().strip())
    ranks.kill()
    assert not is_running(file)
    assert not list(attempt.errors.iterdir())  # the rank was not to blame


def test_a_script_owns_the_default_log_of_sbatch_and_toolkit_copies_it(guarded, tmp_path):
    shown, moved = tmp_path / "slurm-7.out", tmp_path / "out" / "log"
    shown.write_text("of an earlier start\n")
    moved.parent.mkdir()
    body = f"""
print("first", flush=True)
assert "first" in Path("{shown}").read_text() and os.stat("{shown}").st_nlink == 1
os.rename("{shown}", "{moved}")
os.system("echo second")
return 0"""
    code, attempt = guarded(body, more=f"os.environ['TOOLKIT_DEFAULT_LOG'] = '{shown}'")
    assert code == 0 and not shown.exists()
    assert moved.read_text() == "of an earlier start\nfirst\nsecond\n"
    assert attempt.log_file(2).with_name("rank-0.log").read_text() == "first\nsecond\n"
    assert moved.stat().st_mode & 0o777 == 0o600


def test_a_script_runs_where_its_default_log_cannot_be_created(guarded, tmp_path):
    code, attempt = guarded(
        "print('done'); return 0", more=f"os.environ['TOOLKIT_DEFAULT_LOG'] = '{tmp_path}/none/log'"
    )
    assert (code, attempt.log_file(2).read_text()) == (0, "done\n")


def test_the_default_log_is_not_written_through_a_link(guarded, tmp_path):
    (tmp_path / "other").write_text("")
    (tmp_path / "other").chmod(0o640)
    (tmp_path / "slurm-7.out").symlink_to("other")
    code, attempt = guarded(
        "print('done'); return 0", more=f"os.environ['TOOLKIT_DEFAULT_LOG'] = '{tmp_path}/slurm-7.out'"
    )
    assert (code, attempt.log_file(2).read_text()) == (0, "done\n")
    assert (tmp_path / "other").read_text() == "" and (tmp_path / "other").stat().st_mode & 0o777 == 0o640


def test_many_ranks_share_the_log_of_their_node(guarded):
    """A line that was not ended, what a child prints late, and a rank that is killed: all of it arrives, by rank."""
    code, attempt = guarded(
        "print('one', flush=True); os.system('echo two >&2'); os.write(1, b'three'); os.kill(os.getpid(), 9)",
        more="os.environ['TOOLKIT_WORLD_SIZE'] = '65'",
    )
    assert code == 137
    assert attempt.node_log(socket.gethostname()).read_text() == "[2] one\n[2] two\n[2] three\n"
    assert not attempt.log_file(2).exists()


@pytest.mark.parametrize(
    ("body", "code", "reason"),
    [
        ("return 3", 3, "exit code 3"),
        ("os._exit(75)", 75, "exit code 75"),
        ("os.kill(os.getpid(), signal.SIGSEGV); time.sleep(9)", 139, "killed by SIGSEGV"),
        ("os.kill(os.getpid(), signal.SIGKILL); time.sleep(9)", 137, "killed by SIGKILL (out of memory?)"),
    ],
)
def test_a_rank_that_could_not_say_why_it_died_is_told_on(guarded, body, code, reason):
    ended, attempt = guarded(body)
    assert ended == code
    error = read_json(attempt.error_file(2))
    assert (error["reason"], error["exit_code"], error["rank"]) == (reason, code, 2)
    assert not attempt.done_marker(2).exists()


def test_a_ranks_own_words_are_kept(guarded):
    body = "guard_module.write_json(attempt.error_file(2), {'reason': 'mine'}); return 1"
    code, attempt = guarded(body)
    assert code == 1
    assert json.loads(attempt.error_file(2).read_text()) == {"reason": "mine"}


def test_a_rank_that_saved_and_left_is_not_called_done(guarded):
    body = "guard_module.write_text(attempt.done_marker(2), 'stopped\\n'); return 0"
    assert guarded(body)[1].done_marker(2).read_text() == "stopped\n"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR2", "SIGINT"])
def test_signals_reach_the_rank_and_do_not_end_the_guard(guarded, name):
    body = f"""
def heard(number, frame):
    print("heard", number, flush=True)
    os._exit(7)
signal.signal(signal.{name}, heard)
time.sleep(0.2)  # the guard installs its handlers after the fork
os.kill(os.getppid(), signal.{name})
time.sleep(9)"""
    code, attempt = guarded(body)
    assert code == 7
    assert attempt.log_file(2).read_text() == f"heard {int(signal.Signals[name])}\n"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR2", "SIGINT"])
def test_a_signal_after_the_ranks_end_does_not_cost_the_marker(guarded, name):
    """The whole job is told to end in the moment in which this rank has finished."""
    late = f"""
write = guard_module.write_text
def write_after_signal(*arguments):
    os.kill(os.getpid(), signal.{name})
    write(*arguments)
guard_module.write_text = write_after_signal"""
    code, attempt = guarded("return 0", more=late)
    assert code == 0
    assert attempt.done_marker(2).read_text() == "done\n"


def test_a_program_hears_term_where_its_guard_hears_usr2_and_only_once(guarded):
    """srun passes USR2 on, and Slurm itself sends a TERM."""
    body = """
heard = []
signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
time.sleep(0.3)
for number in (signal.SIGUSR2, signal.SIGUSR2):
    os.kill(os.getppid(), number)
    os.kill(os.getpid(), signal.SIGUSR2)  # where a launcher signals all processes
    time.sleep(0.2)
print(heard == [signal.SIGTERM], flush=True)
return 0"""
    code, attempt = guarded(body, foreign=True)
    assert (code, attempt.log_file(2).read_text()) == (0, "True\n")
    assert attempt.done_marker(2).read_text() == "stopped\n"


@pytest.mark.parametrize(("own", "expected"), [("", "SIGTERM"), ("SIGUSR1", "SIGUSR1")])
def test_a_program_that_ignores_ctrl_c_still_receives_the_request_of_a_stop(guarded, own, expected):
    body = f"""
heard = []
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.{expected}, lambda number, frame: heard.append(number))
time.sleep(0.3)
for number in (signal.SIGINT, signal.SIGUSR2):
    os.kill(os.getppid(), number)
    time.sleep(0.2)
while not heard: time.sleep(0.05)
return 0"""
    number = f"int(signal.{own})" if own else "''"
    assert guarded(body, more=f"os.environ['TOOLKIT_SIGNAL'] = str({number})", foreign=True)[0] == 0


def test_a_program_that_nobody_told_to_end_is_done(guarded):
    assert guarded("return 0", foreign=True)[1].done_marker(2).read_text() == "done\n"


FAILS_TWICE = """
import errno
guard_module.WRITE_PERIOD_S = 0.1
tries = []
def fails_twice(write):
    def attempt_to(*arguments):
        tries.append(1)
        if len(tries) < 3:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        write(*arguments)
    return attempt_to
"""
# From when the rank runs: the guard's first word of it is written before.
ITS_WRITES_FAIL = """
def end_with(*arguments, end_with=guard_module._end_with):
    guard_module.{0} = fails_twice(guard_module.{0})
    end_with(*arguments)
guard_module._end_with = end_with
"""


def test_a_pause_of_the_file_system_does_not_make_a_crash_of_a_rank_that_is_done(guarded):
    code, attempt = guarded("return 0", more=FAILS_TWICE + ITS_WRITES_FAIL.format("write_text"))
    assert code == 0
    assert attempt.done_marker(2).read_text() == "done\n"
    assert attempt.log_file(2).read_text().count("Stale file handle") == 1


def test_a_pause_of_the_file_system_does_not_hide_a_death(guarded):
    code, attempt = guarded("return 3", more=FAILS_TWICE + ITS_WRITES_FAIL.format("write_json"))
    assert code == 3
    assert read_json(attempt.error_file(2))["reason"] == "exit code 3"


def test_a_marker_that_cannot_be_written_is_given_up_with_the_ranks_own_code(guarded):
    """The markers' folder is gone for good: a launcher must not end the others for it."""
    gone = "guard_module.FILE_SYSTEM_PATIENCE_S = 0.3"
    body = "import shutil; shutil.rmtree(attempt.ranks); attempt.ranks.write_text(''); return 0"
    code, attempt = guarded(body, more=gone)
    assert code == 0
    assert "giving up" in attempt.log_file(2).read_text()


def test_a_hang_up_alone_does_not_end_a_rank(guarded):
    code, attempt = guarded("time.sleep(0.2); os.kill(os.getppid(), signal.SIGHUP); time.sleep(0.2); return 0")
    assert code == 0
    assert attempt.done_marker(2).exists()


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ({"TOOLKIT_LAUNCHER": "srun", "SLURM_PROCID": "5", "PMI_RANK": "9"}, 5),
        ({"TOOLKIT_LAUNCHER": "mpirun", "PMI_RANK": "5", "SLURM_PROCID": "0"}, 5),
        ({"TOOLKIT_LAUNCHER": "mpirun", "OMPI_COMM_WORLD_RANK": "5", "PMIX_RANK": "5"}, 5),
        ({"TOOLKIT_LAUNCHER": "local", "RANK": "5", "SLURM_PROCID": "0"}, 5),
    ],
)
def test_the_launchers_own_variable_gives_the_rank(environ, rank):
    assert rank_by_launcher(environ) == rank


@pytest.mark.parametrize("environ", [{}, {"TOOLKIT_LAUNCHER": "srun", "RANK": "1"}, {"TOOLKIT_LAUNCHER": "aprun"}])
def test_a_launcher_without_a_rank_number_names_the_fix(environ):
    with pytest.raises(ToolkitError, match="set no rank number") as error:
        rank_by_launcher(environ)
    assert "launcher.kind" in error.value.fix


def test_a_rank_outside_a_run_is_refused_in_one_line():
    done = subprocess.run(
        [sys.executable, "-m", "toolkit.rank"],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 125
    assert done.stderr.startswith("toolkit: cannot start a rank") and done.stderr.count("\n") == 1


NO_ROOM = "def refuse(*_args, **_kept): raise OSError(28, 'No space left on device')\nguard_module.write_text = refuse"


def test_on_a_full_disk_an_empty_marker_says_done(guarded):
    code, attempt = guarded("return 0", more=NO_ROOM)
    assert (code, attempt.done_marker(2).read_text()) == (0, "")


def test_a_disk_without_room_for_a_name_is_waited_for_briefly(guarded):
    briefly = "guard_module.ROOM_PATIENCE_S = 0.2; guard_module.WRITE_PERIOD_S = 0.1; Path.touch = refuse"
    code, attempt = guarded("return 0", more=f"{NO_ROOM}\n{briefly}")
    assert code == 0 and not attempt.done_marker(2).exists()
    said = attempt.log_file(2).read_text()
    assert "No space left on device; retrying for 0 s" in said and "giving up: cannot write " in said
