"""What `pip install` brings: the wheel's files, and a run from an environment that has nothing of the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the tracked files alone, so that nothing untracked is packed by chance."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, source],
        check=True,
        capture_output=True,
    )
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_the_package_and_its_data_and_no_more(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    data = {
        f"toolkit/{folder.removeprefix('toolkit/')}/{path.name}"
        for folder, pattern in (
            ("jobs", "*.toml"), ("jobs", "*.py"), ("site_configs", "*.toml"), ("templates", "*.j2"), ("templates", "*.toml"), ("toolkit/observe/web", "*"),
        )
        for path in (ROOT / folder).glob(pattern)
    } | {
        "toolkit/topology/machines.toml", "toolkit/topology/nccl/nccl_variables.toml",
        *(f"toolkit/observe/data/{name}" for name in ("rules.yml", "series.json")),
    }  # fmt: skip
    code = {str(path.relative_to(ROOT)) for path in (ROOT / "toolkit").rglob("*.py")}
    assert data | code <= names, sorted((data | code) - names)
    rest = names - data - code
    marks = {
        "toolkit/py.typed",
        "toolkit/config/presets.toml",
        *(f"toolkit/{folder}/__init__.py" for folder in ("site_configs", "templates")),
    }
    assert rest == marks, rest


def installed(wheel: Path, folder: Path, *, borrowed: bool) -> Path:
    """A fresh environment with the wheel; `borrowed` takes the dependencies from ours, else pip brings them."""
    venv.create(folder, with_pip=not borrowed)
    python = folder / "bin" / "python"
    if borrowed:
        (site_packages,) = folder.glob("lib/python*/site-packages")
        argv = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", str(wheel)]
        (ours,) = {Path(path) for path in sys.path if path.endswith("site-packages")}
        (site_packages / "borrowed.pth").write_text(f"{ours}\n")  # our own editable finder is not a .pth path
    else:
        argv = [
            str(python),
            "-m",
            "pip",
            "install",
            "-q",
            "-c",
            str(ROOT / "constraints.txt"),
            f"{wheel}[train,mpi,plot]",
        ]
    subprocess.run(argv, check=True, capture_output=True, cwd=folder)
    return folder / "bin" / "toolkit"


def use(toolkit: Path, folder: Path, *argv: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TOOLKIT_", "PYTHON"))}
    done = subprocess.run([toolkit, *argv], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done
    return done.stdout


def test_installed_outside_the_checkout_it_runs_a_shipped_job(wheel: Path, tmp_path: Path) -> None:
    toolkit = installed(wheel, tmp_path / "venv", borrowed=True)
    python = toolkit.with_name("python")
    where = subprocess.run(
        [python, "-c", "import toolkit.jobs; print(toolkit.jobs.__path__)"], cwd=tmp_path, check=True, capture_output=True, text=True
    ).stdout  # fmt: skip
    assert str(tmp_path) in where and str(ROOT) not in where, where
    assert "devcluster" in use(toolkit, tmp_path, "site", "list").split()
    (tmp_path / "job.env").write_text("NCCL_NVLS_ENABLE=2\n")  # read from the table of NCCL's variables
    assert "the value is the default" in use(toolkit, tmp_path, "topo", "check", "--env-file", "job.env")
    use(toolkit, tmp_path, "submit", "mpi_hello", "--site", "local", "--wait")
    lines = use(toolkit, tmp_path, "logs", "--rank", "all").splitlines()
    said = [line for line in lines if "] toolkit: " not in line]  # rank 0 tells of its CPUs, too
    assert [line.partition(",")[0] for line in said] == [f"[{rank}] rank {rank} of 4" for rank in range(4)]


@pytest.mark.evidence
@pytest.mark.timeout(1200)
def test_installed_with_its_dependencies_it_trains(wheel: Path, tmp_path: Path) -> None:
    toolkit = installed(wheel, tmp_path / "venv", borrowed=False)
    use(toolkit, tmp_path, "submit", "mpi_hello", "--site", "local", "--wait")
    steps = ("--set", "train.steps=4", "--set", "train.batch=8", "-n", "2")
    use(toolkit, tmp_path, "submit", "train_lm", "--site", "local", "--wait", *steps)
    assert "completed" in use(toolkit, tmp_path, "status", "last")
