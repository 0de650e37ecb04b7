"""The `#SBATCH` lines of a script, read as sbatch reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.errors import ToolkitError
from toolkit.slurm.batch_script import read_batch_script


def options(folder: Path, lines: str) -> list[list[str]]:
    path = folder / "job.sh"
    path.write_text(f"#!/bin/bash\n{lines}\n")
    return [[one.option for one in found] for found in read_batch_script(path).components]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("#SBATCH --nodes=2 --time=5 # two nodes", ["--nodes=2", "--time=5"]),
        ("#SBATCH -N2 -t 5", ["--nodes=2", "--time=5"]),
        ("#SBATCH-N2", ["--nodes=2"]),
        ("#SBATCH\t-HN2", ["--hold", "--nodes=2"]),
        ("#SBATCH --nodes\n#SBATCH 3", ["--nodes=3"]),
        ("#SBATCH --job-n=x", ["--job-name=x"]),
        ('#SBATCH --job-name="my job"', ["--job-name=my job"]),
        ("#SBATCH --comment='a\\'b' -N1", ["--comment=a'b", "--nodes=1"]),
        ('#SBATCH --comment="a#b" --hold', ["--comment=a#b", "--hold"]),
        ("#SBATCH --comment=a#b --hold", ["--comment=a"]),
        ("#SBATCH --comment=a\\#b", ["--comment=a#b"]),
        ('#SBATCH "" --hold', []),
        ("#SBATCH --exclusive\n#SBATCH --exclusive=user", ["--exclusive", "--exclusive=user"]),
        (" #SBATCH -N2\n##SBATCH -N3\n# SBATCH -N4\n#PBS -l nodes=2\n#BSUB -n 4", []),
        ("\n# a comment\n\n#SBATCH -N2\necho\n#SBATCH -N3", ["--nodes=2"]),
        ("#SBATCH --plugin-option=1", ["--plugin-option=1"]),
        ("#SLURM -N2", ["--nodes=2"]),
    ],
)
def test_the_options_of_a_script(tmp_path: Path, lines: str, expected: list[str]) -> None:
    assert options(tmp_path, lines) == [expected]


def test_components_of_a_heterogeneous_job(tmp_path: Path) -> None:
    assert options(tmp_path, "#SBATCH -N1\n#SBATCH hetjob\n#SBATCH -N2") == [["--nodes=1"], ["--nodes=2"]]


@pytest.mark.parametrize(
    ("lines", "line"),
    [
        ('#SBATCH --comment="abc', 2),
        ("#SBATCH :x", 2),
        ("#SBATCHX", 2),
        ("\n#SBATCH --exclusive user", 3),
        ("#SBATCH --no=2", 2),
        ('#SBATCH -J ""', 2),
        ("#SBATCH -Z", 2),
    ],
)
def test_what_sbatch_rejects(tmp_path: Path, lines: str, line: int) -> None:
    with pytest.raises(ToolkitError) as caught:
        options(tmp_path, lines)
    assert caught.value.where == f"{tmp_path}/job.sh:{line}" and caught.value.fix


@pytest.mark.parametrize("data", [b"#SBATCH -N2\n", b"#!/bin/bash\r\n#SBATCH -N2\r\n", b"\xef\xbb\xbf#!/bin/bash\n"])
def test_files_that_sbatch_rejects(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "job.sh"
    path.write_bytes(data)
    with pytest.raises(ToolkitError):
        read_batch_script(path)


@pytest.mark.parametrize("first", ["#!", "#! ", "#!\xe9", "echo"])
def test_a_script_without_an_interpreter_is_refused(tmp_path, first):
    path = tmp_path / "job.sh"
    path.write_bytes(f"{first}\necho\n".encode("latin-1"))
    with pytest.raises(ToolkitError, match="expected a script that starts with `#!` and a program"):
        read_batch_script(path)
