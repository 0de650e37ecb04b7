"""From the first attempt after progress a program gets the arguments with which it continues, and is told so."""

from __future__ import annotations

import sys
import time

import pytest

from toolkit.rundir.files import write_json

# Prints what it received, and crashes in all but the last attempt. `saves` are attempts that write a file.
TELLS = """
import os, sys
attempt = int(os.environ["TOOLKIT_ATTEMPT"])
print("got", sys.argv[1:], os.environ["TOOLKIT_RESTART"], os.environ.get("TOOLKIT_LAST_PROGRESS"), flush=True)
if attempt in {saves}:
    open(f"{folder}/step-{{attempt}}.pt", "w").close()
if attempt in {steps}:
    print("toolkit: step", attempt, flush=True)
sys.exit(3 if attempt < {last} else 0)
"""


@pytest.fixture
def told(supervise, local_job, tmp_path):
    """What each attempt received, and the log of the start."""

    def run(argv, *, saves=(), steps=(), last=2, progress=True, own=("--from=x",)):
        pattern = f'progress = "{tmp_path}/step-*.pt"' if progress else ""
        text = TELLS.format(folder=tmp_path, saves=tuple(saves), steps=tuple(steps), last=last)
        restart = f"crashes = 5\nargv = {argv}\n{pattern}"
        job = local_job([sys.executable, "x.py"], ranks=1, files={"x.py": text}, restart=restart)
        job["job"] |= {"entry": [sys.executable, f"{tmp_path}/x.py", *own]}
        started = supervise(job)
        assert started.wait() == 0, started.log
        lines = [started.rank_log(0, attempt).splitlines() for attempt in range(last + 1)]
        return [line.removeprefix("got ") for of in lines for line in of if line.startswith("got")], started.log

    return run


def test_arguments_follow_the_first_changed_file(told, tmp_path):
    lines, log = told(["--from={newest}", "--more"], saves=[1, 2], last=3)
    newest = [f"{tmp_path}/step-{attempt}.pt" for attempt in (1, 2)]
    assert lines == [
        "['--from=x'] 0 None",
        "['--from=x'] 0 None",
        f"['--from={newest[0]}', '--more'] 1 {newest[0]}",
        f"['--from={newest[1]}', '--more'] 1 {newest[1]}",
    ]
    assert f"toolkit: attempt 2 continues with --from={newest[0]} --more\n" in log
    assert "attempt 1 continues" not in log
    why = f"restart.progress = '{tmp_path}/step-*.pt' matches no new file"
    assert f"toolkit: attempt 1 starts without restart.argv: {why}\n" in log


def test_an_option_may_be_added_more_than_once(told):
    lines, log = told(["-o", "a=1", "-o", "b=2"], saves=[0], last=1)
    assert lines[1].startswith("['--from=x', '-o', 'a=1', '-o', 'b=2'] 1 ")
    assert "toolkit: attempt 1 continues with -o a=1 -o b=2\n" in log


def test_files_of_an_earlier_run_are_no_progress(told, tmp_path):
    (tmp_path / "step-9.pt").touch()
    lines, _ = told(["--from={newest}"], steps=[0, 1], last=2)
    assert lines == ["['--from=x'] 0 None"] * 3


def test_without_files_a_step_is_progress(told):
    lines, _ = told(["--resume"], steps=[0], last=1, progress=False)
    assert lines == ["['--from=x'] 0 None", "['--from=x', '--resume'] 1 None"]


def test_without_a_path_the_arguments_stay_and_the_log_says_so(supervise, local_job, tmp_path):
    file = f"{tmp_path}/a.pt"
    program = f'echo "got [$*]"; case $TOOLKIT_ATTEMPT in 0) touch {file}; exit 3;; 1) rm {file}; exit 3;; esac'
    restart = f'crashes = 5\nprogress = "{tmp_path}/*.pt"\nargv = ["--from", "{{newest}}"]'
    started = supervise(local_job(["bash", "-c", program, "x"], ranks=1, restart=restart))
    assert started.wait() == 0, started.log
    logs = [started.rank_log(0, attempt) for attempt in range(3)]
    assert "got []" in logs[0] and f"got [--from {file}]" in logs[1] and "got []" in logs[2]
    assert "toolkit: attempt 2 has no argument of restart.argv: no path for {newest}\n" in started.log


