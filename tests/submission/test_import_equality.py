"""`toolkit import` translates only what is certainly equal, and otherwise keeps the script with the line as the reason."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from toolkit.errors import ToolkitError
from toolkit.submission.import_script import import_script


def imported(folder: Path, text: str) -> tuple[dict, list[str]]:
    path = folder / "job.sh"
    path.write_bytes(f"#!/bin/bash\n{text}\n".encode("utf-8", "surrogateescape"))
    job_file, notes, *_ = import_script(path, Path.cwd())
    return tomllib.loads(job_file), notes


@pytest.mark.parametrize(
    ("directives", "launch", "reason"),
    [
        # torchrun
        ("-N2 -c4", "srun torchrun --nproc_per_node=4 a.py", "--nnodes is 1, the directives request 2 nodes"),
        ("-N2 -c4", "srun torchrun --nnodes=4 --nproc_per_node=4 a.py", "--nnodes is 4"),
        ("-N2 -c4", "srun torchrun --nnodes=1:2 --nproc_per_node=4 a.py", "only a shell can evaluate --nnodes"),
        ("-N2 -c4 --ntasks-per-node=2", "srun torchrun --nnodes=2 --nproc_per_node=4 a.py", "in each of 2 tasks"),
        ("-N2 -c4", "torchrun --nnodes=2 --nproc_per_node=4 a.py", "starts one process"),
        ("-N1 -c2", "torchrun --nproc_per_node=4 a.py", "starts 4 ranks in each of 1 tasks per node, with 2 CPUs"),
        ("-N1", "python -m torch.distributed.launch a.py", "without --use-env"),
        ("-N2", "srun accelerate launch --num_processes 8 a.py", "accelerate has no translation"),
        ("-N2", "CMD='torchrun --nproc_per_node=4 a.py'\nsrun $CMD", "line 4: torchrun has no translation"),
        # counts of srun and mpirun
        ("-N2 --ntasks-per-node=2", "srun -n 3 --ntasks-per-node=2 ./a.out", "-n of srun is not that of the directives, 4"),
        ("-N2 --ntasks-per-node=4", "srun -n 4 ./a.out", "-n of srun"),
        ("-N2 --ntasks-per-node=2", "srun --ntasks=2 ./a.out", "--ntasks of srun"),
        ("-N2 --ntasks-per-node=2", "srun -n $SLURM_NNODES ./a.out", "-n of srun"),
        ("-N2 --ntasks-per-node=4", "srun -N1 -n8 ./a.out", "-N1 of srun"),
        ("-N2 -c 4", "srun -c 2 ./a.out", "-c of srun"),
        ("-N2 --ntasks-per-node=4", "mpirun -np 4 ./a.out", "-np of mpirun"),
        ("-N2 --ntasks-per-node=4", "mpirun -np 16 ./a.out", "-np of mpirun"),
        ("-N2 --ntasks-per-node=4", "mpirun -N 4 ./a.out", "-N of mpirun has no key"),
        ("-N2", "mpirun ./a.out", "Slurm chooses the tasks of mpirun"),
        ("-N2", "srun --distribution=cyclic ./a.out", "--distribution of srun has no key"),
        ("-N2", "OPTIONS='-n 4'\nsrun $OPTIONS ./a.out", "line 4 names no program"),
        # directives
        ("-n 128", "srun ./a.out", "line 2: Slurm chooses the nodes of 128 tasks without --nodes"),
        ("-N2 -n4", "srun ./a.out", "line 2: Slurm chooses how many of 4 tasks run on each node"),
        ("-N1-4", "srun ./a.out", "line 2: Slurm chooses the number of nodes"),
        ("-N1 --ntasks-per-node=4 --gpus-per-task=1", "srun ./a.out", "line 2: --gpus-per-task gives each task"),
        ("-N1 --gpus-per-task=a100:1", "srun ./a.out", "line 2: --gpus-per-task gives each task"),
        ("--signal=B:USR1@60", "srun ./a.out", "line 2: --signal=B:USR1@60 reaches the shell alone"),
        ("--signal=12@60", "srun ./a.out", "line 2: --signal=12@60 has no key"),
        ("--signal=USR1@60", "python a.py", "line 3: the signal of --signal reaches only what srun starts"),
        ("--export=ALL", "srun ./a.out", "line 2: --export has no key"),
        ("--export=FOO=bar,BAZ", "srun ./a.out", "line 2: --export has no key"),
    ],
)  # fmt: skip
def test_other_ranks_keep_the_script(tmp_path: Path, directives: str, launch: str, reason: str) -> None:
    tables, notes = imported(tmp_path, f"#SBATCH {directives}\n{launch}")
    assert tables["job"].get("once") is True and reason in notes[-1] and "line " in notes[-1], (tables, notes)


@pytest.mark.parametrize(
    ("directives", "launch", "expected"),
    [
        ("-N1 -c4", "torchrun --nproc_per_node=4 a.py", (1, 4, 1)),
        ("-N1 -c4 --gpus=2", "torchrun --standalone --nproc_per_node gpu a.py", (1, 2, 2)),
        ("-N2 -c4", "srun torchrun --nnodes=$SLURM_NNODES --nproc_per_node=4 a.py", (2, 4, 1)),
        ("-N4 -n4 --gpus-per-task=1", "srun ./a.out", (4, 1, 1)),
        ("-N2 -n4 --ntasks-per-node=2", 'srun -n "$SLURM_NTASKS" ./a.out', (2, 2, 1)),
    ],
)
def test_equal_ranks_are_translated(tmp_path: Path, directives: str, launch: str, expected: tuple[int, ...]) -> None:
    job = imported(tmp_path, f"#SBATCH {directives}\n{launch}")[0]["job"]
    assert (job["nodes"], job["ranks_per_node"], job["cpus_per_rank"]) == expected


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("A=1\nsource p.sh\nsrun ./a.out $A", "line 4 uses $A"),
        ("A=1\n. ./p.sh\nsrun ./a.out $A", "line 4 uses $A"),
        ("A=1\nunset A\nsrun ./a.out $A", "line 4 uses $A"),
        ("A=1\nmodule load x\nsrun ./a.out $A", "line 4 uses $A"),
        ("A=1\nconda activate x\nsrun ./a.out $A", "line 4 uses $A"),
        ("printf -v A 3\nsrun ./a.out", "line 2 has no translation: printf -v A 3"),
        ("echo ${A:=3}\nsrun ./a.out", "line 2 needs a shell"),
        ("echo $((A++))\nsrun ./a.out", "line 2 needs a shell"),
        ("source p.sh\nexport HF_TOKEN\nsrun ./a.out", "line 3: an earlier line may set HF_TOKEN"),
        ("MODEL=$1\nsrun ./a.out", "line 2 uses $1"),
        ("MODEL=${2:-none}\nsrun ./a.out", "line 2 uses ${2"),
        ("export N=$#\nsrun ./a.out", "line 2 uses $#"),
        ('export ALL="$@"\nsrun ./a.out', "line 2 uses $@"),
        ("source $(dirname $0)/p.sh\nsrun ./a.out", "line 2 uses $0"),
        ('D="$(dirname "${BASH_SOURCE[0]}")"\nsrun ./a.out', "line 2 uses ${BASH_SOURCE"),
        ("X='a b'\nsrun ./a.out p$X\"q r\"", "line 3 uses p$X"),
        ("X='*'\nsrun ./a.out $X", "line 3 uses $X"),
        ("export A=a\u2028b\nsrun ./a.out", "line 2 has white space other than space and tab"),
        ("export A=a\u00a0b\nsrun ./a.out", "line 2 has white space other than space and tab"),
        ("export A=a\vb\nsrun ./a.out", "line 2 has white space other than space and tab"),
        ("export A=a\u00a0\nsrun ./a.out", "line 2 has white space other than space and tab"),
        ("srun ./a.out \udcff", "line 2 has white space other than space and tab, or a byte that is not UTF-8"),
        ("IFS=,\nX=a,b\nsrun ./a.out $X", "line 2 sets IFS"),
        ("export SLURM_NTASKS=3\nsrun ./a.out", "line 2 sets SLURM_NTASKS"),
        ("unset SLURM_NTASKS\nsrun ./a.out", "line 2 unsets a variable of Slurm"),
        ("module load x && rm y\nsrun ./a.out", "line 2 needs a shell"),
        ("A=(1); rm x; B=(2)\nsrun ./a.out", "line 2 needs a shell"),
    ],
)  # fmt: skip
def test_doubtful_lines_keep_the_script(tmp_path: Path, lines: str, reason: str) -> None:
    tables, notes = imported(tmp_path, lines)
    assert tables["job"].get("once") is True and reason in notes[-1], (tables, notes)


@pytest.mark.parametrize(
    "lines",
    [
        "export X=1\nX=8",
        "X=1\nexport X\nX=8",
        "export FROM_SHELL\nFROM_SHELL=8",
        "source p.sh\nexport OF_FILE",
        "source p.sh\nexport A=$OF_FILE/x",
        "OF_FILE=1\nsource p.sh\nexport A=$OF_FILE",
        "D=/x\nexport D=/d E=$D/e",
        "export D=/d E=$D/e",
        "export OF_FILE=first\nsource p.sh",
        "HOME=/h\nTZ=UTC\nLC_ALL=C\nTMPDIR=/scratch",
        "PYTHONPATH=/x\nLD_LIBRARY_PATH=/l",
        "A=1\nexport B=$A\nunset A\nexport C=$A",
        "export B='c$d'",
        "source fails.sh\nexport AFTER=1",
        "X='a b'\nexport Y=$X",
    ],
)
@pytest.mark.parametrize("variables", [{}, {"FROM_SHELL": "f", "PYTHONPATH": "/old", "D": "/shell"}])
def test_the_environment_is_that_of_bash(tmp_path: Path, lines: str, variables: dict[str, str]) -> None:
    (tmp_path / "p.sh").write_text("OF_FILE=of_file\n")
    (tmp_path / "fails.sh").write_text("[ -f missing ] && . missing\n")
    shown = {*re.findall(r"[A-Z_]{2,}|\b[A-EXY]\b", lines)}
    kept = {"PATH": os.environ["PATH"], "HOME": "/home", "TMPDIR": "/var/tmp"}

    def environment(commands: str, shell: dict[str, str]) -> dict[str, str]:
        done = subprocess.run(
            ["bash", "-c", f"{commands}\nenv"], cwd=tmp_path, env=shell, capture_output=True, text=True, check=True
        )
        pairs = (line.partition("=") for line in done.stdout.splitlines())
        return {name: value for name, _, value in pairs if name in shown}

    tables, notes = imported(tmp_path, f"{lines}\nsrun ./a.out")
    env = tables.get("env", {})
    assert "once" not in tables["job"], notes
    passed = {name: variables[name] for name in env.get("pass", ()) if name in variables}
    setup = "\n".join(f"{{ {line}\n}} || exit 125" for line in env.get("setup", ()))  # as in a rendered script
    ours = environment(setup, kept | passed) | env.get("vars", {})
    assert ours == environment(lines, kept | variables)


def test_modules_keep_their_order(tmp_path: Path) -> None:
    def environment(lines: str) -> dict[str, object]:
        return imported(tmp_path, f"{lines}\nsrun ./a.out")[0]["env"]

    lines = ["export C=gcc", "module load intel"]
    assert environment("\n".join(lines)) == {"setup": lines}
    lines = ["module load a", "module purge", "module load b"]
    assert environment("\n".join(lines)) == {"modules": ["a"], "setup": lines[1:]}
    assert environment("module purge\nmodule load a") == {"modules": ["a"]}
    assert environment("module load a\nCC=gcc") == {"modules": ["a"], "setup": ["CC=gcc"]}  # `a` may export CC


def test_a_line_that_fails_ends_the_job_only_after_set_e(tmp_path: Path) -> None:
    for first, setup in (
        ("", "source rc.sh || true"),
        ("set -eu\n", "source rc.sh"),
        ("set -e\nset +e\n", "source rc.sh || true"),
    ):
        assert imported(tmp_path, f"{first}source rc.sh\nsrun ./a.out")[0]["env"] == {"setup": [setup]}


@pytest.mark.parametrize(("file", "place"), [("~/.wandb", "file:~/.wandb"), ("/keys/wandb", "command:cat /keys/wandb")])
def test_a_secret_in_a_file_has_a_reference(tmp_path: Path, file: str, place: str) -> None:
    _, notes = imported(tmp_path, f"export WANDB_API_KEY=$(cat {file})\nsrun ./a.out")
    assert f'or write WANDB_API_KEY = "{place}"' in notes[0]


def test_a_directive_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    with pytest.raises(ToolkitError, match="a value contains a byte that is not UTF-8"):
        imported(tmp_path, "#SBATCH --comment=\udcff\nsrun ./a.out")


def test_a_literal_dollar_is_not_a_variable(tmp_path: Path) -> None:
    tables, notes = imported(tmp_path, "export B='c$d'\nsrun ./a.out '$e'")
    assert tables["env"] == {"vars": {"B": "c$d"}} and len(notes) == 1
