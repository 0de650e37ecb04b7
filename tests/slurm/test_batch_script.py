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
        ("#SBATCH -N2\n\u00a0\n#SBATCH -n4", ["--nodes=2"]),  # sbatch reads a no-break space as a command
        ("\u3000#SBATCH -N2\n#SBATCH -n4", []),
        ("#SBATCH -N2\n\f\v\n#SBATCH -n4", ["--nodes=2", "--ntasks=4"]),
        (
            "#SBATCH --job-name=Übung --comment=“a–b” -o /ä/%j",
            ["--job-name=Übung", "--comment=“a–b”", "--output=/ä/%j"],
        ),
        ("#SBATCH --partition=größe", ["--partition=größe"]),
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
        ("#SBATCH --requeue=1", 2),
        ("#SBATCH -N2\n#SBATCH --hold=yes", 3),
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


NBSP, ZERO_WIDTH, EN_DASH = "\u00a0", "\u200b", "\u2013"


@pytest.mark.parametrize(
    ("line", "place", "got", "fix"),
    [
        (f"#SBATCH --partition{NBSP}{NBSP}main", "2:20", "U+00A0 (no-break space)", "write a space instead"),
        (f"#SBATCH{NBSP}--nodes=2", "2:8", "U+00A0 (no-break space)", "write a space instead"),
        (f"#SBATCH --nodes=2{NBSP}", "2:18", "U+00A0 (no-break space)", "write a space instead"),
        (f"#SBATCH -n{NBSP}2", "2:11", "U+00A0 (no-break space)", "write a space instead"),
        (f"#SBATCH --hold{NBSP}", "2:15", "U+00A0 (no-break space)", "write a space instead"),
        (f"#SBATCH --time=00:05:00{ZERO_WIDTH}", "2:24", "U+200B (zero width space)", "remove it"),
        (f"#SBATCH {EN_DASH}nodes=2", "2:9", "U+2013 (en dash)", "write -- instead"),
        (f"#SBATCH -{EN_DASH}nodes=2", "2:10", "U+2013 (en dash)", "write - instead"),
        (f"#SBATCH --array=0{EN_DASH}3", "2:18", "U+2013 (en dash)", "write - instead"),
        ("#SBATCH --mem=“2G”", "2:15", "U+201C (left double quotation mark)", 'write " instead'),
        ("#SBATCH --mem=‘2G’", "2:15", "U+2018 (left single quotation mark)", "write ' instead"),
        ("#SBATCH --job-name=“my job”", "2:27", "U+201D (right double quotation mark)", 'write " instead'),
        ("#SBATCH --time=00：05", "2:18", "U+FF1A (fullwidth colon)", "write : instead"),
        ("#SBATCH --ntasks=２", "2:18", "U+FF12 (fullwidth digit two)", "write 2 instead"),
        (f"#SBATCH --comment={NBSP} -t5{NBSP}", "2:24", "U+00A0 (no-break space)", "write a space instead"),
        (f"#SBATCH --partition=main{NBSP}", "2:25", "U+00A0 (no-break space)", "write a space instead"),
        (f"#SBATCH --nodes\n#SBATCH 2{NBSP}", "3:10", "U+00A0 (no-break space)", "write a space instead"),
        ("#SBATCH --time=5\udc92", "2:17", "byte 0x92, which is not UTF-8", "write ' instead"),
        ("#SBATCH --time=5\x07", "2:17", "U+0007 (control character)", "remove it"),
    ],
)
def test_characters_that_sbatch_rejects(tmp_path: Path, line: str, place: str, got: str, fix: str) -> None:
    path = tmp_path / "job.sh"
    path.write_bytes(f"#!/bin/bash\n{line}\n".encode("utf-8", "surrogateescape"))
    with pytest.raises(ToolkitError) as caught:
        read_batch_script(path)
    assert (caught.value.where, caught.value.fix) == (f"{path}:{place}", fix) and got in caught.value.message
