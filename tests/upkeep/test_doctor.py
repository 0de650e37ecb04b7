"""`toolkit doctor`: each line with things broken on purpose."""

from __future__ import annotations

import errno
import json
import os
import resource

import pytest

from toolkit.slurm.commands import Slurm
from toolkit.submission.preflight.storage import Mount
from toolkit.upkeep import doctor

pytestmark = pytest.mark.usefixtures("dev_cluster_conf")


@pytest.fixture
def slurm(fake_slurm):
    """Write Slurm's commands; `say` takes what each prints."""

    def say(
        version="slurm-wlm 22.05.8",
        ping="echo Slurmctld of $SLURM_CONF is UP",
        queue="true",
        munge="echo 'STATUS: Success (0)'",
    ):
        scripts = {
            "scontrol": f"""case "$1 $2" in
                "--version "*) echo '{version}';; "ping "*) {ping};;
                "show config") echo 'ClusterName = here'; echo 'AuthInfo = socket=/run/own.socket'; echo 'AuthType = auth/munge';; esac""",
            "squeue": queue, "munge": 'test "$*" = "-n -S /run/own.socket" && echo credential', "unmunge": f"read it && {munge}",
        }  # fmt: skip
        for name in (*doctor.NEEDED, *doctor.USEFUL, "munge", "unmunge"):
            fake_slurm.script(name, scripts.get(name, "true"))
        return fake_slurm.folder

    say()
    return say


@pytest.fixture
def asked(monkeypatch):
    """What Python says in a process of its own, without one: torch takes seconds to import."""
    answers = {
        doctor._MPI: ({"library": "MPICH 4.2", "mpi4py": "4.0"}, ""),
        doctor._TORCH: ({"version": "2.13", "cuda": "13.0", "gpus": 4, "nccl": "2.28"}, ""),
    }
    monkeypatch.setattr(doctor, "_ask_python", answers.__getitem__)
    return answers


def examine(toolkit, *options, code=0, site="devcluster"):
    said = toolkit("doctor", "--site", site, "--json", *options)
    assert said.code == code, said
    return {(one["check"], one["level"]): f"{one['detail']} {one['fix']}" for one in json.loads(said.out)}


def test_all_is_well(toolkit, slurm, asked, dev_cluster_conf):
    told = examine(toolkit)
    assert f"Slurmctld of {dev_cluster_conf} is UP" in told["controller", "ok"]
    assert {check for check, level in told if level == "ok"} >= {
        "python", "libraries", "mpi", "torch", "slurm", "controller", "munge", "clock", "limits",
    }  # fmt: skip
    assert "pydantic 2" in told["libraries", "ok"] and "CUDA 13.0, NCCL 2.28, 4 GPUs" in told["torch", "ok"]
    assert "toolkit site check" in told["site", "warning"]
    assert not [key for key in told if key[1] == "error"]
    lines = toolkit.ok("doctor", "--site", "devcluster").splitlines()
    assert len(lines) >= 10 and all(line.split()[0] in ("ok", "warning", "error") for line in lines)


def test_what_is_wrong_with_slurm_is_named_with_a_fix(toolkit, slurm, asked, monkeypatch):
    slurm(ping="echo Slurmctld is DOWN; echo '** RESTORE SLURMCTLD **'; exit 1")
    assert "is DOWN wait until slurmctld is up" in examine(toolkit, code=1)["controller", "error"]
    slurm(queue="echo 'squeue: error: Invalid authentication credential' >&2; exit 1")
    assert "authentication credential ask site support" in examine(toolkit, code=1)["controller", "error"]
    slurm(munge="echo 'STATUS: Rewound credential (17)'")
    assert (
        "Rewound credential" in (told := examine(toolkit, code=1))["munge", "error"]
        and "clock" in told["munge", "error"]
    )
    slurm(version="slurm 20.11.9")
    assert "older than 22.05" in examine(toolkit)["slurm", "warning"]
    slurm()
    monkeypatch.setattr(doctor, "USEFUL", ("no_sacct",))
    assert "no_sacct" in examine(toolkit)["slurm", "warning"]
    monkeypatch.setattr(doctor, "SLOW_ANSWER_S", 0.0)
    assert "responded after 0." in examine(toolkit)["controller", "warning"]
    monkeypatch.setattr(doctor, "NEEDED", ("no_sbatch",))
    told = examine(toolkit, code=1)
    assert "no_sbatch" in told["slurm", "error"] and ("controller", "warning") not in told


def test_a_slurm_or_a_munge_that_hangs_is_not_waited_for_long(slurm, monkeypatch):
    monkeypatch.setattr(doctor, "MUNGE_TIMEOUT_S", 0.2)
    slurm(ping="exec sleep 9")
    _, controller = doctor._slurm(Slurm(timeout_s=1.0))
    assert (controller.level, controller.detail) == ("error", "scontrol did not respond within 1 s")
    slurm(munge="exec sleep 9")
    *_, munge = doctor._slurm(Slurm())
    assert (munge.level, munge.fix) == ("error", "restart munged on this host")


