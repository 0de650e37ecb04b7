"""Where variables are read from: a process with NCCL's own files, files of others, resolved jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.errors import ToolkitError
from toolkit.topology.nccl import environment
from toolkit.topology.nccl.finding import effective


def read(path: Path, text: str) -> dict[str, tuple[str, str]]:
    path.write_text(text, encoding="utf-8")
    return {given.name: (given.value, given.where.rpartition(":")[2]) for given in environment.of_file(path)}


def test_the_forms_of_files(tmp_path):
    said = read(
        tmp_path / "job.env",
        "#!/bin/bash\n# NCCL_DEBUG=TRACE\nexport NCCL_DEBUG=INFO NCCL_NET='IB'\nNCCL_ALGO=\"ring,tree\"  # why\n"
        "NCCL_IB_HCA==mlx5_0\nsrun --mpi=pmix ./a.out\nNCCL_DEBUG=WARN\nNCCL_NET_PLUGIN=AWS Libfabric\n"
        "NCCL_TOPO_FILE=it's\n",
    )
    assert said == {
        "NCCL_DEBUG": ("WARN", "7"), "NCCL_NET": ("IB", "3"), "NCCL_ALGO": ("ring,tree", "4"),
        "NCCL_IB_HCA": ("=mlx5_0", "5"), "NCCL_NET_PLUGIN": ("AWS Libfabric", "8"), "NCCL_TOPO_FILE": ("it's", "9"),
    }  # fmt: skip


def test_what_env_prints_with_zeros(tmp_path):
    assert read(tmp_path / "env", "A=1\nB\0NCCL_DEBUG=INFO\0")["NCCL_DEBUG"] == ("INFO", "2")


def test_a_file_that_sets_nothing_is_refused(tmp_path):
    (tmp_path / "a").write_text("hello\n")
    with pytest.raises(ToolkitError, match=r"expected NAME=VALUE lines, got none\. Fix: write one NAME=VALUE"):
        environment.of_file(tmp_path / "a")
    with pytest.raises(ToolkitError, match="cannot read the file: Is a directory"):
        environment.of_file(tmp_path)
    (tmp_path / "empty").write_text("")
    assert environment.of_file(tmp_path / "empty") == []


def test_nccls_own_files_fill_what_the_environment_leaves_open(tmp_path):
    (tmp_path / ".nccl.conf").write_text("NCCL_DEBUG=INFO\n#NCCL_NET=IB\nNCCL_ALGO=ring\n")
    (tmp_path / "system.conf").write_text("NCCL_ALGO=tree\nNCCL_CROSS_NIC=1\n")
    givens = environment.of_process({"NCCL_DEBUG": "WARN"}, tmp_path / "system.conf", tmp_path)
    counts = {name: (given.value, given.where) for name, given in effective(givens).items()}
    assert counts == {
        "NCCL_DEBUG": ("WARN", "environment"),
        "NCCL_ALGO": ("ring", f"{tmp_path}/.nccl.conf:3"),
        "NCCL_CROSS_NIC": ("1", f"{tmp_path}/system.conf:2"),
    }


def test_a_named_file_stands_for_the_users_own(tmp_path):
    (tmp_path / ".nccl.conf").write_text("NCCL_ALGO=ring\n")
    (tmp_path / "other").write_text("NCCL_ALGO=tree\n")
    environ = {"NCCL_CONF_FILE": str(tmp_path / "other")}
    assert effective(environment.of_process(environ, tmp_path / "none", tmp_path))["NCCL_ALGO"].value == "tree"


def test_a_jobs_variables_stand_before_its_sites():
    job = {"env": {"vars": {"NCCL_NET": "IB"}}, "network": {"vars": {"NCCL_NET": "Socket", "NCCL_CROSS_NIC": "1"}},
           "site_env": {"vars": {"NCCL_CROSS_NIC": "0"}}}  # fmt: skip
    counts = effective(environment.of_job(job, "record.json"))
    assert (counts["NCCL_NET"].value, counts["NCCL_NET"].where) == ("IB", "record.json: env.vars")
    assert (counts["NCCL_CROSS_NIC"].value, counts["NCCL_CROSS_NIC"].where) == ("1", "record.json: network.vars")
    assert environment.of_job({"env": None}, "x") == []
