"""What a node's ranks use is sampled from outside them: CPU time, memory, GPUs; a small file that says how far it sees."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from toolkit.rundir.claims import claim_attempt
from toolkit.rundir.files import read_json
from toolkit.rundir.layout import AttemptDirectory
from toolkit.supervise.collecting import collection_of_node
from toolkit.supervise.gpus import nvidia_gpus
from toolkit.supervise.usage import NodeUsage, Process, descendants

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
    assert len(dict(descendants(launcher.pid))) == 3


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
    found = collection_of_node(AttemptDirectory(tmp_path), rank, 1, {"TOOLKIT_RANKS_PER_NODE": per_node})
    assert (found is not None) == samples
    assert found is None or found.first_rank == rank


@pytest.mark.parametrize(("local_rank", "samples"), [("0", True), ("1", False)])
def test_under_srun_the_nodes_need_not_have_as_many_ranks(tmp_path, local_rank, samples):
    environ = {"TOOLKIT_LAUNCHER": "srun", "SLURM_LOCALID": local_rank, "TOOLKIT_RANKS_PER_NODE": "1,4"}
    assert (collection_of_node(AttemptDirectory(tmp_path), 5, 1, environ) is not None) == samples


def test_a_node_whose_ranks_step_seldom_checks_for_a_request_of_stacks(run_directory):
    attempt, signals = claim_attempt(run_directory), []
    state = SimpleNamespace(signal_guards=signals.append)
    collection = collection_of_node(attempt, 0, 1, {"TOOLKIT_RANKS_PER_NODE": "1", "TOOLKIT_LAUNCHER": "mpirun"})
    collection._ask_for_stacks(state)
    attempt.stacks_request.write_text("another node\n")
    collection._request_at, collection._stepped_at = math.inf, time.monotonic()
    collection._ask_for_stacks(state)
    assert not signals
    collection._stepped_at = -math.inf  # the ranks stall
    collection._ask_for_stacks(state)
    collection._ask_for_stacks(state)
    assert signals == [signal.SIGUSR1]
    managed = collection_of_node(attempt, 0, 1, {"SLURM_LOCALID": "0", "TOOLKIT_LAUNCHER": "srun"})
    managed._ask_for_stacks(state)  # srun forwards the request
    assert len(signals) == 1


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


class Hopper(Nvml):
    """A GPU with GPM on which two ranks have memory, and a process of another user."""

    NVML_TEMPERATURE_GPU = NVML_TEMPERATURE_THRESHOLD_SLOWDOWN = NVML_MEMORY_ERROR_TYPE_UNCORRECTED = (
        NVML_VOLATILE_ECC
    ) = 0
    NVML_GPM_METRICS_GET_VERSION, NVML_GPM_METRIC_GRAPHICS_UTIL, NVML_GPM_METRIC_ANY_TENSOR_UTIL = 1, 1, 5

    def __init__(self, **answers):
        super().__init__()
        self.answers, self.freed = answers, []

    nvmlDeviceGetCount = staticmethod(lambda: 1)
    nvmlDeviceGetTemperature = staticmethod(lambda handle, kind: 61)
    nvmlDeviceGetMemoryInfo = staticmethod(lambda handle: SimpleNamespace(total=80, used=30, free=50))
    nvmlGpmSampleAlloc = staticmethod(object)
    nvmlGpmSampleGet = staticmethod(lambda handle, sample: sample)

    def __getattr__(self, name):
        if name in self.answers:
            return lambda *_: self.answers[name]
        if name.startswith("nvml"):
            return self._not_supported
        raise AttributeError(name)

    def _not_supported(self, *_):
        raise self.NVMLError

    def c_nvmlGpmMetricsGet_t(self):
        return SimpleNamespace(metrics=[SimpleNamespace() for _ in range(10)])

    def nvmlGpmMetricsGet(self, request):
        assert request.sample1 is not request.sample2
        for metric in request.metrics[: request.numMetrics]:
            metric.value = {1: 62.5, 5: 37.5}[metric.metricId]

    def nvmlGpmSampleFree(self, sample):
        self.freed.append(sample)


def process(pid, memory):
    return SimpleNamespace(pid=pid, usedGpuMemory=memory)


def test_the_state_of_a_gpu_names_its_ranks_and_their_memory():
    nvml = Hopper(
        nvmlDeviceGetComputeRunningProcesses=[process(11, 20), process(12, 5), process(13, 3), process(99, 7)],
        nvmlGpmQueryDeviceSupport=SimpleNamespace(isSupportedDevice=1),
        nvmlDeviceGetTemperatureThreshold=90, nvmlDeviceGetCurrentClocksThrottleReasons=8 | 64,
    )  # fmt: skip
    gpus = nvidia_gpus(None, nvml)
    ((first, _),) = gpus.states("n1", 5.0, {11: 3, 12: 4, 13: 3})
    ((second, memory),) = gpus.states("n1", 6.0, {11: 3, 12: 4, 13: 3})
    assert (first.ranks, first.throttle, first.hot_c, first.ecc_errors) == (
        (3, 4),
        ("hw_slowdown", "hw_thermal"),
        90.0,
        None,
    )
    assert (first.tensor, second.tensor, len(nvml.freed)) == (None, 0.375, 1)
    assert (first.busy, second.busy) == (0.5, 0.625)  # of the last second, since the last sample
    assert [(one.rank, one.pool, one.used_bytes, one.free_bytes) for one in memory] == [
        (3, "gpu 0", 23, 50),
        (4, "gpu 0", 5, 50),
    ]


def test_a_gpu_without_these_counters_has_a_state_without_them():
    ((state, memory),) = nvidia_gpus(None, Hopper()).states("n1", 5.0, {11: 3})
    assert (state.temperature_c, state.ranks, state.tensor, memory) == (61.0, (), None, [])
    assert list(nvidia_gpus("1", Nvml()).states("n1", 5.0, {})) == []  # partitioned (MIG)


def test_a_run_leaves_one_file_a_node(toolkit):
    run = toolkit.submit(toolkit.job("sleep 0.1"), "-n", 2, "--wait")
    (path,) = run.attempt(0).usage.iterdir()
    assert path.name == "rank-00000.json"
    told = read_json(path)
    assert told["ranks"] in (1, 2) and told["memory_peak_bytes"] > 1_000_000
