"""Signs of a node or a GPU that may soon fail: real cgroups where they can be made, their files elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from toolkit.world import health
from toolkit.world.health import HealthWatch, low_memory

GIB = 1 << 30


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def meminfo(available_gib: float) -> str:
    return f"MemTotal: {100 << 20} kB\nMemFree: 1 kB\nMemAvailable: {int(available_gib * (1 << 20))} kB\n"


def version_2(used_gib: float, cached_gib: float = 0) -> dict[str, str]:
    """Slurm's tree: the limit is the job's, and the step has none."""
    job, step = "sys/fs/cgroup/slurm/job_7", "sys/fs/cgroup/slurm/job_7/step_0/task_0"
    return {
        "proc/self/cgroup": "0::/slurm/job_7/step_0/task_0\n",
        "proc/meminfo": meminfo(50),
        f"{step}/memory.max": "max\n",
        f"{step}/memory.current": "5\n",
        f"{job}/memory.max": f"{10 * GIB}\n",
        f"{job}/memory.current": f"{int(used_gib * GIB)}\n",
        f"{job}/memory.stat": f"anon 5\nfile 7\ninactive_file {int(cached_gib * GIB)}\nactive_file 0\n",
    }


def test_the_limit_of_a_job_counts_for_its_steps(tmp_path):
    assert low_memory(tree(tmp_path / "free", version_2(9.5))) == ""
    assert (
        low_memory(tree(tmp_path / "full", version_2(9.9)))
        == "the cgroup /slurm/job_7 has 102 of 10240 MiB of memory left"
    )


def test_files_in_the_cache_are_free_memory(tmp_path):
    assert low_memory(tree(tmp_path, version_2(9.99, cached_gib=2))) == ""


def test_a_node_without_limits_counts_by_itself(tmp_path):
    plain = {"proc/self/cgroup": "0::/\n"}
    assert low_memory(tree(tmp_path / "free", plain | {"proc/meminfo": meminfo(4)})) == ""
    assert low_memory(tree(tmp_path / "full", plain | {"proc/meminfo": meminfo(2)})) == (
        "the node has 2048 of 102400 MiB of memory left"
    )
    assert low_memory(tmp_path / "nothing there") == ""


@pytest.fixture
def real_cgroup():
    """A cgroup of version 1 with a limit of 64 MiB."""
    folder = Path(f"/sys/fs/cgroup/memory/toolkit-test-{os.getpid()}")
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup of version 1 can be made here: {error}")
    (folder / "memory.limit_in_bytes").write_text(str(64 << 20))
    yield folder
    folder.rmdir()


def test_a_real_cgroup_that_fills_up_is_seen(real_cgroup):
    program = (
        "import pathlib, sys, os; sys.path.insert(0, os.getcwd());"
        f"pathlib.Path({str(real_cgroup / 'cgroup.procs')!r}).write_text('0');"
        "from toolkit.world.health import low_memory; print(repr(low_memory()));"
        "used = int(pathlib.Path(sys.argv[1]).read_text());"
        "held = bytearray((64 << 20) - used - (1 << 20)); print(repr(low_memory()))"
    )
    usage = real_cgroup / "memory.usage_in_bytes"
    done = subprocess.run(
        [sys.executable, "-c", program, usage], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    before, after = done.stdout.splitlines()
    assert before == "''", done.stderr
    assert real_cgroup.name in after and "of 64 MiB of memory left" in after


def test_a_sign_is_told_once_and_looked_for_once_a_minute(tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(health.time, "monotonic", lambda: now[0])
    watch = HealthWatch(root=tree(tmp_path, version_2(5)))
    assert watch.look() == ""
    tree(tmp_path, version_2(9.9))
    now[0] += 59
    assert watch.look() == ""
    now[0] += 2
    assert "job_7" in watch.look()
    now[0] += 61
    assert watch.look() == ""


class Nvml(types.ModuleType):
    """NVML of a GPU with some errors; there is none on the machines of the tests."""

    NVMLError = RuntimeError
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0

    def __init__(self, errors: int, pending: int, ecc: bool = True) -> None:
        super().__init__("pynvml")
        self.errors, self.pending, self.ecc = errors, pending, ecc

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetTotalEccErrors(self, handle: str, kind: int, since: int) -> int:
        if not self.ecc:
            raise RuntimeError("Not Supported")
        return self.errors

    def nvmlDeviceGetRemappedRows(self, handle: str) -> tuple[int, int, int, int]:
        return 3, self.errors, self.pending, 0


def test_only_what_is_new_on_a_gpu_counts(monkeypatch):
    nvml = Nvml(errors=7, pending=0)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    gpu = health.GpuErrors("GPU-1")
    assert gpu.look() == ""
    nvml.errors, nvml.pending = 9, 1
    assert gpu.look() == ("GPU-1: 2 uncorrectable memory errors, 1 row remappings pending since the attempt began")


def test_a_gpu_that_counts_no_errors_has_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(5, 5, ecc=False))
    assert health.GpuErrors("GPU-1").look() == ""
