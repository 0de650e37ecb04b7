"""Probing a node: real commands on PATH that hang, fail or answer."""

import json
import os
import subprocess
import sys
import time

import pytest

from toolkit.topology.facts import Fact
from toolkit.topology.probe import probe_node, run_command


@pytest.fixture
def on_path(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def install(name, script):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)

    return install


def test_a_hanging_command_is_killed_with_its_children_and_reported(on_path, tmp_path):
    on_path("nvidia-smi", f"sleep 61 & echo $! > {tmp_path}/child; wait")
    start = time.monotonic()
    facts = probe_node(Fact("node7", "test"), environ={}, timeout_s=0.5)
    assert time.monotonic() - start < 5
    assert facts.gpu_links == Fact(
        None, "nvidia-smi topo -m", "nvidia-smi topo -m gave no answer in 0.5 s and was killed"
    )
    child = int((tmp_path / "child").read_text())
    time.sleep(0.1)
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(child)], capture_output=True, text=True).stdout
    assert state.strip()[:1] in ("", "Z")


def test_a_failing_and_a_missing_command_say_why(on_path):
    on_path("nvidia-smi", "echo 'NVIDIA-SMI has failed: no driver'; exit 9")
    facts = probe_node(Fact("node7", "test"), environ={"SLURM_TOPOLOGY_ADDR": "a.b"})
    assert facts.gpu_links.missing == "nvidia-smi topo -m ended with 9: NVIDIA-SMI has failed: no driver"
    assert facts.switches.missing == "SLURM_TOPOLOGY_ADDR_PATTERN is not set"
    assert run_command(("no-such-command",)).missing == "no-such-command: No such file or directory"


def test_an_answer_without_a_matrix_says_why(on_path):
    on_path("nvidia-smi", "echo 'Failed to initialize NVML: Unknown Error'")
    links = probe_node(Fact("node7", "test"), environ={}).gpu_links
    assert links.value is None and "no header with GPU columns: 'Failed to initialize NVML" in links.missing


def test_warnings_name_their_source(on_path):
    on_path("ibstat", "echo \"CA 'mlx5_0'\"; echo oops")
    facts = probe_node(
        Fact("node7", "test"),
        environ={"SLURM_TOPOLOGY_ADDR": "leaf2.node7", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.node"},
    )
    assert facts.adapters.value[0].name == "mlx5_0"
    assert facts.warnings[0] == "ibstat: line 2: not part of an adapter: 'oops'"
    assert facts.switches.value.leaf == "leaf2"


@pytest.mark.parametrize(
    ("said", "value", "missing"), [("echo", (), ""), ("echo banner", None, "not what ibstat prints: 'banner'")]
)
def test_no_adapters_and_no_answer_of_ibstat_are_told_apart(said, value, missing, on_path):
    on_path("ibstat", said)
    adapters = probe_node(Fact("node7", "test"), environ={}).adapters
    assert (adapters.value, adapters.missing) == (value, missing)


def test_topo_show_prints_facts_with_sources_without_torch(on_path):
    on_path("nvidia-smi", 'printf "\\tGPU0\\tGPU1\\tCPU Affinity\\nGPU0\\t X \\tNV4\\t0-3\\nGPU1\\tNV4\\t X \\t0-3\\n"')
    code = "import sys; from toolkit.cli.main import main\ntry: main()\nfinally: assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, "topo", "show"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "GPUs: 2, all NV4  [nvidia-smi topo -m]" in text
    assert "GPU0: CPUs 0-3, NUMA unknown, nearest NIC unknown" in text
    facts = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout)
    assert facts["gpu_links"]["value"]["gpu_links"][0] == ["X", "NV4"]
    assert facts["gpu_links"]["source"] == "nvidia-smi topo -m"
