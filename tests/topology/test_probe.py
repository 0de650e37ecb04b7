"""Probing a node: what NVML, /sys and commands say becomes facts, and what they say against each other stays."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from machine_fakes import FakeNvml, h100_pair, write_system

from toolkit.topology.facts import Claimed, Fact, contradictions, facts_of
from toolkit.topology.links.nodes import cliques_of, nearest_nics_of
from toolkit.topology.nccl.node import AdapterPort, read_ports
from toolkit.topology.probe import probe_node, settle
from toolkit.topology.sources.commands import answer_of_matrix, run_command
from toolkit.topology.sources.nvml import ask_nvml
from toolkit.topology.sources.system_files import ask_system_files, pci_link

HOST = Fact("node7", "test", "direct")
MATRIX = r'printf "\tGPU0\tGPU1\tmlx5_0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tNV18\tPIX\t0-3\t{0}\n'
MATRIX += r'GPU1\tNV18\t X \tSYS\t4-7\t{1}\nmlx5_0\tPIX\tSYS\t X\n"'


def matrix(*nodes):
    """What the command prints."""
    return MATRIX.format(*nodes).removeprefix('printf "').removesuffix('"').replace("\\t", "\t").replace("\\n", "\n")


@pytest.fixture
def on_path(tmp_path, monkeypatch):
    """PATH holds these commands, a shell and little else: the machine's own lscpu knows nothing of a made-up node."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "sleep", "printf"):
        (folder / name).symlink_to(f"/bin/{name}" if Path(f"/bin/{name}").exists() else f"/usr/bin/{name}")
    monkeypatch.setenv("PATH", str(folder))

    def install(name, script):
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    return install


def probe(nvml, system, **more):
    return probe_node(HOST, {}, nvml=nvml, system_root=system, **more)


def known(node):
    return {place: fact.value for place, fact in facts_of(node) if not isinstance(fact.value, tuple)}


def test_nvml_and_system_files_tell_a_whole_node(on_path, tmp_path):
    nvml, system = h100_pair(tmp_path / "sys")
    node = probe(nvml, system)
    told = known(node)
    hardware = node.hardware
    assert nvml.open == 0, "the library is closed again"
    assert (told["sockets"], told["cpus"], told["NUMA node 1 cpus"], told["NUMA node 1 socket"]) == (2, "0-7", "4-7", 1)
    assert told["NUMA node 0 memory_mib"] == 16384
    first = hardware.gpus[0]
    assert first.numa_node == Fact(0, "NVML, /sys", "confirmed")
    assert (first.name.value, first.memory_bytes.value, first.mig.value) == ("NVIDIA H100 80GB HBM3", 80 * 2**30, False)
    assert (first.bus.value, node.gpu_uuids[0].value) == ("0000:03:00.0", "GPU-0000:03:00.0")
    assert hardware.link_of()["GPU0", "GPU1"] == Fact("NV18", "NVML", "direct")
    assert hardware.link_of()["GPU0", "mlx5_0"] == Fact("PIX", "/sys", "derived")
    assert cliques_of(hardware) == ((0, 1),)
    assert [found.nics for found in nearest_nics_of(hardware).values()] == [("mlx5_0",), ("mlx5_1",)]
    up, down = hardware.nics.value
    assert (up.net_device.value, up.ports[0].rate_gbit_per_s.value, up.ports[0].state.value) == ("ib0", 400, "Active")
    assert down.ports[0].rate_gbit_per_s.missing == "the port is not active, so its rate is unknown"
    assert down.numa_node.missing == "/sys: the firmware does not report the NUMA node"
    assert node.nic_guids[0].value == "a088:c203:0000:0000"
    assert not node.warnings and not contradictions(node)


def test_facts_and_settings_of_the_fabric_know_the_same_ports(on_path, tmp_path):
    nvml, system = h100_pair(tmp_path / "sys")
    port = system / "class/infiniband/mlx5_1/ports/1"
    (port / "state").write_text("5: ACTIVE_DEFER\n")
    (system / "class/infiniband/mlx5_2/ports/1").mkdir(parents=True)  # its files cannot be read
    (system / "class/infiniband/version").write_text("1\n")
    told = {nic.name: nic.ports for nic in probe(nvml, system).hardware.nics.value}
    assert [(name, len(ports)) for name, ports in told.items()] == [("mlx5_0", 1), ("mlx5_1", 1), ("mlx5_2", 0)]
    ports = [
        AdapterPort(name, port.number, port.state.value == "Active", port.rate_gbit_per_s.value, port.link_layer.value)
        for name, of_nic in told.items()
        for port in of_nic
    ]
    assert read_ports(system) == (*ports, AdapterPort("mlx5_2", 1, None, None, None))
    (port / "phys_state").write_text("3: Disabled\n")
    nic = probe(nvml, system).hardware.nics.value[1]
    assert nic.ports[0].rate_gbit_per_s.missing == "the port is not active, so its rate is unknown"
    assert read_ports(system)[1] == AdapterPort("mlx5_1", 1, True, None, "InfiniBand")


