"""Ranks in images under a real Apptainer: what comes in, what gets out, and that nothing of how a run survives is lost.

`scripts/install_apptainer.py` brings Apptainer to Debian 12. The image is a folder with a Python of this machine in it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from on_slurm import Site, wait_for

from toolkit.metrics.window_file import read_windows

pytestmark = pytest.mark.cluster

UNPACKED = Path.home() / ".toolkit" / "apptainer" / "usr" / "bin" / "apptainer"

DEFINITION = """Bootstrap: localimage
From: {rootfs}
%environment
export ODD=of-image IMAGES=1 PATH=/image/bin:$PATH
"""
ODD = "a 'b' \"c\" $(id) `id` \\n \\\n\tsecond line, ä € 🦊\n\n\r"
BOXED = """
import json, os, signal, time
from pathlib import Path

import torch
import torch.distributed as dist

from toolkit.checkpoint import Checkpointer


def main(world, config):
    assert Path(__file__).parent == world.run_dir / "code"
    total = torch.tensor([world.rank + 1.0])
    dist.all_reduce(total)
    tensors = {"steps": torch.zeros(1)}
    checkpoints = Checkpointer(world.run_dir / "checkpoints", world)
    checkpoints.load(tensors)
    stop = signal.getsignal(signal.SIGUSR2)

    def hear(number, frame):
        tell(world, "heard", number)
        stop(number, frame)

    signal.signal(signal.SIGUSR2, hear)
    tell(world, "began", {
        "marker": Path("/of-this-image").read_text(), "sum": total.item(), "environment": dict(os.environ),
        "process": os.getpid(), "step": int(tensors["steps"]), "by": world.discovered_by,
        "outside": Path(config.args["outside"]).exists(), "folder": os.getcwd(),
    })
    for _ in range(600):
        tensors["steps"] += 1
        step = int(tensors["steps"])
        asked = world.should_stop(step)
        if asked or step % 5 == 0:
            checkpoints.save(step, tensors, {})
        if asked:
            return tell(world, "left", step)
        time.sleep(0.1)


def tell(world, name, what):
    folder = json.loads(Path(os.environ["TOOLKIT_RESOLVED_JOB"]).read_text())["job_directory"]
    (Path(folder) / f"{name}-{world.attempt}-{world.rank}").write_text(json.dumps(what))
