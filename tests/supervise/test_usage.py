"""What a node's ranks use is sampled from outside them: CPU time, memory, GPUs; a small file that says how far it sees."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from toolkit.rundir.files import read_json
from toolkit.rundir.layout import AttemptDirectory
from toolkit.supervise.usage import NodeUsage, Process, descendants, memory_of, nvidia_gpus, usage_of_node

# A launcher with two ranks, of which the first has had a child that worked, and has one that holds memory; a line tells
# it to end.
LAUNCHER = """
import subprocess, sys
rank = (
    "import subprocess, sys; python = sys.executable; "
    "subprocess.run([python, '-c', 'sum(range(40_000_000))']); "
    "hold = 'x = bytearray(60_000_000); print(1, flush=True); input()'; subprocess.run([python, '-c', hold])"
)
ranks = [subprocess.Popen([sys.executable, "-c", rank]), subprocess.Popen(["sleep", "60"])]
ranks[0].wait()
ranks[1].kill()
"""


@pytest.fixture
def launcher():
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "1\n"
    yield process
    if process.poll() is None:
        process.communicate("\n")


def test_all_that_the_ranks_of_a_node_started_is_counted(tmp_path, launcher):
    path = tmp_path / "usage.json"
    usage = NodeUsage(path, launcher.pid, first_rank=4)
    usage.sample()
    told = json.loads(path.read_text())
    assert (told["first_rank"], told["ranks"], told["samples"], told["gpus"]) == (4, 2, 1, None)
    assert 0.25 < told["cpu_s"] < 60
    assert 60_000_000 < told["memory_peak_bytes"] < 400_000_000
    assert len(dict(descendants(launcher.pid))) == 3 and memory_of(launcher.pid).peak_bytes > 0


def test_what_has_ended_is_not_forgotten(tmp_path, launcher):
    usage = NodeUsage(tmp_path / "usage.json", launcher.pid, first_rank=0)
    usage.sample()
    before = json.loads(usage.path.read_text())
    launcher.communicate("\n")
    usage.finish()
    after = json.loads(usage.path.read_text())
    assert after["samples"] == 2
    # Until the last look it was all there, whatever that look finds itself.
    assert 60_000_000 < after["memory_mean_bytes"] <= after["memory_peak_bytes"]
    assert all(after[name] >= before[name] for name in ("cpu_s", "memory_peak_bytes", "ranks"))


def test_the_cpus_that_were_busy_at_once(tmp_path, launcher):
    """Two processes for a while: more than the mean of the whole time, and never more than there are processes."""
    usage = NodeUsage(tmp_path / "usage.json", launcher.pid, first_rank=0)
    usage._sampled_s = usage.cpu_s = 0.0
    usage.began -= 100.0
    for cpu_s in (10.0, 18.0, 18.5):
        usage._add({1: Process(0, cpu_s)})
        usage.began -= 4.0
    assert usage.cpus_peak == pytest.approx(2.0, rel=0.05) and usage.cpu_s == 18.5


def test_a_disk_that_takes_nothing_ends_no_rank(tmp_path):
    NodeUsage(tmp_path / "missing" / "usage.json", 1, first_rank=0).sample()


@pytest.mark.parametrize(
    ("rank", "per_node", "samples"), [(0, "4", True), (4, "4", True), (3, "4", False), (0, "", False)]
)
def test_the_first_rank_of_a_node_samples(tmp_path, rank, per_node, samples):
    usage = usage_of_node(AttemptDirectory(tmp_path), rank, {"TOOLKIT_RANKS_PER_NODE": per_node})
    assert (usage is not None) == samples
    assert usage is None or usage.path.name == f"rank-{rank:05}.json"


@pytest.mark.parametrize(("local_rank", "samples"), [("0", True), ("1", False)])
def test_under_srun_the_nodes_need_not_have_as_many_ranks(tmp_path, local_rank, samples):
    environ = {"TOOLKIT_LAUNCHER": "srun", "SLURM_LOCALID": local_rank, "TOOLKIT_RANKS_PER_NODE": "1,4"}
    assert (usage_of_node(AttemptDirectory(tmp_path), 5, environ) is not None) == samples


class Nvml:
    """Two GPUs: one works and fills up, the other one cannot tell (MIG)."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, broken=False):
        self.broken, self.busy = broken, iter([50, 100, 0, 0])

    def nvmlInit(self):
        if self.broken:
            raise self.NVMLError

    nvmlDeviceGetCount = staticmethod(lambda: 2)
    nvmlDeviceGetHandleByIndex = staticmethod(lambda index: index)
    nvmlDeviceGetUUID = staticmethod(lambda handle: f"GPU-{handle}abc".encode())

    def nvmlDeviceGetUtilizationRates(self, handle):
        if handle == 1:
            raise self.NVMLError
        return SimpleNamespace(gpu=next(self.busy))

    nvmlDeviceGetMemoryInfo = staticmethod(lambda handle: SimpleNamespace(total=80, used=30))


def test_gpus_as_nvml_tells_them():
    gpus = nvidia_gpus(None, Nvml())
    gpus.sample()
    (told,) = (one.as_json() for one in gpus.sample())
    assert told == {
        "uuid": "GPU-0abc",
        "utilisation": 0.75,
        "utilisation_peak": 1.0,
        "memory_peak_bytes": 30,
        "memory_bytes": 80,
    }
    assert list(nvidia_gpus("1", Nvml()).handles) == list(nvidia_gpus("GPU-1", Nvml()).handles) == ["GPU-1abc"]
    assert nvidia_gpus(None, Nvml(broken=True)) is None


def test_a_run_leaves_one_file_a_node(toolkit):
    run = toolkit.submit(toolkit.job("sleep 0.1"), "-n", 2, "--wait")
    (path,) = run.attempt(0).usage.iterdir()
    assert path.name == "rank-00000.json"
    told = read_json(path)
    assert told["ranks"] in (1, 2) and told["memory_peak_bytes"] > 1_000_000
