"""What is wrong with a node is said with its name and the check; a check that hangs is an answer, too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fake_slurm import FakeSlurm

from toolkit.rundir.bad_nodes import bad_nodes, runs_of
from toolkit.rundir.files import write_json
from toolkit.rundir.layout import RunDirectory
from toolkit.supervise import node_check
from toolkit.supervise.allocation import Allocation
from toolkit.supervise.node_health import judge, nodes_to_exclude, unfit_nodes
from toolkit.supervise.requests import StopRequest


def look(run: RunDirectory, environ: dict[str, str] | None = None, **changes: Any) -> dict[str, Any]:
    """Run the program as srun does, on this machine."""
    claim = run.start(0) / "claim.json"
    if not claim.exists():
        claim.parent.mkdir()
        write_json(claim, {})
    arguments = {"run": str(run.path), "claim": str(claim), "gpus": 0, "local_scratch": "", **changes}
    argv = [sys.executable, "-S", "-E", node_check.__file__, json.dumps(arguments)]
    environment = {**os.environ, "SLURMD_NODENAME": "node7", **(environ or {})}
    done = subprocess.run(argv, capture_output=True, text=True, check=True, env=environment, timeout=240)
    return dict(json.loads(done.stdout))


def test_a_fit_node_says_so_and_leaves_nothing(run_directory: RunDirectory) -> None:
    before = sorted(run_directory.path.iterdir())
    answer = look(run_directory)
    assert (answer["node"], answer["failed"]) == ("node7", {})
    assert abs(answer["clock"] - time.time()) < 60
    assert sorted(run_directory.path.iterdir()) == before


def test_each_fault_has_its_name(run_directory: RunDirectory, tmp_path: Path) -> None:
    failed = look(run_directory, claim=str(tmp_path / "not seen here"))["failed"]
    assert list(failed) == ["run directory"] and "No such file" in failed["run directory"]
    failed = look(run_directory, {"SCRATCH": str(tmp_path / "none")}, local_scratch="$SCRATCH/mine")["failed"]
    assert list(failed) == ["local scratch"] and str(tmp_path / "none") in failed["local scratch"]
    said = node_check.check_space(tmp_path, 2**62, "x")
    assert f"{tmp_path} has" in said and "expected at least" in said


@pytest.mark.parametrize("is_dangling", [False, True])
def test_what_somebody_else_put_there_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_dangling: bool
) -> None:
    monkeypatch.setattr(os, "urandom", bytes)
    target, shared = tmp_path / "target", tmp_path / "shared"
    shared.mkdir()
    if not is_dangling:
        target.write_text("theirs")
    link = shared / f".toolkit-health-node7-{bytes(8).hex()}"
    link.symlink_to(target)
    with pytest.raises(FileExistsError):
        node_check.check_space(shared, 0, "node7")
    assert link.is_symlink()
    assert not target.exists() if is_dangling else target.read_text() == "theirs"


def test_a_full_file_system_is_told_and_keeps_nothing(tmp_path: Path) -> None:
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", tmp_path]).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        assert node_check.check_space(tmp_path, 0, "node7") == ""
        with (tmp_path / "full").open("wb", buffering=0) as stream, pytest.raises(OSError, match="No space"):
            while True:
                stream.write(bytes(4096))
        with pytest.raises(OSError, match="No space"):
            node_check.check_space(tmp_path, 0, "node7")
        assert [path.name for path in tmp_path.iterdir()] == ["full"]
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


def test_a_file_system_that_does_not_answer_is_told_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe that nobody writes to stands for a stale mount: its reader waits for ever."""
    monkeypatch.setattr(node_check, "CHECK_S", 0.3)
    os.mkfifo(tmp_path / "stale")
    arguments = {"run": str(tmp_path), "claim": str(tmp_path / "stale"), "gpus": 0, "local_scratch": ""}
    began = time.monotonic()
    assert node_check.run_checks(arguments, "node7") == {"run directory": "no result within 0 s"}
    assert time.monotonic() - began < 30


