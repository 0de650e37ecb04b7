"""`toolkit import`: the job file that it makes of a batch script, and what it names."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from toolkit.submission.import_script import import_script


def imported(folder: Path, text: str) -> tuple[dict, list[str]]:
    path = folder / "job.sh"
    path.write_text(f"#!/bin/bash\n{text}\n")
    job_file, notes = import_script(path, Path.cwd())
    return tomllib.loads(job_file), notes


def test_directives_lines_and_launch_become_tables(tmp_path: Path) -> None:
    tables, notes = imported(
        tmp_path,
        "#SBATCH -J gpt -N2 --ntasks-per-node=1 --gpus-per-node=4 -c 32 --mem=64G -t 1-0 --exclusive\n"
        "#SBATCH --mail-user=me@example.org --mail-type=end --signal=B:USR1@300\n"
        "set -e\nmodule load cuda/12 nccl\nsource env/bin/activate\nexport HF_HOME=/scratch/hf TAG=$SLURM_JOB_ID\n"
        "export MASTER_ADDR=$(scontrol show hostnames | head -n 1)\nLR=3e-4\n"
        'srun torchrun --nnodes $SLURM_NNODES --nproc_per_node 4 \\\n  train.py --lr $LR --name "my run" "$@"  # go',
    )
    assert tables == {
        "job": {
            "name": "gpt", "nodes": 2, "ranks_per_node": 4, "cpus_per_rank": 8, "gpus_per_node": 4, "mem_gb_per_node": 64,
            "time": "1-0", "signal": "USR1", "sbatch": ["--exclusive"], "entry": "train.py", "argv": ["--lr", "3e-4", "--name", "my run"],
        },
        "env": {
            "modules": ["cuda/12", "nccl"], "setup": ["source env/bin/activate", "export TAG=$SLURM_JOB_ID"],
            "vars": {"HF_HOME": "/scratch/hf"},
        },
        "restart": {"warn_s": 300},
        "notify": {"mail": ["me@example.org"], "mail_on": ["END"]},
    }  # fmt: skip
    assert [note.partition(":")[0] for note in notes] == ["line 4", "line 8"]


@pytest.mark.parametrize(
    ("launch", "expected"),
    [
        ("srun -n 4 --mpi=pmix ./a.out -x 1", {"entry": ["./a.out", "-x", "1"], "ranks_per_node": 2}),
        ("mpirun -np 8 python -m package.main", {"entry": ["python", "-m", "package.main"], "ranks_per_node": 4}),
        ("srun python -u train.py", {"entry": "train.py"}),
        (
            "accelerate launch --num_processes 4 train.py $ARGS",
            {"entry": "train.py", "ranks_per_node": 2, "argv": ["-a", "1"]},
        ),
        (
            "exec srun -c2 --ntasks-per-node 2 /opt/tool",
            {"entry": ["/opt/tool"], "ranks_per_node": 2, "cpus_per_rank": 2},
        ),
    ],
)
def test_launches(tmp_path: Path, launch: str, expected: dict) -> None:
    tables, _ = imported(tmp_path, f'#SBATCH -N2\nARGS="-a 1"\n{launch}')
    assert tables["job"] == {"nodes": 2} | expected


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("for i in 1 2; do\n srun python train.py\ndone", "line 3 needs a shell"),
        ("python train.py > log", "line 3 needs a shell"),
        ("srun python a.py\nsrun python b.py", "line 4 needs a shell"),
        ("srun python a.py --task $SLURM_ARRAY_TASK_ID", "only a shell can evaluate"),
        ("accelerate launch --config_file c.yaml a.py", "--config-file has no key"),
        ("python train.py", "line 3 starts no ranks"),
        ("echo hello", "it starts no ranks"),
        ("X=$(date)\nsrun python a.py --at $X", "only a shell can evaluate"),
        ("srun -n 3 ./a.out", "3 ranks are not divisible"),
        ('srun python a.py --name "two\nlines"', "line 3 needs a shell"),
        ("# don't\necho 'two\nlines'", "line 4 needs a shell"),
        ('"', "line 3 needs a shell"),
        ("srun", "line 3 names no program"),
        ("A=1 make\nsrun python a.py", "line 3 needs a shell"),
        ("export -n A\nsrun python a.py", "line 3 starts no ranks"),
        ("make\nsrun ./a.out", "line 3 starts no ranks"),
    ],
)
def test_bodies_that_stay_a_script(tmp_path: Path, body: str, reason: str) -> None:
    tables, notes = imported(tmp_path, f"#SBATCH -N2 --mem=500M\n{body}")
    relative = Path(tables["job"].pop("entry"))
    assert (Path.cwd() / relative).resolve() == tmp_path / "job.sh"
    assert tables["job"] == {"once": True, "name": "job.sh", "nodes": 2, "sbatch": ["--mem=500M"]}
    assert "the script stays the entry of the job: " in notes[-1] and reason in notes[-1]


SECRET = "hf_" + "abcdefghijklmnopqrstuvwx"


@pytest.mark.parametrize(
    "text",
    [
        f"export HF_TOKEN={SECRET}\nsrun python a.py",
        f"TOKEN='{SECRET}'\nsrun python a.py --token $TOKEN",
        f"srun python a.py --token={SECRET}",
        f"echo {SECRET}\nfor i in 1; do srun python a.py; done",
        f"#SBATCH --export=ALL,HF_TOKEN={SECRET}\nsrun python a.py",
        f"#SBATCH --export=ALL,HF_TOKEN={SECRET}\nfor i in 1; do srun python a.py; done",
        f"source login.sh {SECRET}\nsrun python a.py",
        f"export A=$B{SECRET}\nsrun python a.py",
    ],
)
def test_secrets_are_never_written(tmp_path: Path, text: str) -> None:
    tables, notes = imported(tmp_path, text)
    assert SECRET not in str(tables) and SECRET not in str(notes)
    if "HF_TOKEN" in text:
        assert tables["env"]["pass"] == ["HF_TOKEN"] and any("HF_TOKEN looks like a secret" in note for note in notes)


def test_an_imported_script_runs(toolkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.sh").write_text("#!/bin/sh\nif true; then echo it ran; fi\n")
    assert "wrote job.toml" in toolkit.ok("import", "job.sh", "-o", "job.toml")
    assert "it ran" in toolkit.ok("run", "job.toml")
    assert toolkit("import", "job.sh", "-o", "job.toml").code == 2