def test_adapters_of_a_container_without_other_files_are_known_and_their_damage_is_told(on_path, tmp_path):
    port = tmp_path / "class/infiniband/rxe0/ports/1"
    port.mkdir(parents=True)
    for file, text in (("state", "4: ACTIVE"), ("phys_state", "5: LinkUp"), ("link_layer", "Ethernet"), ("rate", "?")):
        (port / file).write_text(text + "\n")
    node = probe(FakeNvml([]), tmp_path)
    (nic,) = node.hardware.nics.value
    assert (nic.name, nic.ports[0].link_layer.value) == ("rxe0", "Ethernet")
    assert nic.ports[0].rate_gbit_per_s.missing == "/sys does not report it"
    assert node.warnings == ("/sys: expected the rate of a port, got '?'",)
    write_system(tmp_path)
    assert node.warnings[0] in probe(FakeNvml([]), tmp_path).warnings


def test_a_contradiction_is_nobodys_win(on_path, tmp_path):
    nvml, system = h100_pair(tmp_path / "sys")
    (system / "bus/pci/devices/0000:83:00.0/numa_node").write_text("0\n")
    node = probe(nvml, system)
    assert node.hardware.gpus[0].numa_node == Fact(0, "NVML, /sys", "confirmed")
    fact = node.hardware.gpus[1].numa_node
    assert (fact.value, fact.confidence, fact.missing) == (None, "unknown", "sources contradict each other")
    assert fact.claims == (Claimed(1, "NVML"), Claimed(0, "/sys"))
    assert contradictions(node) == ("GPU1 numa_node: NVML says 1, /sys says 0",)


def test_two_sources_against_one_win_nothing(tmp_path):
    nvml, system = h100_pair(tmp_path / "sys")
    gpus = ask_nvml(nvml)
    printed = answer_of_matrix(matrix(0, 0))
    node = settle(HOST, [gpus, ask_system_files({0: "0000:03:00.0", 1: "0000:83:00.0"}, system), printed])
    assert node.hardware.gpus[0].numa_node == Fact(0, "NVML, /sys, nvidia-smi topo -m", "confirmed")
    assert contradictions(node) == ("GPU1 numa_node: NVML says 1, /sys says 1, nvidia-smi topo -m says 0",)
    assert node.hardware.link_of()["GPU0", "GPU1"].confidence == "confirmed"
    assert node.hardware.link_of()["GPU0", "mlx5_0"] == Fact("PIX", "nvidia-smi topo -m", "printed")


def test_links_and_counts_that_differ_are_unknown(tmp_path):
    nvml, _ = h100_pair(tmp_path / "sys")
    nvml.gpus.append({"bus": "0000:99:00.0", "numa": 1})
    nvml.gpus[1]["links"] = ["switch"] * 17 + [None]
    said = contradictions(settle(HOST, [ask_nvml(nvml), answer_of_matrix(matrix(0, 1))]))
    assert said == ("gpu_count: NVML says 3, nvidia-smi topo -m says 2",
                    "GPU0-GPU1: NVML says NV17, nvidia-smi topo -m says NV18")  # fmt: skip


COMMANDS = ("nvidia-smi", "lscpu")


def test_commands_run_only_if_nvml_and_system_files_have_none_of_their_facts(on_path, tmp_path):
    nvml, system = h100_pair(tmp_path / "sys")
    for name in COMMANDS:
        on_path(name, f"echo > {tmp_path}/ran-{name}; exit 1")

    def ran():
        names = {path.name.removeprefix("ran-") for path in tmp_path.glob("ran-*")}
        for path in tmp_path.glob("ran-*"):
            path.unlink()
        return names

    probe(nvml, system)
    assert ran() == {"nvidia-smi"}  # /sys does not show how GPU0 reaches mlx5_1
    shutil.rmtree(system / "class/infiniband/mlx5_1")
    probe(nvml, system)
    assert ran() == set()
    probe(nvml, tmp_path / "nowhere")
    assert ran() == {"lscpu"}
    nvml.level = 99  # a level that NVML does not name, so that no link is known
    for gpu in nvml.gpus:
        gpu["links"] = []
    probe(nvml, system)
    assert ran() == {"nvidia-smi"}
    lost = FakeNvml([])
    lost.nvmlInit = lambda: (_ for _ in ()).throw(lost.NVMLError(9))
    probe(lost, system)
    assert ran() == {"nvidia-smi"}