def test_a_site_that_is_none_hides_nothing_else(toolkit, slurm, asked):
    told = examine(toolkit, "--runs", toolkit.folder, site="nowhere", code=1)
    assert ("site", "error") in told and ("controller", "ok") in told


def test_a_folder_of_runs_that_cannot_be_written(toolkit, slurm, asked, monkeypatch):
    (toolkit.folder / "file").write_text("")
    told = examine(toolkit, "--runs", toolkit.folder / "file" / "runs", code=1)
    assert "cannot be written: Not a directory" in told["runs", "error"] and "TOOLKIT_RUNS" in told["runs", "error"]
    monkeypatch.setattr(doctor, "FREE_BYTES", 2**70)
    assert "free disk space" in examine(toolkit, code=1)["runs", "error"]

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(doctor.os, "fsync", full)
    assert "cannot be written: No space left on device free disk space" in examine(toolkit, code=1)["runs", "error"]


def test_runs_on_a_disk_of_this_host_are_for_this_host(toolkit, slurm, asked, monkeypatch):
    monkeypatch.setattr(doctor, "mount_of", lambda path: Mount(path, "ext4", "/dev/sda"))
    assert "choose a shared folder" in examine(toolkit)["runs", "warning"]
    assert ("runs", "ok") in (told := examine(toolkit, site="local")) and ("site", "ok") in told
    site = toolkit.folder / "mine.toml"
    site.write_text(f'name = "mine"\nextends = "devcluster"\n[paths]\nruns = "{toolkit.folder}"\n')
    assert ("runs", "ok") in examine(toolkit, site=site), "the site says that nodes see it"
    assert "choose a shared folder" in examine(toolkit, "--runs", toolkit.folder.parent, site=site)["runs", "warning"]
    monkeypatch.setattr(doctor, "mount_of", lambda path: Mount(path, "lustre", "fs0"))
    assert ("runs", "ok") in examine(toolkit)


def test_a_clock_that_is_off(toolkit, slurm, asked, monkeypatch):
    real = os.fstat
    early = lambda descriptor: os.stat_result([*real(descriptor)[:8], 0, 0])  # noqa: E731
    monkeypatch.setattr(doctor.os, "fstat", early)
    assert "s off this host's" in examine(toolkit)["clock", "warning"]


def test_libraries_torch_and_mpi(toolkit, slurm, asked, monkeypatch):
    monkeypatch.setattr(
        doctor.metadata, "requires", lambda name: ["click>=99", "no_such_thing>=1", "torch>=99; extra == 'train'"]
    )
    asked[doctor._MPI] = (None, "RuntimeError: cannot load MPI library")
    asked[doctor._TORCH] = ({"version": "2.13", "cuda": "13.0", "gpus": 0, "nccl": None}, "")
    told = examine(toolkit, code=1)
    assert "pip install 'no_such_thing>=1'" in told["libraries", "error"]
    assert "cannot load MPI library" in told["mpi", "warning"] and "NCCL missing" in told["torch", "warning"]
    asked[doctor._TORCH] = ({"version": "2.13", "cuda": None, "gpus": 0, "nccl": None}, "")
    monkeypatch.setattr(doctor, "_FIRST_GPU", toolkit.folder / "nvidia0")
    assert "without CUDA" in examine(toolkit, code=1)["torch", "ok"]
    (toolkit.folder / "nvidia0").touch()
    assert "install torch for CUDA" in examine(toolkit, code=1)["torch", "warning"]


def test_a_program_that_breaks_or_hangs_is_told(monkeypatch):
    assert doctor._ask_python("print('{\"a\": 1}')") == ({"a": 1}, "")
    assert doctor._ask_python("raise ImportError('no such library')") == (None, "ImportError: no such library")
    assert doctor._ask_python("import os; os.abort()")[1] == "exit code -6"
    monkeypatch.setattr(doctor, "IMPORT_TIMEOUT_S", 0.5)
    assert "no result within" in doctor._ask_python("import time; time.sleep(60)")[1]


@pytest.mark.parametrize(
    ("soft", "hard", "level", "fix"),
    [
        (1024, 4096, "warning", "`ulimit -n 4096`"),
        (1024, resource.RLIM_INFINITY, "warning", "`ulimit -n 4096`"),
        (1024, 4095, "warning", "raise it in limits.conf"),
        (4096, 4096, "ok", ""),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, "ok", ""),
    ],
)
def test_open_files_and_locked_memory(monkeypatch, soft, hard, level, fix):
    locked = resource.RLIM_INFINITY if soft == resource.RLIM_INFINITY else 0
    limits = {resource.RLIMIT_NOFILE: (soft, hard), resource.RLIMIT_MEMLOCK: (locked, locked)}
    monkeypatch.setattr(doctor.resource, "getrlimit", limits.__getitem__)
    files, memory = doctor._limits()
    assert (files.level, files.fix, memory.level) == (level, fix, "ok")
    assert ("unlimited" in memory.detail) is (locked == resource.RLIM_INFINITY)