"""


@pytest.fixture
def apptainer() -> str:
    """The program; without one these tests are skipped, since it cannot be had everywhere."""
    program = shutil.which("apptainer") or (str(UNPACKED) if UNPACKED.exists() else "")
    if not program:
        pytest.skip("no apptainer on PATH, and scripts/install_apptainer.py could not install one")
    return program


def make_image(apptainer: str, folder: Path) -> Path:
    """A sandbox with an environment of its own, and places where this machine's system is mounted."""
    rootfs = folder / "rootfs"
    for place in ("etc", "proc", "sys", "dev", "tmp", "var/tmp", "root", "usr"):
        (rootfs / place).mkdir(parents=True)
    for link in ("bin", "lib", "lib64", "sbin"):
        (rootfs / link).symlink_to(f"usr/{link}")
    (rootfs / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (rootfs / "etc/group").write_text("root:x:0:\n")
    (rootfs / "of-this-image").write_text("yes")
    definition = folder / "image.def"
    definition.write_text(DEFINITION.format(rootfs=rootfs))
    done = subprocess.run(
        [apptainer, "build", "--sandbox", str(folder / "image"), str(definition)],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "image"


def job_in_image(here: Site, apptainer: str, odd: str) -> Path:
    image = make_image(apptainer, here.folder)
    outside = here.cluster.slurm_conf  # a file that nothing mounts
    python = {sys.prefix, sys.base_prefix}
    with here.file.open("a") as site:
        site.write(
            '[container]\nruntime = "apptainer"\noptions = ["--no-home"]\n'
            f"mounts = {json.dumps(['/usr:/usr:ro', *(f'{folder}:{folder}:ro' for folder in sorted(python))])}\n"
            f"[env]\nvars = {{ FROM_SITE = 's' }}\nsetup = ['PATH={Path(apptainer).parent}:$PATH']\n"
        )
    work = here.folder / "my work"
    work.mkdir()
    (work / "boxed.py").write_text(BOXED)
    job = work / "boxed.toml"
    job.write_text(
        "[job]\nentry = 'boxed.py:main'\nnodes = 2\nranks_per_node = 1\ntime = '5'\n"
        f"[env]\nvars = {{ ODD = {json.dumps(odd, ensure_ascii=False)}, EMPTY = '' }}\npass = ['PASSED']\n"
        f"[container]\nimage = '{image}'\npython = '{sys.executable}'\n[args]\noutside = '{outside}'\n"
    )
    return job


def said(job: Path, name: str, attempt: int, rank: int) -> Any:
    path = job.parent / f"{name}-{attempt}-{rank}"
    wait_for(lambda: path.exists() and path.read_text())
    return json.loads(path.read_text())


def processes(here: Site) -> list[str]:
    """What this job left on the two nodes."""
    lines = [here.cluster.exec(node, ["ps", "-eo", "args"]).stdout for node in ("node1", "node2")]
    return [line for line in "".join(lines).splitlines() if "Apptainer" in line or "toolkit.rank" in line]


def test_a_run_survives_inside_images(here: Site, apptainer: str) -> None:
    """Two ranks on two nodes: one is killed, the next attempt loads, hears a stop, saves and leaves nothing behind."""
    job = job_in_image(here, apptainer, ODD)
    _, run = here.submit(job, PASSED="p 'q'", LOGIN_SHELLS="1")
    began = [said(job, "began", 0, rank) for rank in (0, 1)]
    for rank, report in enumerate(began):
        inside = report["environment"]
        assert (report["marker"], report["sum"], report["outside"]) == ("yes", 3.0, False)
        assert report["by"].startswith("MPI"), "PMIx of srun reaches into the image"
        assert inside["ODD"] == ODD
        assert [inside.get(name) for name in ("EMPTY", "PASSED", "FROM_SITE", "IMAGES", "LOGIN_SHELLS")] == [
            "", "p 'q'", "s", "1", None,
        ]  # fmt: skip
        assert inside["PATH"].startswith("/image/bin:") and inside["HOME"] == os.environ["HOME"]
        assert (inside["SLURM_PROCID"], report["folder"]) == (str(rank), str(job.parent))

    wait_for(lambda: list((run.path / "checkpoints").glob("step-*/manifest.json")))
    node = began[1]["environment"]["SLURMD_NODENAME"]
    assert here.cluster.exec(node, ["kill", "-9", str(began[1]["process"])]).returncode == 0
    wait_for(run.attempt(0).exit_file.exists)
    crash = json.loads(run.attempt(0).exit_file.read_text())
    assert (crash["cause"], crash["rank"], crash["host"], crash["exit_code"]) == ("crashed", 1, node, 137)

    again = [said(job, "began", 1, rank) for rank in (0, 1)]
    assert again[0]["step"] == again[1]["step"] >= 5
    wait_for(run.attempt(1).heartbeat.exists)
    here.ok("stop", run.run_id)
    assert here.wait(run).returncode == 130
    assert here.status(run)["state"] == "stopped"
    # A rank that the other one tells of the stop may exit before its own signal arrives.
    heard = {json.loads(path.read_text()) for path in job.parent.glob("heard-1-*")}
    assert heard == {12}, "USR2 passes Apptainer"
    left = said(job, "left", 1, 0)
    assert (run.path / "checkpoints" / f"step-{left:08d}" / "manifest.json").exists()
    wait_for(lambda: not processes(here))


@pytest.mark.evidence
def test_a_node_observes_all_its_ranks_inside_images(here: Site, apptainer: str) -> None:
    job = job_in_image(here, apptainer, "")
    _, run = here.submit(job, "-N", "1", "-n", "2")
    assert [said(job, "began", 0, rank)["sum"] for rank in (0, 1)] == [3.0, 3.0]
    wait_for(lambda: json.loads(run.attempt(0).usage_file(0).read_text())["ranks"] == 2)
    wait_for(run.attempt(0).node_state(0).exists)
    here.ok("stop", run.run_id)
    assert here.wait(run).returncode == 130
    assert {one["rank"] for one in json.loads(run.attempt(0).node_state(0).read_text())["memory"]} == {0, 1}
    assert {one.rank for one in read_windows(run.attempt(0).windows_file(0))} == {0, 1}


def test_an_image_that_is_not_there_is_named(here: Site, apptainer: str) -> None:
    job = job_in_image(here, apptainer, "")
    _, run = here.submit(job, "--set", "container.image=/nowhere/torch.sif")
    assert here.wait(run).returncode == 125
    end = json.loads(run.attempt(0).exit_file.read_text())
    launcher = (run.attempt(0).logs / "launcher.log").read_text()
    assert (end["cause"], end["symptom"]) == ("launch_failed", "image_failed"), launcher
    assert "could not open image /nowhere/torch.sif" in end["evidence"][0][1]
