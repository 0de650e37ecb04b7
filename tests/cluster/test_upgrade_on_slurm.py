"""Jobs of toolkit ad6182e finish after an upgrade in place: a running and a queued one, through a crash and a requeue."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest
from on_slurm import Site, is_stepping, wait_for
from sampling import sampled

import toolkit
from toolkit.rundir.layout import RunDirectory

pytestmark = pytest.mark.cluster

OLD_SOURCES = Path(__file__).parents[1] / "upgrade" / "sources_of_ad6182e.tar.xz"
DATA_PACKAGES = ("jobs", "templates", "site_configs")  # beside toolkit/ in the repository, below it once installed
COMMAND = "import sys; from toolkit.cli.main import main; sys.argv[0] = 'toolkit'; main()"
START_S = 60


@dataclass
class Installation:
    """An environment of its own, whose toolkit is replaced while its jobs are queued or run."""

    folder: Path
    here: Site

    @property
    def python(self) -> Path:
        return self.folder / "venv" / "bin" / "python"

    def install_old(self) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self.folder / "venv"], check=True)
        (packages,) = (self.folder / "venv" / "lib").glob("python*/site-packages")
        # Python does not process the .pth files of a path that a .pth file adds: this checkout's own is among them.
        dependencies = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
        (packages / "toolkit.pth").write_text("\n".join([str(self.folder / "installed"), *dependencies]) + "\n")
        with tarfile.open(OLD_SOURCES) as archive:
            archive.extractall(self.folder / "installed", filter="data")

    def upgrade(self) -> None:
        """Put this checkout's toolkit where the old one was."""
        new = self.folder / "new"
        no_caches = shutil.ignore_patterns("__pycache__")
        shutil.copytree(Path(toolkit.__file__).parent, new / "toolkit", ignore=no_caches)
        for name in DATA_PACKAGES:
            source = Path(str(import_module(f"toolkit.{name}").__file__)).parent
            shutil.copytree(source, new / "toolkit" / name, ignore=no_caches, dirs_exist_ok=True)
        (self.folder / "installed").rename(self.folder / "before")
        new.rename(self.folder / "installed")
        shutil.rmtree(self.folder / "before")

    def ok(self, *argv: object) -> str:
        done = self.here.command([str(self.python), "-P", "-c", COMMAND, *map(str, argv)])
        assert done.returncode == 0, done
        return done.stdout

    def submit(self, job: Path, *argv: object) -> tuple[str, RunDirectory]:
        job_id, _, run_id = self.ok("submit", job, "--parsable", *argv).strip().partition(";")
        return job_id, self.here.run(run_id)


@pytest.fixture
def installed(here: Site) -> Installation:
    made = Installation(here.folder, here)
    made.install_old()
    return made


def crash(here: Site, run: RunDirectory, attempt: int) -> None:
    """Kill a rank, as an error in native code would; the next attempt must start."""
    rank = json.loads(run.attempt(attempt).rank_file(0).read_text())
    assert here.cluster.exec(rank["host"], ["kill", "-9", str(rank["pid"])]).returncode == 0
    wait_for(is_stepping(run, attempt + 1), START_S)


def package_folder(installed: Installation) -> str:
    """The folder from which the environment imports toolkit."""
    probe = "import toolkit; print(toolkit.__path__[0])"
    done = subprocess.run([installed.python, "-P", "-c", probe], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("state", sampled(["running", "queued"], lambda case: case[0] == "running"))
def test_a_job_of_the_old_version_finishes_after_an_upgrade(here: Site, installed: Installation, state: str) -> None:
    assert package_folder(installed) == str(installed.folder / "installed" / "toolkit")
    job, enough = here.stepping(time="0:20:00", tables="[restart]\ncrashes = 1\n")
    hold = ("--set", 'job.sbatch=["--hold"]') if state == "queued" else ()
    job_id, run = installed.submit(job, *hold)
    if state == "running":
        wait_for(is_stepping(run, 0), START_S)
    installed.upgrade()
    if state == "queued":
        assert here.command(["scontrol", "release", job_id]).returncode == 0
        wait_for(is_stepping(run, 0), START_S)
    crash(here, run, 0)
    assert run.start_numbers() == [0]
    installed.ok("requeue", run.run_id)
    wait_for(lambda: run.start_numbers() == [0, 1] and is_stepping(run, 2)(), START_S)
    enough.touch()
    installed.ok("wait", run.run_id)
    status = json.loads(installed.ok("status", run.run_id, "--json"))
    assert (status["state"], status["job_id"], status["starts"], status["attempts"]) == ("completed", job_id, 2, 3)
    ends = [json.loads(run.attempt(number).exit_file.read_text()) for number in range(3)]
    assert [end["next"] for end in ends[:2]] == ["restart", "await_slurm"]
    assert installed.ok("explain", run.run_id) and installed.ok("history")
