"""The CPUs and threads that a rank sets before it meets the others, with a line in its log."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from sampling import sampled

from toolkit.rank.preparation import set_processors
from toolkit.world.facts import World
from toolkit.world.physical_gpu import PhysicalGpu

ALL = frozenset(range(8))
JOB = {"job": {"bind": "auto", "cpus_per_rank": 1}, "origins": {}}
GPUS = [PhysicalGpu(f"GPU-{place}", f"00000000:0{place}:00.0") for place in range(2)]
ON_GPU = World(0, 0, 2, 2, 0, 1, "node0", "cuda:0", "local", "a test")
ON_CPU = replace(ON_GPU, device="cpu")


@pytest.fixture
def held(monkeypatch):
    """The masks that this process would have been held to."""
    masks: list[frozenset[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _process, cpus: masks.append(cpus))
    return masks


@pytest.fixture
def system(tmp_path) -> Path:
    """Two sockets of four cores, a GPU next to each."""
    for place, cpus in enumerate(("0-3", "4-7")):
        for name, text in ((f"devices/system/node/node{place}/cpulist", cpus),
                           (f"bus/pci/devices/0000:0{place}:00.0/numa_node", str(place))):  # fmt: skip
            (tmp_path / name).parent.mkdir(parents=True)
            (tmp_path / name).write_text(text + "\n")
    return tmp_path


def prepared(system, world=ON_GPU, job=JOB, gpus=GPUS, environ=None, masks=(ALL, ALL)):
    environ = {} if environ is None else environ
    lines = set_processors(world, job, masks, gpus, environ, system_root=system, process_root=system)
    return lines, environ.get("OMP_NUM_THREADS")


def test_a_rank_is_held_to_the_cpus_next_to_its_gpu(system, held):
    other = replace(ON_GPU, rank=1, local_rank=1, device="cuda:1")
    assert prepared(system, other) == (
        ["bound to CPUs 4-7 of 0-7, OMP_NUM_THREADS=4: NUMA node 1 is next to its GPU"],
        "4",
    )
    assert held == [{4, 5, 6, 7}]


def test_a_rank_that_is_shown_its_own_gpu_alone_goes_to_that(system, held):
    other = replace(ON_GPU, rank=1, local_rank=1)
    lines, threads = prepared(system, other, gpus=GPUS[1:])
    assert held == [{4, 5, 6, 7}] and threads == "4"
    assert lines[0].endswith("NUMA node 1 is next to its GPU; whether other ranks use it is unknown")


def test_bind_none_leaves_the_cpus_and_still_sets_threads(system, held):
    job = {**JOB, "job": {"bind": "none", "cpus_per_rank": 1}}
    assert prepared(system, job=job) == (['left on CPUs 0-7, OMP_NUM_THREADS=4: job.bind = "none"'], "4")
    assert held == []


def test_without_gpus_one_rank_speaks_for_the_node(system, held):
    single = (frozenset(range(4)),) * 2
    said, threads = prepared(system, ON_CPU, gpus=[], masks=single)
    assert (said, threads) == (["left on CPUs 0-3, OMP_NUM_THREADS=2: 2 ranks share one NUMA node"], "2")
    assert prepared(system, replace(ON_CPU, local_rank=1, rank=1), gpus=[], masks=single) == ([], "2")
    alone = replace(ON_CPU, size=1, local_size=1)
    assert prepared(system, alone, gpus=[], masks=single[:1]) == ([], "4")


def test_threads_are_what_somebody_said(system, held):
    lines, threads = prepared(system, environ={"OMP_NUM_THREADS": "3"})
    assert threads == "3" and "OMP_NUM_THREADS=3 (already set)" in lines[0]
    stated = {"job": {"cpus_per_rank": 2}, "origins": {"job.cpus_per_rank": "a job file"}}
    assert prepared(system, job=stated)[1] == "2"
    assert prepared(system, environ={"SLURM_JOB_ID": "7"})[1] == "1"


def test_a_containers_quota_counts(system, held):
    (system / "cgroup").write_text("0::/\n")
    (system / "fs/cgroup").mkdir(parents=True)
    (system / "fs/cgroup/cpu.max").write_text("400000 100000\n")
    assert prepared(system)[1] == "2", "4 CPUs for 2 ranks"


def test_a_kernel_that_refuses_is_told_and_not_fatal(system, monkeypatch):
    def refuse(_process, _cpus):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    lines, _ = prepared(system)
    assert lines == [
        "left on CPUs 0-7, OMP_NUM_THREADS=4: the kernel rejected CPUs 0-3: Operation not permitted"
    ]  # fmt: skip


TELLS = """
import os
import torch
def main(world=None, config=None):
    cpus = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    print("has", cpus, os.environ["OMP_NUM_THREADS"], torch.get_num_threads(), flush=True)
