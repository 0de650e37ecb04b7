"""Make run directories with another version of toolkit, and what that version prints of them.

    python tests/upgrade/make_samples.py OLD_CHECKOUT/.venv/bin/toolkit tests/upgrade/runs_of_COMMIT.tar.gz

Needs root and the packages of the dev cluster (docs/devcluster.md). README.md in this folder lists the runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # pytest imports this file from another folder
from samples import FOLDER_MARK, JOB_IS_UNKNOWN, PYTHON_MARK, environment_of, replace_in, write_fake_slurm

TINY = """
[job]
name = "{name}"
entry = "train_lm.py:main"
ranks_per_node = {ranks}
time = "5"
[checkpoint]
every_steps = 2
keep_last = 2
[data]
paths = ["text.txt"]
[train]
steps = {steps}
batch = 4
micro_batch = 1
lr = 1e-2
warmup_steps = 1
[args]
layers = 1
width = 8
heads = 2
context = 8
"""
SHELL = "[job]\nname = '{name}'\nentry = ['bash', '-c', '''{command}''']\ntime = '5'\n{keys}\n[restart]\ncrashes = 0\n"
RAISES = 'def main(world, config):\n    raise ValueError("the sample fails on purpose")\n'
SAYS = 'import os\nprint("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"])\n'
FAILS_ONCE = "test $TOOLKIT_ATTEMPT -gt 0"
# The supervisor ends as it does on a lost node, once.
IS_LOST_ONCE = """cd $TOOLKIT_RUN_DIR; test -d attempts/001 && exit
sed -n "s/.*\\"pid\\": //p" starts/000/claim.json | tr -d , | xargs kill -9; sleep 60"""
OLD_CHECKOUT = "/opt/old-toolkit"
COMMANDS = ("status", "explain")


@dataclass
class Workshop:
    """A folder of projects, runs and sessions, and the old version's command line."""

    folder: Path
    toolkit: Path
    names: dict[str, str] = field(default_factory=dict)

    @property
    def cluster(self) -> Path:
        return self.folder / "cluster"

    def __call__(self, *argv: object, codes: tuple[int, ...] = (0,), **variables: str) -> str:
        environment = {**environment_of(self.folder, os.environ), "PATH": os.environ["PATH"], **variables}
        done = subprocess.run(
            [self.toolkit, *map(str, argv)], cwd=self.folder / "project", env=environment,
            capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
        if done.returncode not in codes:
            raise SystemExit(
                f"toolkit {' '.join(map(str, argv))} exited with {done.returncode}: {done.stdout}{done.stderr}"
            )
        return done.stdout

    def file(self, name: str, content: str) -> Path:
        path = self.folder / "project" / name
        path.write_text(content, encoding="utf-8")
        return path

    def submit(self, name: str, *argv: object, codes: tuple[int, ...] = (0,)) -> str:
        """Submit, wait for the end, and note the run under its sample's name."""
        self.names[name] = self("submit", *argv, "--parsable").strip().partition(";")[2]
        self("wait", self.names[name], codes=codes)
        return self.names[name]

    def shell(self, name: str, command: str, keys: str = "") -> Path:
        return self.file(f"{name}.toml", SHELL.format(name=name, command=command, keys=keys))


def make_local_runs(make: Workshop) -> None:
    """Runs of site local: completed, resumed, failed and stopped ones."""
    local = ("--site", "local")
    make("jobs", "copy", "train_lm", "train_lm")
    shutil.move(make.folder / "project" / "train_lm" / "train_lm.py", make.folder / "project" / "train_lm.py")
    shutil.rmtree(make.folder / "project" / "train_lm")
    make.file("text.txt", "the quick brown fox jumps over the lazy dog\n" * 20)
    make.submit("completed", make.file("completed.toml", TINY.format(name="completed", ranks=1, steps=5)), *local)
    resumed = make.submit("resumed", make.file("resumed.toml", TINY.format(name="resumed", ranks=2, steps=3)), *local)
    make("resume", resumed, "--set", "train.steps=6", "--wait")
    make.file("raises.py", RAISES)
    failed = '[job]\nname = "failed"\nentry = "raises.py:main"\n[restart]\ncrashes = 1\n'
    make.submit("failed", make.file("failed.toml", failed), *local, codes=(1,))
    make.file("says.py", SAYS)
    script = '[job]\nname = "script"\nentry = "says.py"\nranks_per_node = 2\n'
    make.submit("script", make.file("script.toml", script), *local)
    again = make.submit("failed-then-resumed", make.shell("failed-then-resumed", FAILS_ONCE), *local, codes=(1,))
    make("resume", again, "--wait")
    stopped = TINY.format(name="stopped", ranks=1, steps=1_000_000)
    submitted = make("submit", make.file("stopped.toml", stopped), *local, "--parsable")
    make.names["stopped"] = submitted.strip().partition(";")[2]
    run = next((make.folder / "runs" / "stopped").iterdir())
    wait_for(lambda: list((run / "checkpoints").glob("step-*")))
    make("stop", make.names["stopped"])
    make("wait", make.names["stopped"], codes=(130,))


def make_slurm_runs(make: Workshop) -> None:
    """Runs of a dev cluster: one job, an array, a sweep, repeated jobs, one that never started, a session."""
    make.submit("slurm", make.shell("slurm", "echo hello from $SLURM_JOB_ID"))
    make.submit("slurm-failed", make.shell("slurm-failed", "echo it fails; exit 3"), codes=(3,))
    make.submit("array", make.shell("array", "echo task $SLURM_ARRAY_TASK_ID"), "-a", "0-2")
    sweep = make.shell("sweep", "echo seed $SEED; test $SEED != 3")
    make.submit("sweep", sweep, "--sweep", "env.vars.SEED=2,3", codes=(1,))
    make.submit("repeated", make.shell("repeated", IS_LOST_ONCE), "--repeat", "3")
    trained = make.file("slurm-trained.toml", TINY.format(name="slurm-trained", ranks=2, steps=2))
    make.submit("slurm-trained", trained)
    held = make("submit", make.shell("held", "true"), "-d", "afterany:" + job_of(make, "held-blocker"), "--parsable")
    make.names["held"] = held.strip().partition(";")[2]
    make("session", "start", "--name", "dev", "-N", 1, "-t", 5)
    make("run", make.shell("in-session", "echo in job $SLURM_JOB_ID"), "--session", "dev")
    (run,) = (make.folder / "runs" / "in-session").iterdir()
    make.names["in-session"] = run.name


def job_of(make: Workshop, name: str) -> str:
    """A job that keeps another one waiting until the cluster is taken down."""
    return make("submit", make.shell(name, "sleep 600"), "--parsable").strip().partition(";")[0]


@contextmanager
def slurm(make: Workshop) -> Iterator[None]:
    devcluster = ("devcluster", "--name", f"samples-{os.getpid()}", "--folder", make.cluster)
    make(*devcluster, "up", "--nodes", 2, "--gpus", 2)
    try:
        yield
    finally:
        make(*devcluster, "down")


def answers_of(make: Workshop, variables: Mapping[str, str]) -> dict[str, Any]:
    """What the old version prints of the runs once Slurm has forgotten their jobs."""
    answers: dict[str, Any] = {"names": make.names}
    for command in COMMANDS:
        answers[command] = {
            name: json.loads(make(command, run_id, "--json", codes=(0, 1), **variables))
            for name, run_id in make.names.items()
        }
    answers["history"] = json.loads(make("history", "-n", 0, "--json", **variables))
    answers["session"] = json.loads(make("session", "ls", "--json", **variables))
    answers["ckpt show"], answers["ckpt verify"] = {}, {}
    for name, run_id in make.names.items():
        run = next((make.folder / "runs").glob(f"*/{run_id}"))
        if list(run.glob("checkpoints/step-*")):
            answers["ckpt show"][name] = json.loads(make("ckpt", "show", run_id, "--json", **variables))
            answers["ckpt verify"][name] = json.loads(make("ckpt", "verify", run_id, "--full", "--json", **variables))
    return answers


@contextmanager
def unchanged(folder: Path, names: tuple[str, ...]) -> Iterator[None]:
    """Restore folders after the block: `session ls` removes a session that it finds lost, `status` writes caches."""
    for name in names:
        shutil.copytree(folder / name, folder / "before" / name)
    yield
    for name in names:
        shutil.rmtree(folder / name)
        shutil.move(folder / "before" / name, folder / name)


def pack(make: Workshop, path: Path) -> None:
    """Pack projects, runs, sessions and answers, with marks in place of this machine's folders."""
    checkout = make.toolkit.parents[2]
    marks = {
        str(make.folder): FOLDER_MARK,
        str(make.toolkit.parent / "python"): PYTHON_MARK,
        str(checkout): OLD_CHECKOUT,
    }
    kept = ("answers.json", "here.toml", "home", "project", "runs")
    with tarfile.open(path, "w:gz", compresslevel=9) as packed:
        for file in sorted(file for name in kept for file in [make.folder / name, *(make.folder / name).rglob("*")]):
            inside = file.relative_to(make.folder)
            if not {".cache", ".config", "__pycache__"} & set(inside.parts):
                replace_in(file, marks)
                packed.add(file, arcname=str(inside), recursive=False)


def wait_for(condition: Callable[[], object], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("waited in vain")
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("toolkit", type=Path, help="the old version's command, in its own environment")
    parser.add_argument("packed", type=Path)
    parser.add_argument("--folder", type=Path, default=Path.home() / ".toolkit" / f"samples-{os.getpid()}")
    asked = parser.parse_args()
    make = Workshop(asked.folder, asked.toolkit.absolute())
    for name in ("project", "home", "runs"):
        (make.folder / name).mkdir(parents=True)
    conf = make.cluster / "etc" / "slurm.conf"
    site = f'name = "here"\nextends = "devcluster"\n[scheduler]\nconf = "{conf}"\n'
    (make.folder / "here.toml").write_text(site, encoding="utf-8")
    make_local_runs(make)
    with slurm(make):
        make_slurm_runs(make)
    write_fake_slurm(make.folder / "bin", JOB_IS_UNKNOWN)
    conf.parent.mkdir(parents=True)
    conf.touch()
    path = f"{make.folder / 'bin'}:/usr/bin:/bin"
    with unchanged(make.folder, ("home", "runs")):
        answers = answers_of(make, {"PATH": path})
    (make.folder / "answers.json").write_text(json.dumps(answers, indent=1), encoding="utf-8")
    pack(make, asked.packed)
    shutil.rmtree(make.folder)
    print(f"{asked.packed}: {asked.packed.stat().st_size / 1e3:.0f} kB, {len(make.names)} runs")


if __name__ == "__main__":
    main()