def test_a_half_deleted_folder_is_not_the_newest(supervise, local_job, tmp_path):
    """Deleting a file of the oldest checkpoint makes its folder the one that changed last."""
    save = f"cd {tmp_path}; for n in 1 2; do mkdir step-$n; touch step-$n/a step-$n/b; sleep 0.1; done; mkdir step-2/c"
    program = (
        f'echo "got [$*]"; [ $TOOLKIT_ATTEMPT = 1 ] || {{ {save}; sleep 0.1; rm step-1/b; mkdir step-0; exit 3; }}'
    )
    restart = f'crashes = 1\nprogress = "{tmp_path}/step-*"\nargv = ["--from", "{{newest}}"]'
    started = supervise(local_job(["bash", "-c", program, "x"], ranks=1, restart=restart))
    assert started.wait() == 0, started.log
    assert f"got [--from {tmp_path}/step-2]" in started.rank_log(0, attempt=1)


def test_of_folders_without_files_the_last_changed_one_is_the_newest(supervise, local_job, tmp_path):
    program = f'echo "got [$*]"; [ $TOOLKIT_ATTEMPT = 1 ] || {{ cd {tmp_path}; mkdir -p b/c; sleep 0.1; mkdir -p a/c; exit 3; }}'
    restart = f'crashes = 1\nprogress = "{tmp_path}/[ab]"\nargv = ["--from", "{{newest}}"]'
    started = supervise(local_job(["bash", "-c", program, "x"], ranks=1, restart=restart))
    assert started.wait() == 0, started.log
    assert f"got [--from {tmp_path}/a]" in started.rank_log(0, attempt=1)


def test_a_killed_supervisor_recorded_no_files(supervise, local_job, tmp_path):
    program = f'echo "got [$*]"; [ $1 ] || {{ touch {tmp_path}/a.pt; echo saved; sleep 60; }}'
    restart = f'progress = "{tmp_path}/*.pt"\nargv = ["--from", "{{newest}}"]'
    job = local_job(["bash", "-c", program, "x"], ranks=1, restart=restart)
    first = supervise(job)
    first.until_log_says("saved")
    first.process.kill()
    first.process.wait()
    while first.living():
        time.sleep(0.05)
    write_json(first.run.start(0) / "lost.json", {"time": ""})  # as `toolkit resume` does
    second = supervise(job, start=1)
    assert second.wait() == 0, second.log
    assert f"got [--from {tmp_path}/a.pt]" in second.rank_log(0, attempt=1)


@pytest.mark.parametrize("entry", ["x.py", "x.py:main"])
def test_python_entries_are_told_too(supervise, local_job, tmp_path, entry):
    body = """
import os, sys, toolkit
def main(*_):
    print("got", sys.argv[1:], toolkit.is_restart(), toolkit.last_progress(), flush=True)
    open("{folder}/ckpt.pt", "w").close()
    sys.exit(0 if toolkit.is_restart() else 3)
if __name__ == "__main__":
    main()
"""
    argv = "" if ":" in entry else 'argv = ["--resume"]'
    restart = f'crashes = 1\nprogress = "{tmp_path}/ckpt.pt"\n{argv}'
    files = {"x.py": body.format(folder=tmp_path)}
    started = supervise(local_job(entry, ranks=1, files=files, restart=restart))
    assert started.wait() == 0, started.log
    given = "['--resume']" if argv else "[]"
    assert "got [] False None" in started.rank_log(0)
    assert f"got {given} True {tmp_path}/ckpt.pt" in started.rank_log(0, attempt=1)