if __name__ == "__main__":
    main()
"""


SEVERAL_NUMA_NODES = len(list(Path("/sys/devices/system/node").glob("node*"))) > 1


@pytest.mark.skipif(SEVERAL_NUMA_NODES, reason="ranks divide what this machine has")
@pytest.mark.parametrize("entry", sampled(["tells.py:main", "tells.py"], lambda case: ":" in case[0]))
def test_ranks_have_their_cpus_and_threads_when_torch_comes(toolkit, entry):
    (toolkit.folder / "tells.py").write_text(TELLS)
    job = toolkit.folder / "tells.toml"
    job.write_text(f'[job]\nentry = "{entry}"\nranks_per_node = 2\n')
    said = toolkit.ok("run", job)
    told = [line.partition("has ")[2].split() for line in said.splitlines() if "has " in line]
    cpus = sorted(os.sched_getaffinity(0))
    assert len(told) == 2
    for mask, threads, threads_of_torch in told:
        assert mask == ",".join(map(str, cpus))
        assert threads == threads_of_torch and 1 <= int(threads) <= max(1, len(cpus) // 2)
    assert said.count("2 ranks share") == 1 and "(already set)" not in said


def test_an_executable_is_left_as_it_was_launched(toolkit):
    job = toolkit.folder / "plain.toml"
    job.write_text(
        '[job]\nentry = ["bash", "-c", "echo has $OMP_NUM_THREADS"]\nranks_per_node = 2\ncpus_per_rank = 3\n'
    )
    said = toolkit.ok("run", job)
    assert said.count("has 3") == 2 and "toolkit:" not in said


HEAVY = """
import sys
from toolkit.rank.preparation import prepare
from toolkit.world.discover import discover
prepare(discover({}), {"job": {}})
print([name for name in ("torch", "pydantic", "numpy", "toolkit.topology.facts") if name in sys.modules])
"""


def test_a_laptop_does_not_wait_for_imports():
    done = subprocess.run([sys.executable, "-c", HEAVY], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


IS_HELD = """
import os, subprocess, sys
from pathlib import Path
from toolkit.rank.preparation import set_processors
from toolkit.world.facts import World
cpus = sorted(os.sched_getaffinity(0))
root = Path(sys.argv[1])
for place, cpu in enumerate(cpus[:2]):
    (root / f"devices/system/node/node{place}").mkdir(parents=True)
    (root / f"devices/system/node/node{place}/cpulist").write_text(str(cpu))
os.sched_setaffinity(0, cpus[:2])
world = World(1, 1, 2, 2, 0, 1, "node0", "cpu", "local", "a test")
set_processors(world, {"job": {}}, [frozenset(cpus[:2])] * 2, [], {}, system_root=root, process_root=root)
child = [sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"]
print(subprocess.run(child, capture_output=True, text=True).stdout.strip() == str({cpus[1]}))
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU cannot be divided")
def test_what_a_rank_starts_inherits_its_cpus(tmp_path):
    done = subprocess.run([sys.executable, "-c", IS_HELD, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