@pytest.mark.parametrize(
    ("links", "level", "link"),
    [
        ((["0000:83:00.0"] * 2, ["0000:03:00.0"] * 2), 50, "NV2"),
        (([None] * 4, [None] * 4), 40, "NODE"),
        (([], []), 20, "PXB"),
    ],
)
def test_links_of_nvml(links, level, link, on_path, tmp_path):
    nvml, system = h100_pair(tmp_path / "sys")
    nvml.level = level
    for gpu, own in zip(nvml.gpus, links, strict=True):
        gpu["links"] = own
    assert probe(nvml, system).hardware.link_of()["GPU1", "GPU0"].value == link


@pytest.mark.parametrize(
    ("fabric", "value", "missing"),
    [
        ((3, 0, 7, 9), f"{9:032x}.7", ""),
        ((3, 0, 0, 0), "none", ""),  # one box with switches of its own
        ((0, 0, 0, 0), "none", ""),
        ((2, 0, 0, 0), None, "NVML: the GPU has not joined its fabric yet"),
    ],
)
def test_fabric_of_nvml(fabric, value, missing, on_path, tmp_path):
    nvml = FakeNvml([{"bus": "0000:03:00.0", "numa": 0, "fabric": fabric}])
    told = probe(nvml, write_system(tmp_path / "sys")).gpu_fabrics[0]
    assert (told.value, told.missing) == (value, missing)


def test_a_lost_gpu_takes_the_others_not_along(on_path, tmp_path):
    nvml, system = h100_pair(tmp_path / "sys")
    nvml.gpus[0]["lost"] = True
    node = probe(nvml, system)
    assert node.hardware.gpus[0].name.missing == "NVML: GPU is lost"
    assert node.hardware.gpus[1].name.value and node.warnings == ("NVML: GPU0: GPU is lost",)


def test_a_driver_that_hangs_is_given_up_on_and_what_the_bus_has_is_said(on_path, tmp_path):
    nvml, system = h100_pair(tmp_path / "sys")
    nvml.nvmlInit = lambda: time.sleep(60)
    begin = time.monotonic()
    count = probe(nvml, system, timeout_s=0.2).hardware.gpu_count
    assert time.monotonic() - begin < 30
    assert "NVML did not respond within 0.2 s; /sys lists 2 NVIDIA display devices" in count.missing


def test_commands_alone_tell_what_they_can(on_path, tmp_path):
    on_path("nvidia-smi", MATRIX.format(0, "N/A"))
    on_path("lscpu", r'printf "CPU(s): 8\nOn-line CPU(s) list: 0-7\nThread(s) per core: 1\nCore(s) per socket: 4\nSocket(s): 2\n'
                     r'NUMA node(s): 2\nNUMA node0 CPU(s): 0-3\nNUMA node1 CPU(s): 4-7\n"')  # fmt: skip
    nothing = FakeNvml([])
    nothing.nvmlInit = lambda: (_ for _ in ()).throw(nothing.NVMLError(9))
    hardware = probe(nothing, tmp_path / "nowhere").hardware
    assert hardware.sockets == Fact(2, "lscpu", "printed")
    assert [numa.cpus.value for numa in hardware.numa_nodes.value] == ["0-3", "4-7"]
    assert hardware.gpu_count == Fact(2, "nvidia-smi topo -m", "printed")
    assert hardware.gpus[1].numa_node.missing.endswith("nvidia-smi topo -m: prints NUMA node N/A")
    assert hardware.gpus[0].cpus == Fact("0-3", "nvidia-smi topo -m", "derived")
    assert [nic.name for nic in hardware.nics.value] == ["mlx5_0"] and hardware.nics.confidence == "derived"


def test_a_hanging_command_is_killed_with_its_children_and_reported(on_path, tmp_path):
    on_path("nvidia-smi", f"sleep 61 & echo $! > {tmp_path}/child; wait")
    begin = time.monotonic()
    lost = FakeNvml([])
    lost.nvmlInit = lambda: (_ for _ in ()).throw(lost.NVMLError(9))
    node = probe(lost, tmp_path / "nowhere", timeout_s=0.5)
    assert time.monotonic() - begin < 30
    said = "NVML: error 9; nvidia-smi topo -m did not finish within 0.5 s and was killed"
    assert node.hardware.gpu_count == Fact(None, "NVML, nvidia-smi topo -m", "unknown", said)
    child = int((tmp_path / "child").read_text())
    time.sleep(0.1)
    state = subprocess.run(["/bin/ps", "-o", "stat=", "-p", str(child)], capture_output=True, text=True).stdout
    assert state.strip()[:1] in ("", "Z")


