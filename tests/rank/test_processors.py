"""CPUs, NUMA nodes and quotas, from folders like /sys and /proc."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.rank.preparation import cpu_quota, numa_node_of_gpu, read_processors


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


NODES = {"devices/system/node/node0/cpulist": "0-1,4-5", "devices/system/node/node1/cpulist": "2-3,6-7"}
SIBLINGS = {f"devices/system/cpu/cpu{n}/topology/thread_siblings_list": f"{n % 4},{n % 4 + 4}" for n in range(8)}


def test_nodes_and_cores_are_read(tmp_path):
    found = read_processors(range(7), write(tmp_path, NODES | SIBLINGS | {"devices/system/node/node2/cpulist": ""}))
    assert found.numa_nodes == {0: {0, 1, 4, 5}, 1: {2, 3, 6, 7}, 2: frozenset()}
    assert set(found.cores) == {frozenset({n, n + 4}) for n in range(4)}


def test_a_kernel_that_tells_nothing_has_cores_of_one_cpu(tmp_path):
    found = read_processors({3, 5}, tmp_path)
    assert found.numa_nodes == {} and set(found.cores) == {frozenset({3}), frozenset({5})}


def test_the_numa_node_of_a_gpu(tmp_path):
    devices = "bus/pci/devices"
    files = {f"{devices}/0000:03:00.0/numa_node": "1", f"{devices}/0000:04:00.0/numa_node": "-1"}
    two = read_processors(range(8), write(tmp_path / "two", NODES | files))
    near = [numa_node_of_gpu(f"00000000:0{bus}:00.0", two, tmp_path / "two") for bus in (3, 4, 5)]
    assert near == [1, None, None]
    one = {"devices/system/node/node0/cpulist": "0-7", "devices/system/node/node1/cpulist": ""}
    single = read_processors(range(8), write(tmp_path / "one", files | one))
    assert numa_node_of_gpu("00000000:04:00.0", single, tmp_path / "one") == 0, "there is no other"


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/", {"cpu.max": "200000 100000"}, 2.0),
        ("0::/a/b", {"cpu.max": "max 100000", "a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"}, 1.5),
        ("3:cpu,cpuacct:/x\n0::/", {"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4.0),
        ("3:cpu:/x", {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"}, None),
        ("3:cpuset:/\n0::/", {}, None),
        ("", {}, None),
    ],
)
def test_what_a_container_may_use_of_its_cpus(tmp_path, groups, files, expected):
    system = write(tmp_path / "sys", {f"fs/cgroup/{name}": text for name, text in files.items()})
    assert cpu_quota(write(tmp_path / "proc", {"cgroup": groups}), system) == expected
