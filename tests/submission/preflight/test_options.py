"""Options of sbatch against each other and against what sbatch accepts, in scripts, job files and flags."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from toolkit.config.request import JobRequest, resolve
from toolkit.submission.preflight.options import check_options


def script(folder: Path, lines: str) -> Path:
    path = folder / "job.sh"
    path.write_text(f"#!/bin/bash\n{lines}\nhostname\n")
    return path


def found(path: Path, *settings: str, options: tuple[str, ...] = ()) -> list[tuple[str, str, str, str]]:
    job = resolve(JobRequest(str(path), settings), None, environ={})
    return [(one.term, one.where.removeprefix(f"{path}:"), one.what, one.fix) for one in check_options(job, options)]


@pytest.mark.parametrize(
    ("line", "got"),
    [
        ("--mem=2GiB", "'2GiB'"), ("--mem=2.5G", "'2.5G'"), ("--mem=", "''"), ("--mem-per-cpu=x", "'x'"),
        ("--nodes=two", "'two'"), ("--nodes=2,", "'2,'"), ("--nodes =2", "'=2'"), ("-N=2", "'=2'"), ("--nodes=1-", "'1-'"),
        ("-n2x", "'2x'"), ("--ntasks=0", "'0'"), ("-nodes=2", "'odes=2'"), ("--cpus-per-task=1.5", "'1.5'"),
        ("--time=5m", "'5m'"), ("--time=1:2:3:4", "'1:2:3:4'"), ("--time-min=x", "'x'"),
    ],
)  # fmt: skip
def test_values_that_sbatch_rejects(tmp_path, line, got):
    ((term, where, what, fix),) = found(script(tmp_path, f"#SBATCH -J x\n#SBATCH {line}"))
    assert (term, where) == ("refusal", "3") and what.endswith(f"got {got}") and fix


@pytest.mark.parametrize(
    "line",
    ["--mem=2GB", "--mem=+1000m", "--mem=0", "--nodes=1k", "--nodes=1-2", "--ntasks=+2", "--time=1-0", "-N 2 # two", "--time-min=5"],
)  # fmt: skip
def test_values_that_sbatch_accepts(tmp_path, line):
    assert found(script(tmp_path, f"#SBATCH {line}")) == []


@pytest.mark.parametrize(
    ("line", "term", "what", "fix"),
    [
        ("-n1 -N1 --ntasks-per-node=2", "warning", "1 task, but 2 tasks per node on 1 node: Slurm starts only 1", "--ntasks=2, or remove --ntasks"),
        ("-n3 -N2 --tasks-per-node=2", "warning", "3 tasks, but 2 tasks per node on 2 nodes: Slurm starts only 3", "--ntasks=4, or remove --ntasks"),
        ("-n2 -N1-4 --ntasks-per-node=4", "warning", "2 tasks, but 4 tasks per node on 1 node: Slurm starts only 2", "--ntasks=4, or remove --ntasks"),
        ("-n1 -N2", "warning", "1 task on 2 nodes: Slurm allocates only 1 node", "--ntasks=2, or --nodes=1"),
        ("-n5 -N2 --ntasks-per-node=2", "refusal", "5 tasks, but at most 2 tasks per node on 2 nodes", "--ntasks=4, or --nodes=3"),
    ],
)  # fmt: skip
def test_tasks_that_do_not_fit_the_nodes(tmp_path, line, term, what, fix):
    assert found(script(tmp_path, f"#SBATCH {line}")) == [(term, "2", what, fix)]


@pytest.mark.parametrize(
    "line", ["-n4 -N2 --ntasks-per-node=2", "-n4 -N1-2 --ntasks-per-node=2", "-n6 --ntasks-per-node=4", "-n4", "-N2"]
)
def test_tasks_that_fit(tmp_path, line):
    assert found(script(tmp_path, f"#SBATCH {line}")) == []


@pytest.mark.parametrize("option", ["--tmp '2G'", '--time-min "10"', "--mincpus '5'", '--comment="a"'])
def test_quoted_values_in_a_job_file(tmp_path, option):
    job = tmp_path / "job.toml"
    job.write_text(f'[job]\nentry = ["true"]\nsbatch = [{json.dumps(option)}]\n')
    assert found(job) == []
    job.write_text('[job]\nentry = ["true"]\n')
    assert found(job, options=(option,)) == []


def test_short_options_in_one_argument(tmp_path):
    ((_, _, what, _),) = found(script(tmp_path, "#SBATCH -N2"), options=("-Hn1",))
    assert what == "1 task on 2 nodes: Slurm allocates only 1 node"


def test_a_flag_is_compared_with_the_script(tmp_path):
    path = script(tmp_path, "#SBATCH -N2\n#SBATCH --ntasks-per-node=2")
    ((term, where, what, _),) = found(path, options=("--ntasks=2",))
    assert (term, where) == ("warning", "--ntasks") and what.startswith("2 tasks, but 2 tasks per node on 2 nodes")


def test_memory_that_is_requested_twice(tmp_path):
    path = script(tmp_path, "#SBATCH --mem=2G\n#SBATCH -n2\n#SBATCH --mem-per-cpu=500M")
    ((term, where, what, fix),) = found(path)
    assert (term, where) == ("refusal", "2") and fix == "remove --mem-per-cpu=500M or --mem=2G"
    assert what == f"sbatch accepts only one of --mem=2G ({path}:2) and --mem-per-cpu=500M ({path}:4)"
    ((_, where, what, _),) = found(path, "job.mem_gb_per_node=4")
    assert "--mem=4G (--set job.mem_gb_per_node=4:job.mem_gb_per_node)" in what and f"({path}:4)" in what
    job = tmp_path / "job.toml"
    job.write_text('[job]\nentry = ["true"]\nmem_gb_per_node = 2\nsbatch = ["--mem-per-gpu 1G"]\n')
    ((_, where, what, _),) = found(job)
    assert where == "3:job.mem_gb_per_node" and what.endswith(f"and --mem-per-gpu=1G ({job}:4:job.sbatch)")
    assert found(job, "job.mem_gb_per_node=0") == []


def test_characters_in_a_job_file(tmp_path):
    job = tmp_path / "job.toml"
    job.write_text(
        '[job]\nentry = ["true"]\nconstraint = "fast\u00a0"\nsbatch = ["--mem=“2G”", "--comment=“ä”", "-L lic\u200b"]\n'
    )
    assert {(where, what) for _, where, what, _ in found(job)} == {
        ("3:job.constraint", "expected only ASCII in --constraint, got U+00A0 (no-break space)"),
        ("4:job.sbatch", "expected only ASCII in --mem, got U+201C (left double quotation mark)"),
        ("4:job.sbatch", "expected only ASCII in --licenses, got U+200B (zero width space)"),
    }
