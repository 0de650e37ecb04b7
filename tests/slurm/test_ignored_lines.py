"""Lines that look like directives: after the first command, indented, misspelt; not the text of other scripts."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.slurm.batch_script import read_batch_script
from toolkit.slurm.ignored_lines import ignored_lines


def ignored(folder: Path, lines: str, first: str = "#!/bin/bash") -> list[str]:
    path = folder / "job.sh"
    path.write_text(f"{first}\n{lines}")
    return [
        f"{one.where.removeprefix(f'{path}:')}: {one.message}" for one in ignored_lines(path, read_batch_script(path))
    ]


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ("set -e\n\n#SBATCH -N2\n#SBATCH -n4\n#SBATCH -t5\n", "4: lines 4-6 are ignored by sbatch, because line 2 is a command: set -e"),
        ("#SBATCH -n2\nexport A=1\n#SBATCH -N2\nx\n#SBATCH -c2\n", "4: lines 4,6 are ignored by sbatch, because line 3 is a command: export A=1"),
        ("\u00a0\n#SBATCH -N2\n", "3: line 3 is ignored by sbatch, because line 2 is a command: '\\xa0'"),
        ("# don't\nset -e # it's\n#SBATCH -N2\n", "4: line 4 is ignored by sbatch, because line 3 is a command: set -e"),
        ("x=$((1<<n)) y='<<E'\n#SBATCH -N2\n", "3: line 3 is ignored by sbatch, because line 2 is a command: x=$((1<<n)) y='<<E'"),
        ("cat <<< word ${#a} $'it\\'s'\n#SBATCH -N2\n", "3: line 3 is ignored by sbatch, because line 2 is a command: cat <<< word ${#a} $'it\\'s'"),
        ("sbatch <<EOF | tee x\n#SBATCH -N2\nEOF\n#SBATCH -n1\n", "5: line 5 is ignored by sbatch, because line 2 is a command: sbatch <<EOF | tee x"),
        (" #SBATCH -N2\n", "2: sbatch ignores `#SBATCH` after white space"),
        ("#SBATCH -n2\n\u00a0#SBATCH -N 2\n", "3: sbatch ignores `#SBATCH` after white space"),
        ("\u200b#SBATCH -N 2\nhostname\n", "2: sbatch ignores `#SBATCH` after white space"),
        ("#\u00a0SBATCH -N 2\n", "2: sbatch reads only lines with `#SBATCH`, got '#\\xa0SBATCH'"),
        ("#\u200bSBATCH -N 2\n", "2: sbatch reads only lines with `#SBATCH`, got '#\\u200bSBATCH'"),
        ("let x=1<<y\n#SBATCH -N2\n", "3: line 3 is ignored by sbatch, because line 2 is a command: let x=1<<y"),
        ("x=$[1<<y]\n#SBATCH -N2\n", "3: line 3 is ignored by sbatch, because line 2 is a command: x=$[1<<y]"),
        ("a[1<<y]=2\n#SBATCH -N2\n", "3: line 3 is ignored by sbatch, because line 2 is a command: a[1<<y]=2"),
        ("# SBATCH -N2\n", "2: sbatch reads only lines with `#SBATCH`, got '# SBATCH'"),
        ("#sbatch --nodes=2\n", "2: sbatch reads only lines with `#SBATCH`, got '#sbatch'"),
        ("#PBS -l nodes=2\n", "2: toolkit ignores #PBS lines"),
    ],
)  # fmt: skip
def test_lines_that_sbatch_ignores(tmp_path: Path, lines: str, found: str) -> None:
    assert ignored(tmp_path, lines) == [found]


@pytest.mark.parametrize(
    "lines",
    [
        "cat > j <<EOF\n#!/bin/bash\n#SBATCH -N2\nEOF\nsbatch j\n",
        "cat > j <<-'EOF'\n#SBATCH -N2\n\tEOF\nsbatch j\n",
        'cat <<A <<"B" > j\n#SBATCH -N2\nA\n#SBATCH -N2\nB\n',
        'J="$(sbatch <<\'EOF\'\n#SBATCH -N2\necho "hi"\nEOF\n)"\n',
        "for i in 1 2; do\ncat > s_$i <<\\EOT\n#SBATCH -N2\nEOT\ndone\n",
        "echo '#!/bin/bash\n#SBATCH -N2\n' > j\n",
        'printf "a\n#SBATCH -N2\n" > j\n',
        "set -e\n##SBATCH -N2\n# #SBATCH -n1\n#SBATCH directives are above\nhostname #SBATCH -N2\n",
        "#SBATCH -N2\n##SBATCH -n4\n#SLURM -t5\n#  SBATCH lines follow\n",
    ],
)
def test_text_that_only_looks_like_directives(tmp_path: Path, lines: str) -> None:
    assert ignored(tmp_path, lines) == []


def test_a_string_of_python(tmp_path: Path) -> None:
    assert not ignored(tmp_path, '"""Docs:\n#SBATCH -N2\n"""\nimport os\n', "#!/usr/bin/env python3")
    assert ignored(tmp_path, "import os\n#SBATCH -N2\n", "#!/usr/bin/env python3")
