"""What this host can tell before any cluster is asked: walltimes, ranks and GPUs, programs, folders, file systems, room."""

from __future__ import annotations

import os
import sys
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest

from toolkit.rundir.layout import create_run
from toolkit.runs.record.job import request_of
from toolkit.submission.preflight import storage
from toolkit.submission.preflight.checks import check_files
from toolkit.submission.preflight.shape import check_shape
from toolkit.submission.preflight.storage import Mount, check_room, check_shared, mount_of


def shape(job):
    return [(one.term, one.what, one.fix) for one in check_shape(job, request_of(job))]


@pytest.mark.parametrize(
    ("time", "what", "fix"),
    [
        ("1:30", "Slurm reads 1:30 as 1 minute and 30 seconds", 'time = "1:30:00" for hours and minutes, "0:1:30" if minutes are intended'),
        ("24:00", "Slurm reads 24:00 as 24 minutes", 'time = "24:00:00" for hours and minutes, "0:24:00" if minutes are intended'),
        ("48", "Slurm reads 48 as 48 minutes", 'time = "48:00:00" for hours, "0:48:00" if minutes are intended'),
        ("1-30", "Slurm reads 1-30 as 2-06:00:00: the part after the days is hours", "write days-hours:minutes:seconds"),
    ],
)  # fmt: skip
def test_times_that_may_not_be_meant(resolved, time, what, fix):
    assert shape(resolved(f'time = "{time}"', "[restart]\nwarn_s = 1\n")) == [("warning", what, fix)]


def test_the_time_of_a_script_is_in_the_form_of_sbatch(resolved):
    job = resolved('time = "20:00"')
    assert shape(job) != []
    assert shape(job.model_copy(update={"job": job.job.model_copy(update={"once": True})})) == []


@pytest.mark.parametrize("time", ["", "10", "90", "90:00", "0:24:00", "1:30:00", "2-00:00:00", "1-12", "UNLIMITED"])
def test_times_that_are_plain(resolved, time):
    assert shape(resolved(f'time = "{time}"')) == []


def test_ranks_and_gpus(resolved):
    def said(ranks, gpus):
        return shape(resolved(f"ranks_per_node = {ranks}\ngpus_per_node = {gpus}"))

    assert said(4, 4) == said(4, 0) == []
    assert said(3, 4) == [
        ("refusal", "3 ranks and 4 GPUs per node: neither number is divisible by the other", "ranks_per_node = 4, or gpus_per_node = 3")
    ]  # fmt: skip
    assert [one[0] for one in (*said(4, 2), *said(1, 4))] == ["note", "note"]


def files(job, *once):
    return [(one.term, one.where, one.what, one.fix) for one in check_files(job, once)]


def test_a_folder_of_logs_that_slurm_would_not_make(resolved, tmp_path):
    job = resolved(f'sbatch = ["--error={tmp_path}/logs/%j.err"]')
    (found,) = files(job)
    assert found[0] == "refusal" and found[1].endswith("job.sbatch")
    assert found[3] == f"mkdir -p {tmp_path}/logs"
    (tmp_path / "logs").mkdir()
    assert files(job) == []
    (found,) = files(job, f"--output={tmp_path}/other logs/out")
    assert found[1:] == (
        f"-o {tmp_path}/other logs/out", f"there is no folder {tmp_path}/other logs for --output, and Slurm does not create it",
        f"mkdir -p '{tmp_path}/other logs'",
    )  # fmt: skip
    assert files(job, "--output=beside.out", f"--error={tmp_path}/%j/err", "--output=/dev/null") == []


@pytest.mark.parametrize(
    ("content", "mode", "what", "fix"),
    [
        (b"#!/bin/bash\r\ntrue\r\n", 0o755, "has Windows line endings", "sed -i"),
        (b"#!/no/such/shell\n", 0o755, "/no/such/shell, is not on this host", "correct its #! line"),
        (b"#!\n", 0o755, "names no interpreter", 'write "#!/bin/bash"'),
        (b"echo hello\n", 0o755, "is not an executable program: it has no #! line", "add a first line"),
        (b"#!/bin/sh\n", 0o644, "is not executable", "chmod +x"),
    ],
)
def test_a_program_that_cannot_start(resolved, tmp_path, content, mode, what, fix):
    path = tmp_path / "run.sh"
    path.write_bytes(content)
    path.chmod(mode)
    (found,) = files(resolved(entry=f'["{path}"]'))
    assert found[0] == "refusal" and what in found[2] and found[3].startswith(fix)


def test_programs_that_can(resolved, tmp_path):
    (tmp_path / "run.sh").write_text("#!/bin/sh -e\n")
    (tmp_path / "run.sh").chmod(0o755)
    for entry in ('["./run.sh"]', f'["{sys.executable}"]', '["some-program-of-the-nodes"]'):
        assert files(resolved(entry=entry)) == []
    ((severity, *_),) = files(resolved(entry='["/opt/of/the/nodes/a.out"]'))
    assert severity == "warning"


def shared(job, runs, cluster):
    return [one for one in check_shared(job, runs, cluster) if one.where == str(runs)]