def test_a_failing_and_a_missing_command_say_why(on_path, tmp_path):
    on_path("nvidia-smi", "echo 'NVIDIA-SMI has failed: no driver'; exit 9")
    node = probe_node(HOST, {"SLURM_TOPOLOGY_ADDR": "a.b"}, system_root=tmp_path / "nowhere")
    assert "nvidia-smi topo -m exited with 9: NVIDIA-SMI has failed: no driver" in node.hardware.gpu_count.missing
    assert node.switches.missing == "SLURM_TOPOLOGY_ADDR_PATTERN is not set"
    assert "/sys: lists no NUMA node and no device" in node.hardware.sockets.missing
    assert run_command(("no-such-command",)).missing == "no-such-command: No such file or directory"


def test_an_answer_without_a_matrix_says_why(on_path, tmp_path):
    on_path("nvidia-smi", "echo 'Failed to initialize NVML: Unknown Error'")
    count = probe_node(HOST, {}, system_root=tmp_path / "nowhere").hardware.gpu_count
    assert (
        count.value is None
        and "expected the output of nvidia-smi topo -m, got 'Failed to initialize NVML" in count.missing
    )


def test_warnings_name_their_source(on_path, tmp_path):
    on_path("lscpu", "echo 'Socket(s): 2'; echo oops")
    environ = {"SLURM_TOPOLOGY_ADDR": "leaf2.node7", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.node"}
    node = probe_node(HOST, environ, nvml=FakeNvml([]), system_root=tmp_path / "nowhere")
    assert node.warnings[0].startswith("lscpu: line 2: ") and "'oops'" in node.warnings[0]
    assert node.switches.value.leaf == "leaf2"


def test_no_adapters_and_unknown_adapters_are_told_apart(on_path, tmp_path):
    nics = probe(FakeNvml([]), write_system(tmp_path / "sys")).hardware.nics
    assert nics.value == () and not nics.missing
    nics = probe(FakeNvml([]), tmp_path / "nowhere").hardware.nics
    assert nics.value is None and nics.missing == "/sys: lists no NUMA node and no device"


@pytest.mark.parametrize(
    ("one", "other", "near", "link"),
    [
        ("pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0/0000:03:00.0", "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:01.0/0000:04:00.0", True, "PIX"),
        ("pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0/0000:03:00.0", "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:01.0/0000:04:00.0/0000:05:00.0/0000:06:00.0", True, "PXB"),
        ("pci0000:00/0000:00:01.0/0000:01:00.0", "pci0000:00/0000:00:02.0/0000:02:00.0", True, "PHB"),
        ("pci0000:00/0000:00:01.0/0000:01:00.0", "pci0000:80/0000:80:02.0/0000:82:00.0", True, "NODE"),
        ("pci0000:00/0000:00:01.0/0000:01:00.0", "pci0000:80/0000:80:02.0/0000:82:00.0", False, "SYS"),
        ("pci0000:00/0000:00:01.0/0000:01:00.0", "pci0000:80/0000:80:02.0/0000:82:00.0", None, None),
        ("virtual/net", "pci0000:80/0000:80:02.0/0000:82:00.0", True, None),
    ],
)  # fmt: skip
def test_links_that_follow_from_places_on_the_bus(one, other, near, link):
    assert pci_link(f"/sys/devices/{one}", f"/sys/devices/{other}", near) == link


def test_topo_show_prints_facts_with_sources_without_torch(on_path, monkeypatch):
    on_path("nvidia-smi", 'printf "\\tGPU0\\tGPU1\\tCPU Affinity\\nGPU0\\t X \\tNV4\\t0-3\\nGPU1\\tNV4\\t X \\t0-3\\n"')
    code = "import sys; from toolkit.cli.main import main\ntry: main()\nfinally: assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, "topo", "show"]
    text = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ).stdout
    assert "NV4: GPU0-GPU1  [nvidia-smi topo -m]" in text and "NVLink cliques: GPU 0,1" in text
    facts = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout)
    (hardware,) = facts["hardware"].values()
    assert hardware["links"][0] == {
        "link": {"value": "NV4", "source": "nvidia-smi topo -m", "confidence": "printed"},
        "pairs": [["GPU0", "GPU1"]],
    }
