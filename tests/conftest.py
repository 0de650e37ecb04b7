"""What several packages' tests start from: an empty run, a job as the compute half reads it, the command line."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_slurm import FakeSlurm
from hypothesis import settings
from projects import SAYS, git

from toolkit.rundir.layout import RunDirectory, create_run
from toolkit.runs.follow import follow
from toolkit.runs.logs import logs

# A rank that a test forks costs an import of what stands here no more. There is one fork server for all tests of a
# process, and it imports what it was told first: a list of each test's own would leave the others' ranks to import.
# `_dynamo` is what DDP needs; fake_pg plays ranks.
FORKED_WITH = (
    "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel",
    "torch.testing._internal.distributed.fake_pg", "matplotlib.backends.backend_agg", "matplotlib.figure",
    "toolkit.jobs.train_lm", "toolkit.comm.communicator", "toolkit.comm.gradient",
)  # fmt: skip


def pytest_configure() -> None:
    multiprocessing.set_forkserver_preload(list(FORKED_WITH))
    # Tests share their machine with each other: how long one example took says nothing. pytest-timeout ends what hangs.
    settings.register_profile("shared machine", settings(), deadline=None)
    settings.load_profile("shared machine")
    _hear_signals()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Alternate files whose tests wait with files whose tests compute, so that workers run both at once."""
    files = dict.fromkeys(item.path for item in items)
    waiting = [file for file in files if file.parent.name in ("supervise", "world")]
    computing = [file for file in files if file.parent.name in ("parallel", "train")]
    position = {file: (number, 0) for number, file in enumerate(files)}
    position |= {file: (position[beside][0], 1) for file, beside in zip(waiting, computing, strict=False)}
    items.sort(key=lambda item: position[item.path])


def _hear_signals() -> None:
    """Hear signals that the starter of the tests has ignored, as `nohup` and a shell's `&` do: commands inherit that."""
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)


@pytest.fixture(autouse=True)
def no_job_is_left_in_the_environment() -> Iterator[None]:
    """A test that leaves `SLURM_JOB_ID` behind makes the tests after it part of a job that does not exist."""
    before = _variables_of_jobs()
    yield
    after = _variables_of_jobs()
    for name in after.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
    assert after == before, "the test leaves other variables of jobs behind"


def _variables_of_jobs() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(("SLURM", "SBATCH_", "TOOLKIT_"))}


@pytest.fixture(autouse=True)
def index_of_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Give each test an index of its own, which also its commands use: no test finds the runs of another one."""
    index = tmp_path_factory.mktemp("index") / "folders"
    with pytest.MonkeyPatch.context() as patch:  # a test's own monkeypatch must end before the check below
        patch.setenv("TOOLKIT_INDEX", str(index))
        yield index


@pytest.fixture
def run_directory(tmp_path: Path) -> RunDirectory:
    return create_run(tmp_path / "runs", "sample")


@pytest.fixture
def local_job(tmp_path: Path):
    """Resolve a job for the site `local`: the dict that the supervisor reads. `files` lie beside the job file."""
    from toolkit.config.request import resolve_job
    from toolkit.site.load import load_site

    def resolve(entry, *, ranks=2, launcher="local", files=None, restart="crashes = 0"):
        for name, text in (files or {}).items():
            (tmp_path / name).write_text(text)
        path = tmp_path / "sample.toml"
        path.write_text(f"[job]\nentry = {json.dumps(entry)}\nranks_per_node = {ranks}\n[restart]\n{restart}\n")
        job = json.loads(resolve_job(path, site=load_site("local"), environ={}).to_json())
        job["launcher"]["kind"] = launcher
        return job

    return resolve


@dataclass(frozen=True)
class Said:
    """What one command left."""

    code: int
    out: str
    err: str


@dataclass
class CommandLine:
    """Calls `toolkit` as a user types it, in this process, with RUNS in a folder of the test's own and site `local`."""

    folder: Path
    capture: pytest.CaptureFixture[str]
    patch: pytest.MonkeyPatch

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    def __call__(self, *argv: object) -> Said:
        from toolkit.cli.main import main

        self.capture.readouterr()
        self.patch.setattr(sys, "argv", ["toolkit", *map(str, argv)])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = self.capture.readouterr()
        return Said(int(end.value.code or 0), out, err)

    def ok(self, *argv: object) -> str:
        """A call that must succeed; its stdout."""
        said = self(*argv)
        assert said.code == 0, said
        return said.out

    def job(self, command: str, *, name: str = "work", more: str = "") -> Path:
        """A job whose every rank runs a line of shell, without torch. Further tables come from `more`."""
        path = self.folder / f"{name}.toml"
        path.write_text(f"[job]\nentry = ['bash', '-c', '''{command}''', 'rank']\n{more}", encoding="utf-8")
        return path

    def submit(self, job: Path, *argv: object) -> RunDirectory:
        """Submit; the run's directory."""
        run_id = self.ok("submit", job, "--parsable", *argv).strip().partition(";")[2]
        return self.run(run_id)

    def run(self, run_id: str) -> RunDirectory:
        (path,) = self.runs.glob(f"*/{run_id}")
        return RunDirectory(path)

    def end_runs(self) -> None:
        """Kill the supervisors and ranks of all runs: a test that failed, or ran out of time, has not waited for them."""
        deadline = time.monotonic() + 10
        while living := _processes_of(self.runs):
            assert time.monotonic() < deadline, f"they do not die: {living}"
            for pid in living:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