def test_fewer_gpus_than_the_job_has_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a driver nothing is known and nothing is claimed."""
    if not Path("/proc/driver/nvidia/version").exists() and not Path("/sys/class/kfd").exists():
        assert node_check.check_gpus(4) == ""
    lost = "Unable to determine the device handle for GPU 0000:1A:00.0: Unknown Error"
    nvidia_smi(tmp_path, monkeypatch, f"GPU 0: A (UUID: GPU-1)\n{lost}\nGPU 1: A (UUID: GPU-2)")
    assert node_check.check_gpus(2) == ""
    assert node_check.check_gpus(4) == f"the driver reports 2 GPUs, expected 4: {lost}"


def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: str) -> None:
    """A driver, and an nvidia-smi whose -L prints this."""
    monkeypatch.setattr(node_check, "_NVIDIA_DRIVER", tmp_path)
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n[ \"$*\" = -L ] || exit 2\ncat <<'END'\n{printed}\nEND\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


SLICED = "\n".join(
    ["GPU 0: NVIDIA A100 (UUID: GPU-1)", *(f"  MIG 1g.5gb     Device  {n}: (UUID: MIG-{n})" for n in range(4)), "GPU 1: NVIDIA A100 (UUID: GPU-2)"]
)  # fmt: skip


@pytest.mark.parametrize(
    ("shown", "gpus", "said"),
    [
        ("MIG-0,MIG-1,MIG-2,MIG-3", 4, ""),
        ("MIG-2", 4, ""),  # one slice per task
        (None, 5, ""),  # a whole GPU and four slices
        (None, 6, "the driver reports 5 GPUs, expected 6"),
        ("MIG-0,MIG-1,MIG-2,MIG-3,MIG-4", 5, "the driver reports 4 MIG slices, expected 5"),
    ],
)
def test_slices_count_as_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: str | None, gpus: int, said: str
) -> None:
    nvidia_smi(tmp_path, monkeypatch, SLICED)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert node_check.check_gpus(gpus) == said


def test_a_driver_that_does_not_list_slices_fails_no_slice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(tmp_path, monkeypatch, "GPU 0: NVIDIA A100 (UUID: GPU-1)")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-0,MIG-1")
    assert node_check.check_gpus(2) == ""


MISMATCH = "Failed to initialize NVML: Driver/library version mismatch"


def test_a_device_without_a_working_library_fails_with_the_sentence_of_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi(tmp_path, monkeypatch, f"{MISMATCH}\nNVML library version: 550.54")
    assert node_check.check_gpus(2) == f"the driver reports 0 GPUs, expected 2: {MISMATCH}"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-0,MIG-1")
    assert node_check.check_gpus(2) == f"the driver reports 0 MIG slices, expected 2: {MISMATCH}"


def test_a_device_on_the_bus_counts_without_its_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_check, "_NVIDIA_DRIVER", tmp_path / "none")
    monkeypatch.setattr(node_check, "_KFD", tmp_path / "none")
    monkeypatch.setattr(node_check, "_PCI", tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    device = tmp_path / "0000:1a:00.0"
    device.mkdir()
    for vendor, kind, said in (
        ("0x10de", "0x030200", "libnvidia-ml.so.1: cannot open shared object file: No such file or directory"),
        ("0x1002", "0x120000", "the kernel module amdgpu is not loaded"),
        ("0x1002", "0x030000", None),  # a graphics unit of a CPU
        ("0x1a03", "0x030000", None),  # a management controller
    ):
        (device / "vendor").write_text(vendor + "\n")
        (device / "class").write_text(kind + "\n")
        expected = f"the driver reports 0 GPUs, expected 2: {said}" if said else ""
        assert node_check.check_gpus(2) == expected


def test_clocks_and_silent_nodes_are_judged_from_outside() -> None:
    fit = {"node": "node1", "clock": 1000.5, "failed": {}}
    late = {"node": "node2", "clock": 930.0, "failed": {}}
    early = {"node": "node3", "clock": 1100.0, "failed": {"GPUs": "the driver reports 3 GPUs, expected 4"}}
    unfit = judge([fit, late, early], ["node1", "node2", "node3", "node4"], began=1000.0, ended=1001.0)
    assert [(one.node, one.check) for one in unfit] == [
        ("node2", "clock"), ("node3", "GPUs"), ("node3", "clock"), ("node4", "response"),
    ]  # fmt: skip
    assert str(unfit[0]) == "node2 failed the clock check: 70 s off the batch host's clock"


@pytest.mark.parametrize(
    ("policy", "faulty", "given_up", "noted"),
    [
        ("requeue", ["node2"], ["node2"], ["node2"]),
        ("warn", ["node2"], [], ["node2"]),
        ("requeue", ["node1", "node2"], [], []),  # no node's fault
        ("off", ["node2"], [], []),
    ],
)
def test_the_policy_decides_and_bad_nodes_are_noted(
    run_directory: RunDirectory,
    fake_slurm: FakeSlurm,
    policy: str,
    faulty: list[str],
    given_up: list[str],
    noted: list[str],
) -> None:
    """A stand-in of srun answers for two nodes."""
    answers = [
        {"node": node, "clock": time.time(), "failed": {"/dev/shm": "is full"} if node in faulty else {}}
        for node in ("node1", "node2")
    ]
    lines = "\n".join(map(json.dumps, answers))
    fake_slurm.respond("srun", f"some plugin's chatter\n{lines}\n")
    job = {"job": {"gpus_per_node": 0}, "restart": {"health": policy}, "site": {"name": "ours"}, "paths": {}}
    allocation = Allocation("7", 2, True, True, 0.0, None, "node[1-2]")
    unfit = unfit_nodes(run_directory, job, 0, allocation, {"PATH": os.environ["PATH"]}, StopRequest())
    assert [one.node for one in unfit] == given_up
    assert [one.node for one in bad_nodes(runs_of(run_directory), "ours")] == noted
    assert nodes_to_exclude(run_directory, {**job, "job": {"exclude": "node9"}}) == ",".join(["node9", *noted])
    own = {"exclude": "node9", "sbatch": ["--exclude=node7", "-x node8"]}
    assert nodes_to_exclude(run_directory, {**job, "job": own}) == ",".join(["node9", "node8", *noted])
    assert nodes_to_exclude(run_directory, {**job, "job": {"sbatch": ["-x ./nodes"]}}) == ""


def test_a_check_that_cannot_run_accuses_nobody(
    run_directory: RunDirectory, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_slurm.respond("srun", stderr="srun: error: Unable to create step\n", code=1)
    job = {"job": {}, "restart": {"health": "requeue"}, "site": {"name": "ours"}, "paths": {}}
    allocation = Allocation("7", 2, True, True, 0.0, None, "node[1-2]")
    assert unfit_nodes(run_directory, job, 0, allocation, {"PATH": os.environ["PATH"]}, StopRequest()) == []
    assert "cannot check the health of the nodes: srun: error: Unable to create step" in capsys.readouterr().out