def test_runs_where_only_this_host_sees_them(resolved, cluster, tmp_path, monkeypatch):
    """Below /tmp, and on a file system in memory: refused where the nodes are known to be others."""
    job = resolved()
    private = Path("/tmp/runs")
    (finding,) = shared(job, private, cluster())
    assert (finding.term, "below /tmp, so other hosts cannot see it" in finding.what) == ("refusal", True)
    assert [one.severity for one in shared(job, private, None)] == ["warning"]
    monkeypatch.setattr(storage, "mount_of", lambda path: Mount(Path("/fast"), "tmpfs", "none"))
    assert "in the memory of this host (tmpfs)" in shared(job, Path("/fast/runs"), cluster())[0].what
    alone = [replace(cluster().shapes[0], nodes=1, names=os.uname().nodename.partition(".")[0])]
    assert shared(job, private, cluster(alone)) == []  # the only node is this host


def test_a_disk_of_this_host_is_worth_a_note(resolved, cluster, monkeypatch):
    monkeypatch.setattr(storage, "mount_of", lambda path: Mount(Path("/data"), "xfs", "/dev/sdb"))
    (finding,) = shared(resolved(), Path("/data/runs"), cluster())
    assert finding.term == "note" and "xfs at /data" in finding.what
    site = '[paths]\nruns = "/data/runs"\n'  # the site file says that all nodes see it
    assert shared(resolved(site=site), Path("/data/runs"), cluster()) == []
    monkeypatch.setattr(storage, "mount_of", lambda path: Mount(Path("/data"), "nfs4", "server:/data"))
    assert shared(resolved(), Path("/data/runs"), cluster()) == []


def test_mounts_are_read_as_the_kernel_writes_them(monkeypatch, tmp_path):
    table = "21 1 8:1 / / rw shared:1 - ext4 /dev/root rw\n22 21 0:5 / /my\\040data rw - lustre mds@tcp:/fs rw\n"
    monkeypatch.setattr(storage.Path, "read_text", lambda self, **_: table)
    assert mount_of(Path("/my data/runs")) == Mount(Path("/my data"), "lustre", "mds@tcp:/fs")
    assert mount_of(Path("/elsewhere")) == Mount(Path("/"), "ext4", "/dev/root")


Room = namedtuple("Room", "f_bavail f_frsize f_favail f_files f_blocks", defaults=[1])


def test_room_for_the_next_checkpoint(resolved, tmp_path, monkeypatch):
    run = create_run(tmp_path / "runs", "work")
    saved = run.checkpoints / "step-00000010"
    saved.mkdir()
    (saved / "shard.h5").write_bytes(bytes(3000))

    def found(free_bytes, free_files=10**6):
        monkeypatch.setattr(storage.os, "statvfs", lambda _: Room(free_bytes, 1, free_files, 10**7))
        return [(one.term, one.what) for one in check_room(resolved(), tmp_path / "runs", run)]

    assert [severity for severity, _ in found(5000)] == ["refusal"]
    assert found(10**12) == []
    assert [severity for severity, _ in found(10**12, free_files=7)] == ["refusal"]
    assert found(10**6) == [("warning", "only 0.0 GB are free")]
    run.checkpoints.joinpath("step-00000010", "shard.h5").unlink()
    assert found(0)[0][0] == "refusal", "a file system that is full"
    monkeypatch.setattr(storage.os, "access", lambda path, mode: False)  # as root a test may write anywhere
    assert found(10**12) == [("refusal", "you have no write permission here")]


@pytest.mark.parametrize(
    ("line", "severity", "what"),
    [
        ("{device} 500 1000 2000 10 0 0", None, ""),
        ("{device} 2000* 1000 2000 6days 10 0 0", "refusal", "you use 2000 of 2000 KiB"),
        ("{device} 1500* 1000 2000 6days 10 0 0", "warning", "above the soft limit of 1000"),
        ("{device} 500 0 0 900* 900 900 7days", "refusal", "you use 900 of 900 files"),
        # As quota 4.06 printed them on an ext4 with limits, where no more could be written.
        (
            "{device}     400*    200    3000    none       1       0       0        ",
            "refusal",
            "the grace period of the soft limit",
        ),
        (
            "{device}       0       0       0              55*     50       0    none",
            "refusal",
            "the grace period of the soft limit",
        ),
        ("{device}       0    2000    3000              56*     50      60   7days", "warning", "soft limit of 50"),
        ("server:/elsewhere 2000* 1000 2000 6days 10 0 0", None, ""),
    ],
)
def test_quota(resolved, tmp_path, monkeypatch, line, severity, what):
    program = tmp_path / "bin" / "quota"
    program.parent.mkdir()
    device = mount_of(tmp_path).device
    program.write_text(f"#!/bin/sh\necho 'Disk quotas for user ada (uid 7):'\necho '  {line.format(device=device)}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setattr(storage.os, "statvfs", lambda _: Room(10**12, 1, 10**6, 10**7))
    found = list(check_room(resolved(), tmp_path / "runs"))
    assert [one.term for one in found] == ([severity] if severity else [])
    assert not found or what in found[0].what