def _processes_of(runs: Path) -> list[int]:
    """Supervisors have their run among their arguments, ranks in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile
            supervises = b"toolkit.supervise\0" + os.fsencode(runs) in (folder / "cmdline").read_bytes()
            if supervises or b"TOOLKIT_RUN_DIR=" + os.fsencode(runs) in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


@pytest.fixture
def toolkit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[CommandLine]:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "SBATCH_", "TOOLKIT_")) and name not in (
            "TOOLKIT_REQUIRE_CLUSTER",
            "TOOLKIT_INDEX",
        ):
            monkeypatch.delenv(name)
    monkeypatch.setenv("TOOLKIT_SITE", "local")
    monkeypatch.setenv("TOOLKIT_RUNS", str(tmp_path / "runs"))
    command_line = CommandLine(tmp_path, capsys, monkeypatch)
    yield command_line
    command_line.end_runs()


@pytest.fixture
def dev_cluster_conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The slurm.conf of site `devcluster`, for tests in which small programs stand for Slurm's commands."""
    conf = tmp_path / "home" / ".toolkit" / "devcluster" / "etc" / "slurm.conf"
    conf.parent.mkdir(parents=True)
    conf.touch()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return conf


class Terminal:
    """A command on a terminal of its own, as in somebody's window: Ctrl-C and hang-up are the kernel's."""

    def __init__(self, argv: list[str], *, cwd: Path, env: dict[str, str]) -> None:
        self.screen = ""
        self.keyboard, inside = pty.openpty()
        self.process = subprocess.Popen(
            argv, stdin=inside, stdout=inside, stderr=inside, cwd=cwd, env=env, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(inside)

    def type(self, text: str) -> None:
        os.write(self.keyboard, text.encode())

    def interrupt(self) -> None:
        self.type("\x03")

    def until(self, words: str, timeout_s: float = 120.0) -> None:
        """Read until the screen shows `words`."""
        deadline = time.monotonic() + timeout_s
        while words not in self.screen:
            assert self._read() and time.monotonic() < deadline, f"no {words!r} on the screen: {self.screen[-3000:]}"

    def wait(self, timeout_s: float = 120.0) -> int:
        """The command's exit code, after everything that it wrote was read."""
        deadline = time.monotonic() + timeout_s
        while self._read() or self.process.poll() is None:
            assert time.monotonic() < deadline, f"it goes on: {self.screen[-3000:]}"
        return self.process.wait()

    def hang_up(self) -> None:
        os.close(self.keyboard)

    def _read(self) -> bool:
        """Take what is there; False once nobody can write any more."""
        if select.select([self.keyboard], [], [], 0.2)[0]:
            try:
                data = os.read(self.keyboard, 65536)
            except OSError:  # EIO: the last program has closed the terminal
                return False
            self.screen += data.decode("utf-8", "replace")
        return self.process.poll() is None or bool(select.select([self.keyboard], [], [], 0)[0])


@pytest.fixture
def terminal() -> type[Terminal]:
    return Terminal


@pytest.fixture
def note_calls(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Have a function of one argument note `of(argument)` each time before it does its work."""

    def note(owner: object, name: str, of: Callable[..., str]) -> list[str]:
        noted: list[str] = []
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda argument: noted.append(of(argument)) or real(argument))
        return noted

    return note


@pytest.fixture
def wait_until() -> Callable[..., None]:
    """Wait for a condition, at most `timeout_s`."""

    def wait(condition: Callable[[], object], timeout_s: float = 240.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.05)

    return wait


@pytest.fixture
def fake_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Slurm's commands as programs in `tmp_path/bin`; without accounting, and none other until a test adds it."""
    slurm = FakeSlurm(tmp_path / "bin")
    slurm.without_accounting()
    monkeypatch.setenv("PATH", f"{slurm.folder}:/usr/bin:/bin")
    return slurm


@pytest.fixture
def squeue(fake_slurm: FakeSlurm) -> Callable[..., Callable[[], list[str]]]:
    """Set the queue to rows of (id, state, reason); returns a function that lists the calls of squeue."""

    def set_queue(*rows: tuple[str, ...]) -> Callable[[], list[str]]:
        fake_slurm.queue(*rows)
        return lambda: fake_slurm.calls("squeue")

    return set_queue


@pytest.fixture
def sbatch(squeue: object, fake_slurm: FakeSlurm) -> None:
    """Make sbatch accept each script as job 8."""
    fake_slurm.respond("sbatch", "8\n")
    fake_slurm.respond("srun", code=1)


@pytest.fixture
def clock(monkeypatch):
    """Seconds that only sleeping moves; `clock.at` are things to do once a time has come."""

    class Clock:
        def __init__(self):
            self.now, self.at = 0.0, []

        def sleep(self, seconds):
            self.now += seconds
            for time_s, action in [entry for entry in self.at if entry[0] <= self.now]:
                action()
                self.at.remove((time_s, action))

    clock = Clock()
    for module in (follow, logs):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=clock.sleep))
    return clock


@pytest.fixture
def project(toolkit) -> Path:
    """A job of one script with a module and a file of data beside it, in a folder that no repository has."""
    folder = toolkit.folder / "project"
    folder.mkdir()
    (folder / "train.py").write_text(SAYS)
    (folder / "helper.py").write_text("WORD = 'as submitted'\n")
    (folder / "data.txt").write_text("data")
    (folder / "work.toml").write_text('[job]\nentry = "train.py"\n')
    return folder


@pytest.fixture
def repository(project: Path) -> Path:
    (project / ".gitignore").write_text("*.txt\ncache/\n")
    (project / "cache").mkdir()
    (project / "cache" / "big").write_text("big")
    git(project, "init", "-q")
    git(project, "add", ".")
    git(project, "commit", "-qm", "first")
    return project
