"""`toolkit site init`: what Slurm says stands as a fact, what nobody said as a guess, and the file loads."""

import re
import tomllib
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm
from slurm_of_a_site import CONFIG, NODES, install

from toolkit.config.request import resolve_job
from toolkit.config.shipped import find_job
from toolkit.site import init
from toolkit.site.load import load_site


@pytest.fixture
def ours(tmp_path, monkeypatch):
    """A home and a PATH with the cluster's commands; an InfiniBand host with an Open MPI and a $SCRATCH."""
    bin_folder, networks = tmp_path / "usr/bin", tmp_path / "net"
    bin_folder.mkdir(parents=True)
    install(bin_folder)
    for name in ("lo", "eth0", "ib0"):
        (networks / name).mkdir(parents=True)
    (tmp_path / "usr/lib").mkdir()
    (tmp_path / "usr/lib/libmpi.so.40").touch()
    (bin_folder / "mpirun").write_text("#!/bin/sh\n")
    (bin_folder / "mpirun").chmod(0o755)
    monkeypatch.setattr(init, "NETWORKS", networks)
    for name, value in {
        "PATH": f"{bin_folder}:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "SCRATCH": str(tmp_path),
        "USER": "ada",
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("SLURM_CONF", "LOADEDMODULES", "PSCRATCH", "WORK"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_facts_and_guesses(toolkit, ours):
    text = toolkit.ok("site", "init", "--print")
    assert not (ours / ".config").exists()
    values = tomllib.loads(text)
    assert values["name"] == "ours" and values["detect"] == {"cluster_name": "ours"}
    assert values["gpu"] == {"request": "--gpus-per-node={count}"}
    assert values["launcher"] == {"kind": "srun", "mpi": "pmix", "libmpi": f"{ours}/usr/lib/libmpi.so.40"}
    assert values["network"] == {"fabric": "infiniband", "interface": "ib0"}
    assert values["paths"] == {"scratch": "$SCRATCH", "local_scratch": "/tmp"}
    assert values["partitions"] == {
        "cpu": {
            "default": True,
            "max_nodes": 2,
            "max_time": "2-00:00:00",
            "cpus_per_node": 126,
            "mem_gb_per_node": 250,
        },
        "debug": {"max_nodes": 1, "max_time": "00:30:00", "cpus_per_node": 126, "mem_gb_per_node": 250},
        "gpu": {"max_nodes": 2, "cpus_per_node": 62, "gpus_per_node": 4, "mem_gb_per_node": 500},
    }
    assert "# Omitted, from scontrol show partition: gone (State=DOWN), staff (AllowGroups=admins)." in text
    assert "# Your accounts, from sacctmgr show associations: astro, chem, chem if a job does not set one." in text
    assert "the maximum; nodes have 62 to 126" in text
    assert 'request = "--gres=gpu:a100:{count}"' in text


def test_every_line_says_where_it_is_from(toolkit, ours):
    for line in toolkit.ok("site", "init", "--print").splitlines():
        if re.match(r"\w+ = ", line) and not line.startswith(("name =", "checked =")):
            assert re.search(r"# (from \S|guess: .*; verify it: \S)", line), line


def test_the_file_loads_and_jobs_resolve_on_it(toolkit, ours):
    said = toolkit.ok("site", "init", "--name", "mine")
    path = ours / ".config/toolkit/sites/mine.toml"
    assert said == f"{path}: verify 7 guesses, then run `toolkit site check mine`\n"
    site = load_site("mine", {"HOME": str(ours)})
    job = resolve_job(
        find_job("mpi_hello"), site=site, environ={"SCRATCH": "/s"}, settings=["job.partition=gpu", "job.nodes=2"]
    )
    assert (job.job.gpus_per_node, job.paths.scratch) == (4, "/s")
    assert "#SBATCH --gpus-per-node=4\n" in toolkit.ok("render", "mpi_hello", "--site", "mine", "-p", "gpu", "-N", 2)
    assert (
        "# Jobs here request all of them by default; a job without GPUs sets gpus_per_node = 0 in [job].\n"
        in path.read_text()
    )
    words = ("mpi_hello", "--site", "mine", "-p", "gpu", "-N", 2, "--set", "job.gpus_per_node=0")
    assert "#SBATCH --gpus-per-node" not in toolkit.ok("render", *words)


def test_what_is_there_is_not_written_over(toolkit, ours):
    toolkit.ok("site", "init")
    path = ours / ".config/toolkit/sites/ours.toml"
    path.write_text("mine")
    refused = toolkit("site", "init")
    assert refused.code == 2
    assert (
        refused.err
        == f"toolkit: {path}: the file already exists. Fix: choose another file with -o, or overwrite it with --force\n"
    )
    assert path.read_text() == "mine"
    toolkit.ok("site", "init", "--force")
    assert path.read_text() != "mine"


def test_the_name_is_the_files(toolkit, ours):
    toolkit.ok("site", "init", "-o", ours / "other.toml")
    assert load_site(str(ours / "other.toml"), {}).name == "other"
    wrong = toolkit("site", "init", "-o", ours / "other.toml", "--name", "mine", "--force")
    assert (wrong.code, "-o " + str(ours / "mine.toml") in wrong.err) == (2, True)
    assert toolkit("site", "init", "-o", ours / "other").code == 2
    assert toolkit("site", "init", "--name", "a b").err.startswith("toolkit: 'a b' is not a valid site name. Fix: ")


def test_a_partition_of_one_of_several_gpu_types_requests_it(toolkit, ours):
    nodes = NODES.replace("gpu:a100:4(S:0-1),nvme:3800 NodeAddr=g2", "gpu:a100_1g.5gb:7 NodeAddr=g2")
    nodes = nodes.replace("Gres=(null) NodeAddr=n1", "Gres=gpu:h100:2 NodeAddr=n1")
    (ours / "usr/bin/node.txt").write_text(nodes.replace("(null) NodeAddr=n2", "gpu:h100:2 NodeAddr=n2"))
    text = toolkit.ok("site", "init", "--print")
    partitions = tomllib.loads(text)["partitions"]
    assert partitions["cpu"]["gpu_request"] == "--gpus-per-node=h100:{count}" and "gpu_request" not in partitions["gpu"]
    assert "# Types, from scontrol show node: a100, a100_1g.5gb; gpu_request selects one." in text


def test_an_older_slurm_counts_gpus_by_gres(toolkit, ours):
    (ours / "usr/bin/config.txt").write_text(CONFIG.replace("cons_tres", "cons_res"))
    assert tomllib.loads(toolkit.ok("site", "init", "--print"))["gpu"]["request"] == "--gres=gpu:{count}"


def test_slurm_that_does_not_answer_is_said(toolkit, ours):
    silence = "slurm_load_ctl_conf error: Unable to contact slurm controller\n"
    FakeSlurm(ours / "usr/bin").respond("scontrol", stderr=silence, code=1)
    refused = toolkit("site", "init")
    assert refused.code == 3 and "Unable to contact slurm controller" in refused.err
    assert not Path(ours / ".config").exists()


@pytest.mark.parametrize("default", ["none", "pmix"])
def test_an_mpich_gets_the_plugin_that_it_speaks(toolkit, ours, default):
    """Also where Slurm's own default is another one: ranks of MPICH end at once under PMIx."""
    (ours / "usr/lib/libmpi.so.40").rename(ours / "usr/lib/libmpi.so.12")
    config = ours / "usr/bin/config.txt"
    config.write_text(CONFIG.replace("MpiDefault              = none", f"MpiDefault = {default}"))
    launcher = tomllib.loads(toolkit.ok("site", "init", "--print"))["launcher"]
    assert launcher == {"kind": "srun", "mpi": "pmi2", "libmpi": f"{ours}/usr/lib/libmpi.so.12"}


def test_slurms_default_stands_where_the_library_speaks_it(toolkit, ours):
    config = ours / "usr/bin/config.txt"
    config.write_text(CONFIG.replace("MpiDefault              = none", "MpiDefault = pmix"))
    text = toolkit.ok("site", "init", "--print")
    assert 'mpi = "pmix" # from scontrol show config: MpiDefault;' in text
    assert "identified only by its file name (the library reported no version: " in text


def test_a_library_that_cannot_be_loaded_here_is_known_by_mpirun(toolkit, ours):
    """Its file has MPICH's name, and is an Open MPI."""
    (ours / "usr/lib/libmpi.so.40").rename(ours / "usr/lib/libmpi.so.12")
    (ours / "usr/bin/mpirun").write_text('#!/bin/sh\necho "mpirun (Open MPI) 5.0.7"\n')
    text = toolkit.ok("site", "init", "--print")
    assert (
        tomllib.loads(text)["launcher"]["mpi"] == "pmix" and "mpirun (Open MPI) 5.0.7 (by `mpirun --version`)" in text
    )
