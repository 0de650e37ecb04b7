"""Scripts that know nothing of toolkit: their signals, their time limit, and failures that would come again."""

import signal
import sys

import pytest
from sampling import sampled

WAITS = """
import signal, sys, time
def got(number, frame):
    print("got", signal.Signals(number).name, flush=True)
    if number == signal.SIGTERM:
        sys.exit(3)
for name in {handles}:
    signal.signal(getattr(signal, "SIG" + name), got)
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""


@pytest.fixture
def script(local_job):
    def resolve(text, *, restart="crashes = 2"):
        return local_job("x.py", ranks=1, files={"x.py": text}, restart=restart)

    return resolve


@pytest.fixture
def program(local_job):
    """As `script`, for signals: a program starts without torch."""

    def resolve(handles, *, restart="crashes = 2", ranks=1, **job):
        text = WAITS.format(handles=handles)
        resolved = local_job([sys.executable, "x.py"], ranks=ranks, files={"x.py": text}, restart=restart)
        resolved["job"] |= {"entry": [sys.executable, f"{resolved['job_directory']}/x.py"], **job}
        return resolved

    return resolve


def lines_of(run, rank=0):
    return [line for line in run.rank_log(rank).splitlines() if line.startswith("got")]


@pytest.mark.parametrize("launcher", sampled(["local", "mpirun"], lambda case: case[0] == "local"))
@pytest.mark.parametrize(
    ("wanted", "handles", "seen"),
    [
        ("USR1", ["USR1", "TERM"], ["got SIGUSR1", "got SIGTERM"]),
        ("", ["USR1", "TERM"], ["got SIGTERM"]),
        ("USR1", ["TERM"], ["got SIGTERM"]),  # SIGUSR1 would kill a program that does not handle it
    ],
)
def test_a_program_gets_its_signal_first_and_then_term(supervise, program, launcher, wanted, handles, seen):
    job = program(handles, ranks=2, signal=wanted)
    job["launcher"]["kind"] = launcher
    run = supervise(job)
    for rank in range(2):
        run.until_log_says("ready", rank)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143
    assert [lines_of(run, rank) for rank in range(2)] == [seen, seen]
    assert run.end()["state"] == "cancelled"


def test_a_run_without_slurm_ends_at_its_time(supervise, program):
    run = supervise(program(["TERM"], time="0:30", restart="warn_s = 18"))
    assert run.wait() == 140
    assert lines_of(run) == ["got SIGTERM"]
    assert (run.end()["cause"], run.end()["state"]) == ("walltime", "timeout")


def test_a_failing_import_ends_at_the_first_attempt(supervise, script):
    run = supervise(script("import no_such_module\n"))
    assert run.wait() == 1
    end = run.end()
    assert (end["cause"], end["symptom"], end["final"]) == ("environment", "environment", True)
    assert "No module named 'no_such_module' at x.py:1" in end["reason"]
    assert "install the module" in end["fix"]


def test_the_same_exception_before_any_progress_ends_at_the_second_attempt(supervise, script):
    run = supervise(script("raise RuntimeError('operator does not exist')\n"))
    assert run.wait() == 1
    assert run.end(1)["decision"] == "the same failure occurred twice without a new step"
    assert len(run.run.attempt_numbers()) == 2


def test_after_a_step_only_the_budget_counts(supervise, script):
    run = supervise(script("print('toolkit: step 3', flush=True)\nraise RuntimeError('x')\n"))
    assert run.wait() == 1
    assert run.end(2)["decision"] == "restart.crashes = 2 is spent"
    assert run.end(2)["step"] == 3


@pytest.mark.parametrize(
    ("writes", "changed"), sampled([("open('out.pt', 'w').close()", True), ("pass", False)], lambda case: case[1])
)
def test_a_file_of_the_script_is_progress(supervise, script, tmp_path, monkeypatch, writes, changed):
    monkeypatch.chdir(tmp_path)
    job = script(f"{writes}\nraise RuntimeError('x')\n", restart='crashes = 1\nprogress = "*.pt"')
    run = supervise(job)
    assert run.wait() == 1
    assert run.end()["changed_files"] is changed


def test_a_program_gets_the_variables_of_torchrun(supervise, local_job):
    job = local_job(
        ["bash", "-c", "echo $RANK $LOCAL_RANK/$LOCAL_WORLD_SIZE of $WORLD_SIZE at $MASTER_ADDR:${MASTER_PORT:+port}"],
        ranks=2,
    )
    run = supervise(job)
    assert run.wait() == 0
    assert [run.rank_log(rank).strip() for rank in range(2)] == [f"{r} {r}/2 of 2 at 127.0.0.1:port" for r in range(2)]


PRINTS = """
import sys, time
for step in range(1, 9):
    time.sleep({pause} if step == 3 else 0.3)
    print(f"iter {{step}}: loss {{9 / step:.3f}}", flush=True)
time.sleep(120)
"""


@pytest.mark.parametrize(("pause", "least", "most"), [(0.3, 2, 29), (3.2, 32, 70)])
def test_printed_steps_stall_after_the_longer_of_stall_s_and_ten_times_the_longest_pause(
    supervise, local_job, pause, least, most
):
    job = local_job(
        [sys.executable, "x.py"], ranks=1, files={"x.py": PRINTS.format(pause=pause)}, restart="crashes = 0"
    )
    job["job"]["entry"] = [sys.executable, f"{job['job_directory']}/x.py"]
    job["restart"]["stall_s"] = 2  # as if it were the default of a key that the user did not set
    job["observe"]["step_line"] = [r"iter (?P<step>\d+): loss (?P<loss>\S+)"]
    run = supervise(job)
    assert run.wait() == 125
    end = run.end()
    assert (end["cause"], end["step"]) == ("stalled", 8)
    assert "read from the output of one rank" in end["reason"]
    assert least <= int(end["reason"].split()[3]) < most
