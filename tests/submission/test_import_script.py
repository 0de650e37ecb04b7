"""`toolkit import`: the job file that it makes of a batch script, and what it names."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from toolkit.submission.import_script import import_script


def imported(folder: Path, text: str) -> tuple[dict, list[str]]:
    path = folder / "job.sh"
    path.write_text(f"#!/bin/bash\n{text}\n")
    job_file, notes, *_ = import_script(path, Path.cwd())
    return tomllib.loads(job_file), notes


def test_directives_lines_and_launch_become_tables(tmp_path: Path) -> None:
    tables, notes = imported(
        tmp_path,
        "#SBATCH -J gpt -N2 --ntasks-per-node=1 --gpus-per-node=4 -c 32 --mem=64G -t 1-0 --exclusive\n"
        "#SBATCH --mail-user=me@example.org --mail-type=end --signal=USR1@300\n"
        "set -e\nmodule load cuda/12 nccl\nsource env/bin/activate\nexport HF_HOME=/scratch/hf TAG=$SLURM_JOB_ID\n"
        "export MASTER_ADDR=$(scontrol show hostnames | head -n 1)\nLR=3e-4\n"
        'srun torchrun --nnodes $SLURM_NNODES --nproc_per_node 4 \\\n  train.py --lr $LR --name "my run" "$@"  # go',
    )
    assert tables == {
        "job": {
            "name": "gpt", "nodes": 2, "ranks_per_node": 4, "cpus_per_rank": 8, "gpus_per_node": 4, "mem_gb_per_node": 64,
            "time": "1-0", "signal": "USR1", "sbatch": ["--exclusive"], "entry": ["python", "train.py", "--lr", "3e-4", "--name", "my run"],
        },
        "env": {
            "modules": ["cuda/12", "nccl"],
            "setup": ["source env/bin/activate", "export HF_HOME=/scratch/hf TAG=$SLURM_JOB_ID", "LR=3e-4"],
        },
        "restart": {"crashes": 0, "walltimes": 0, "warn_s": 300},
        "notify": {"mail": ["me@example.org"], "mail_on": ["END"]},
    }  # fmt: skip
    assert [note.partition(":")[0] for note in notes] == ["line 4", "line 8", "line 6", "[restart]"]


@pytest.mark.parametrize(
    ("launch", "expected"),
    [
        ("srun -n 4 --mpi=pmix ./a.out -x 1", {"entry": ["./a.out", "-x", "1"]}),
        ("srun -n $SLURM_NTASKS -N2 --ntasks-per-node=2 ./a.out", {"entry": ["./a.out"]}),
        ("mpirun -np 4 python -m package.main", {"entry": ["python", "-m", "package.main"]}),
        ("srun python -u train.py $ARGS", {"entry": "train.py", "argv": ["-a", "1"]}),
        ("exec srun -c2 --ntasks-per-node 2 /opt/tool", {"entry": ["/opt/tool"]}),
    ],
)
def test_launches(tmp_path: Path, launch: str, expected: dict) -> None:
    tables, _ = imported(tmp_path, f'#SBATCH -N2 --ntasks-per-node=2 -c2\nARGS="-a 1"\n{launch}')
    defaults = {"name": "job.sh", "nodes": 2, "ranks_per_node": 2, "cpus_per_rank": 2, "gpus_per_node": 0}
    assert tables["job"] == defaults | expected
    assert tables["restart"] == {"crashes": 0, "walltimes": 0}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("for i in 1 2; do\n srun python train.py\ndone", "line 3 needs a shell"),
        ("python train.py > log", "line 3 needs a shell"),
        ("srun python a.py\nsrun python b.py", "line 4 follows the launch"),
        ("srun python a.py --task $SLURM_ARRAY_TASK_ID", "only a shell can evaluate"),
        ("accelerate launch --num_processes 8 a.py", "line 3 has no translation: accelerate launch"),
        ("python train.py", "line 3 starts one process; the directives request 2 tasks"),
        ("echo hello", "it starts no ranks"),
        ("X=$(date)\nsrun python a.py --at $X", "only a shell can evaluate"),
        ("srun -n 3 ./a.out", "line 3: -n of srun is not that of the directives, 2"),
        ('srun python a.py --name "two\nlines"', "line 3 needs a shell"),
        ("# don't\necho 'two\nlines'", "line 4 needs a shell"),
        ('"', "line 3 needs a shell"),
        ("srun", "line 3 names no program"),
        ("A=1 make\nsrun python a.py", "line 3 needs a shell"),
        ("export -n A\nsrun python a.py", "line 3 has no translation: export -n A"),
        ("umask 077\nsrun ./a.out", "line 3 has no translation: umask 077"),
        ("srun /venv/bin/torchrun a.py", "line 3 runs /venv/bin/torchrun in a Python that only this file names"),
        ("echo 'a\\\nb'\nsrun ./a.out", "line 3 needs a shell"),
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
        assert tables["env"]["secrets"] == {"HF_TOKEN": "env"} and any(
            "HF_TOKEN looks like a secret" in note for note in notes
        )


def test_an_imported_script_runs(toolkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.sh").write_text("#!/bin/sh\nif true; then echo it ran; fi\n")
    assert "wrote job.toml" in toolkit.ok("import", "job.sh", "-o", "job.toml")
    assert "it ran" in toolkit.ok("run", "job.toml")
    assert toolkit("import", "job.sh", "-o", "job.toml").code == 2


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        ("#!/bin/bash -l", "line 1: -l starts a login shell"),
        ("#!/usr/bin/env python3", "line 1: '#!/usr/bin/env python3' is not plain bash or sh"),
        ("#!/bin/csh", "line 1: '#!/bin/csh' is not plain bash or sh"),
        ("#!/bin/bash -e", "line 1: '#!/bin/bash -e' is not plain bash or sh"),
    ],
)
def test_a_script_that_is_not_plain_bash_stays_a_script(tmp_path: Path, first: str, reason: str) -> None:
    (path := tmp_path / "job.sh").write_text(f"{first}\n#SBATCH -N2\nsrun ./a.out\n")
    text, notes, *_ = import_script(path, tmp_path)
    assert "once = true" in text and reason in notes[-1]


def test_tasks_of_one_node_need_no_remark(tmp_path: Path) -> None:
    notes = imported(tmp_path, "#SBATCH -n 128 -N 1\nsrun ./a.out")[1]
    assert [note.partition(":")[0] for note in notes] == ["[restart]"]


@pytest.mark.parametrize(
    "launch",
    [
        "srun -n4 --multi-prog conf.txt", "srun --het-group=0 ./a : --het-group=1 ./b", "mpirun -np 1 ./a : -np 3 ./b",
        "mpirun --map-by socket -np 4 ./a.out", "mpirun -np 4 --mca btl tcp,self ./a.out", "srun --mpi pmix ./a.out",
        "srun --export=ALL,A=1 ./a.out", "NP=$((2*4))\nsrun -n $NP ./a.out", "srun -N 1-2 ./a.out",
        "torchrun --nproc_per_node=gpu a.py", "accelerate launch --num_processes=3 a.py", "srun ./a.out {1,2}.txt",
        "srun ./a.out ~/x", "A=1; B=2\nsrun ./a.out", "srun ./a.out\nexport A=1", "exit 0\nsrun ./a.out",
        "set -a\nsource .env\nsrun ./a.out", "mkdir results\nsrun ./a.out", "MSG=\"it's\"\nsrun ./a.out '$MSG",
    ],
)  # fmt: skip
def test_what_is_not_understood_stays_a_script(tmp_path: Path, launch: str) -> None:
    tables, notes = imported(tmp_path, f"#SBATCH -N2\n{launch}")
    assert tables["job"].get("once") is True and "line " in notes[-1], tables


@pytest.mark.parametrize(
    "directive",
    ["--mail-type=TIME_LIMIT_50 --mail-user=a@b", "--chdir=/scratch", "-n6 --ntasks-per-node=4", "--cpus-per-gpu=2"],
)
def test_directives_that_a_job_file_cannot_express_keep_the_script(tmp_path: Path, directive: str) -> None:
    tables, _ = imported(tmp_path, f"#SBATCH -N2 {directive}\nsrun ./a.out")
    assert tables["job"].get("once") is True


@pytest.mark.parametrize(
    "lines",
    [
        f"source /cluster/software/environments/2024/production/login/login.sh hf_{22 * 'a'}\nsrun ./a.out",
        "srun env WANDB_API_KEY=0123456789abcdef0123 python train.py",
        "srun python train.py --wandb-api-key 0123456789abcdef0123", "./a.out --password=hunter2x",
        "source login.sh --password=hunter2x\nsrun ./a.out", "export DB_URL=postgres://me:hunter2x@host/db\nsrun ./a.out",
        'eval "$(conda shell.bash hook)" && export WANDB_API_KEY=0123456789abcdef0123\nsrun ./a.out',
        "srun --export=ALL,WANDB_API_KEY=0123456789abcdef0123 ./a.out", "echo WANDB_API_KEY=0123456789abcdef0123\nsrun ./a.out",
        "WANDB_API_KEY=0123456789abcdef0123\nexport WANDB_API_KEY\nsrun ./a.out",
    ],
)  # fmt: skip
def test_no_secret_is_written_or_printed(tmp_path: Path, lines: str) -> None:
    tables, notes = imported(tmp_path, f"#SBATCH -N1\n{lines}")
    assert not any(secret in f"{tables}{notes}" for secret in ("0123456789abcdef", "hunter2x", 22 * "a"))


def test_lines_of_the_environment_keep_their_order(tmp_path: Path) -> None:
    lines = ["module use /apps", "VER=12", "module load cuda/$VER", "export DATA=/data", "export PATH=$DATA/bin:$PATH"]
    tables, _ = imported(tmp_path, "\n".join([*lines, 'srun ./a.out x # the "fast" mode', "module purge"]))
    assert tables["env"] == {"setup": lines}
    assert tables["job"]["entry"] == ["./a.out", "x"] or tables["job"]["entry"][1:] == ["x"]


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("'a \"b\"'", 'a "b"'),
        ("\"it's $X isn't\"", "it's 1 isn't"),
        ("a\\ b", "a b"),
        ('"$M"', 'say "hi"'),
        ("${X}2", "12"),
    ],
)
def test_arguments_are_those_of_the_shell(tmp_path: Path, argument: str, value: str) -> None:
    tables, _ = imported(tmp_path, f"X=1\nM='say \"hi\"'\nsrun /a.out {argument}")
    shell = subprocess.run(
        ["bash", "-c", f"X=1; M='say \"hi\"'; printf %s {argument}"], capture_output=True, text=True, check=True
    )
    assert tables["job"]["entry"][1] == value == shell.stdout


@pytest.mark.parametrize(
    ("lines", "entry", "note"),
    [
        ("/venv/bin/python train.py -x", ["/venv/bin/python", "train.py", "-x"], ""),
        ("srun /usr/bin/python3 -u train.py", ["/usr/bin/python3", "-u", "train.py"], ""),
        (
            "source env/bin/activate\npython train.py",
            ["python", "train.py"],
            "line 2: `python` runs in the environment",
        ),
        ("conda activate x\ntorchrun train.py", ["python", "train.py"], "line 2: `python` runs in"),
        ("module load anaconda3\npython task.py", ["python", "task.py"], "line 2: `python` runs in"),
        ("/venv/bin/python -m torch.distributed.run train.py", ["/venv/bin/python", "train.py"], ""),
        ("python train.py", "train.py", "line 2: ranks run in the Python of toolkit"),
    ],
)
def test_the_interpreter_is_kept(tmp_path: Path, lines: str, entry: object, note: str) -> None:
    tables, notes = imported(tmp_path, lines)
    assert isinstance(entry, list) or tables["job"]["entry"].endswith(entry)
    assert tables["job"]["entry"] == entry or isinstance(entry, str)
    assert any(one.startswith(note) for one in notes) and (note or not any("Python" in one for one in notes))


def test_an_activated_python_runs_with_the_variables_of_ranks(
    toolkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "env/bin").mkdir(parents=True)
    (tmp_path / "env/bin/activate").write_text(f"export PATH={tmp_path}/env/bin:$PATH\n")
    (tmp_path / "env/bin/python").write_text('#!/bin/sh\necho "mine $1 $RANK/$WORLD_SIZE $FROM_SHELL"\n')
    (tmp_path / "env/bin/python").chmod(0o755)
    (tmp_path / "job.sh").write_text(
        "#!/bin/bash\n#SBATCH -n 2 -N 1\ncd $SLURM_SUBMIT_DIR\nsource env/bin/activate\n"
        "export MORE=$FROM_SHELL/x\ntime srun python train.py\n"
    )
    said = toolkit("import", "job.sh", "-o", "job.toml")
    for note in (
        "line 3: omitted `cd $SLURM_SUBMIT_DIR`",
        "line 5: toolkit passes FROM_SHELL from the submitting shell",
        "line 6: omitted `time`",
    ):
        assert note in said.err
    monkeypatch.setenv("FROM_SHELL", "of the shell")
    shown = toolkit.ok("run", "job.toml")
    assert "mine train.py 0/2 of the shell" in shown and "mine train.py 1/2 of the shell" in shown


@pytest.mark.parametrize(
    ("lines", "variables"),
    [
        ("export LR=1 # use \\\nexport N=2\nsrun ./a.out", {"LR": "1", "N": "2"}),
        ("export LR=1\\\n2\nsrun ./a.out", {"LR": "12"}),
        ('export A="x # y \\\nz"\nsrun ./a.out', {"A": "x # y z"}),
    ],
)
def test_continued_lines_are_those_of_bash(tmp_path: Path, lines: str, variables: dict) -> None:
    names = " ".join(f'"${name}"' for name in variables)
    shell = subprocess.run(
        ["bash", "-c", lines.replace("srun ./a.out", f"printf '%s,' {names}")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert imported(tmp_path, lines)[0]["env"]["vars"] == variables and shell.stdout == "".join(
        f"{one}," for one in variables.values()
    )


def test_a_comment_ends_a_continued_command(tmp_path: Path) -> None:
    tables, notes = imported(tmp_path, "srun ./a.out \\\n# an argument\n  --more")
    assert tables["job"]["once"] and "line 4 follows the launch: --more" in notes[-1]


@pytest.mark.parametrize(
    ("directive", "note"),
    [
        ("--requeue", "line 2: --requeue: Slurm requeues the job only after"),
        ("--exclusive", "line 2: --exclusive: a rank uses the CPUs of job.cpus_per_rank"),
        ("--plugin-option=x", "line 2: --plugin-option=x may be unknown to sbatch"),
        ("-J 'my job'", "line 2: --job-name=my job: the name of the job is my_job"),
        ("--output=o", "line 2: --output=o: ranks write to the logs"),
        ("--quiet", "line 2: --quiet has no effect in a job file"),
    ],
)
def test_notes_name_the_line(tmp_path: Path, directive: str, note: str) -> None:
    tables, notes = imported(tmp_path, f"#SBATCH {directive}\nsrun ./a.out")
    assert any(one.startswith(note) for one in notes) and tables["restart"] == {"crashes": 0, "walltimes": 0}


@pytest.mark.parametrize(
    "directive",
    ["--time=abc", "--nodes=two", "--ntasks=x", "--mem=10X", "--tasks-per-node=a", "--nodes=2-1", "-M a,b", "-M all"],
)
def test_an_invalid_value_is_named(tmp_path: Path, directive: str) -> None:
    tables, notes = imported(tmp_path, f"#SBATCH {directive}\nsrun ./a.out")
    value = re.split("[ =]", directive)[1]
    assert value in notes[-2] and re.search(r"(^line |:)2:", notes[-2]) and tables["job"]["once"]
    assert notes[-1].startswith("the script stays the entry of the job: it cannot be submitted. Fix: ")


def test_a_directive_after_a_command_is_named_once(tmp_path: Path) -> None:
    _, notes = imported(tmp_path, "set -e\n#SBATCH -N2\nsrun ./a.out")
    assert notes[0].startswith("line 3 is ignored by sbatch, because line 2 is a command: set -e. Fix: move line 2")


def test_what_is_not_a_script_or_a_place_for_a_file(toolkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.sh").write_text("#!/bin/bash\nsrun ./a.out\n")
    (tmp_path / "bom.sh").write_text("\ufeff#!/bin/bash\nsrun ./a.out\n")
    (tmp_path / "typo.sh").write_text("#!/bin/bash\n#SBATCH --nodess=2\nsrun ./a.out\n")
    (tmp_path / "job.toml").write_text("[job]\n")
    (tmp_path / "binary").write_bytes(b"\x7fELF\0")
    (tmp_path / "sub").mkdir()
    for arguments, expected in (
        ("sub", "cannot read the script: Is a directory. Fix: specify"), ("-", "Fix: specify the path of a script"),
        ("bom.sh", "bom.sh:1: the script starts with a byte order mark. Fix: sed"), ("binary", "got a binary file"),
        ("job.toml", "expected a script, got a job file. Fix: `toolkit submit job.toml`"),
        ("typo.sh", "typo.sh:2: sbatch has no option --nodess. Fix: did you mean --nodes?"),
        ("job.sh -o no/job.toml", "folder of the file not found. Fix: mkdir -p no"), ("job.sh -o -", "omit -o"),
        ("job.sh -o sub", "sub: the folder exists. Fix: choose the name"),
    ):  # fmt: skip
        said = toolkit("import", *arguments.split())
        assert said.code == 2 and expected in said.err, said
    assert "relative to the folder in which you run" in toolkit("import", "job.sh", "-o", "sub/job.toml").err


def test_resources_without_a_key_stay_options(tmp_path: Path) -> None:
    tables, notes = imported(tmp_path, "#SBATCH -N1 --gpus-per-node=2 --gres=nvme:10\nsrun ./a.out")
    assert tables["job"]["gpus_per_node"] == 2 and tables["job"]["sbatch"] == ["--gres=nvme:10"]
    tables, notes = imported(tmp_path, "#SBATCH -N1 --gres=gpu:a100:2\nsrun ./a.out")
    assert tables["job"]["gpus_per_node"] == 0 and tables["job"]["sbatch"] == ["--gres=gpu:a100:2"]
    assert "line 2: --gres=gpu:a100:2 stays in job.sbatch; gpus_per_node does not count it" in notes


def test_lines_that_change_the_path_or_read_variables_of_ranks(tmp_path: Path) -> None:
    tables, _ = imported(tmp_path, "PATH=/opt/bin:$PATH\npython train.py")
    assert tables["env"]["setup"] == ["PATH=/opt/bin:$PATH"] and tables["job"]["entry"] == ["python", "train.py"]
    _, notes = imported(tmp_path, "export MASTER_ADDR=$(hostname)\nexport URL=tcp://$MASTER_ADDR\nsrun ./a.out")
    assert "line 3 uses MASTER_ADDR, which toolkit sets only for each rank" in notes[-1]


def test_all_obstacles_are_named_at_once(tmp_path: Path) -> None:
    """A block, a here-document and what depends on them are one obstacle each, with line and fix."""
    text = (
        "#SBATCH -N2 -n5 --chdir=/scratch --export=ALL\nfor f in *.txt; do\n  if true; then\n    cp $f in/\n  fi\ndone\n"
        "cat > conf <<EOF\nsrun ./not_a_launch\nEOF\nDIR=$(date +%F)\nsrun python a.py --out $DIR > log\npython report.py\n"
    )
    tables, notes = imported(tmp_path, text)
    obstacles = notes[notes.index(next(one for one in notes if "stays the entry" in one)) :]
    expected = [
        "line 2: --chdir has no key", "line 2: --export has no key", "line 2: Slurm chooses how many of 5 tasks",
        "line 3 needs a shell: for f", "line 8 needs a shell: cat", "line 12 needs a shell: srun", "line 13 follows the launch",
    ]  # fmt: skip
    assert tables["job"]["once"] and len(obstacles) == len(expected)
    for note, words in zip(obstacles, expected, strict=True):
        assert words in note and ". Fix: " in note
    assert obstacles[0].startswith("the script stays the entry of the job: ") and obstacles[1].startswith("also: ")


TASKS = "#SBATCH --array=0-2\nLRS=(0.1 3e-4 1e-5)\n"


@pytest.mark.parametrize(
    ("lines", "keys", "sweep"),
    [
        ("srun python a.py --lr ${LRS[$SLURM_ARRAY_TASK_ID]} -x", {"argv": ["--lr", "0.1", "-x"]}, "argv.lr=0.1,3e-4,1e-5"),
        ("LR=${LRS[SLURM_ARRAY_TASK_ID]}\npython a.py --lr=$LR", {"argv": ["--lr=0.1"]}, "argv.lr=0.1,3e-4,1e-5"),
        ('python a.py "out-${LRS[${SLURM_ARRAY_TASK_ID}]}"', {"argv": ["out-0.1"]}, "argv.1=out-0.1,out-3e-4,out-1e-5"),
        ("python a.py --seed $SLURM_ARRAY_TASK_ID", {"argv": ["--seed", "0"]}, "argv.seed=0,1,2"),
        (
            "source env/bin/activate\nLRS=(1 2 4)\nexport LR=${LRS[$SLURM_ARRAY_TASK_ID]}\npython a.py --lr $LR",
            {"entry": ["python", "a.py"], "argv": ["--lr", "1"]}, "argv.lr=1,2,4",
        ),
    ],
)  # fmt: skip
def test_values_by_the_number_of_a_task_become_a_sweep(tmp_path: Path, lines: str, keys: dict, sweep: str) -> None:
    path = tmp_path / "job.sh"
    path.write_text(f"#!/bin/bash\n{TASKS}{lines}\n")
    found = import_script(path, tmp_path)
    job = tomllib.loads(found.text)["job"]
    assert "array" not in job and "once" not in job
    assert {key: job[key] for key in keys} == keys
    assert found.sweep == ["--sweep", sweep]


def test_variables_of_a_swept_shell_command_are_passed(tmp_path: Path) -> None:
    launch = 'srun bash -c "python t.py --seed $SLURM_ARRAY_TASK_ID --data \\$DATA"'
    tables, _ = imported(tmp_path, f"{TASKS}{launch}")
    assert tables["env"]["pass"] == ["DATA"] and "array" not in tables["job"]


@pytest.mark.parametrize(
    ("launch", "note"),
    [
        ("srun --output=log_$SLURM_ARRAY_TASK_ID.txt ./a.out", "omitted --output=log_$SLURM_ARRAY_TASK_ID.txt of srun"),
        ("srun ./a.out ${LRS[$SLURM_ARRAY_TASK_ID]}*", "uses ${LRS[$SLURM_ARRAY_TASK_ID]}*, which only"),
        ("N=$SLURM_ARRAY_TASK_ID\nsrun --nodelist=$N ./a.out", "--nodelist of srun has no key"),
        ("./a.out --a-long-option-of-this-program 12345 $SLURM_ARRAY_TASK_ID", "translation: ./a.out --a-long-option-of-this-program 12345 $SLURM"),
    ],
)  # fmt: skip
def test_messages_show_the_lines_of_the_script(tmp_path: Path, launch: str, note: str) -> None:
    text = "\n".join(imported(tmp_path, TASKS + launch)[1])
    assert note in text and "TOOLKIT" not in text and "\ue000" not in text


def test_tasks_with_other_numbers_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lrs").write_text("0.1\n0.2\n0.3\n")
    (tmp_path / "job.sh").write_text(
        '#!/bin/bash\n#SBATCH --array=1-3%2\nLR=$(sed -n "${SLURM_ARRAY_TASK_ID}p" lrs)\nsrun ./a.out --lr $LR\n'
    )
    found = import_script(tmp_path / "job.sh", tmp_path)
    assert found.sweep == ["--sweep", "argv.lr=0.1,0.2,0.3", "-a", "0-2%2"]
    assert "line 4: the tasks 1-3%2 have the numbers 0-2 in the sweep" in found.notes
    job = tomllib.loads(found.text)["job"]
    assert (job["entry"], job["argv"]) == (["./a.out"], ["--lr", "0.1"])
    launch = "srun ./a.out $(sed -n '${SLURM_ARRAY_TASK_ID}p' lrs)"  # bash expands no variable within '
    assert imported(tmp_path, f"#SBATCH --array=1-3\n{launch}")[0]["job"]["once"]


def test_the_printed_options_are_those_of_a_sweep(toolkit, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    launch = 'python a.py --name "${NAMES[$SLURM_ARRAY_TASK_ID]}"'
    script.write_text(f"#!/bin/bash\n{TASKS}NAMES=('a b' c d)\n{launch}\n")
    said = toolkit("import", script)
    assert "the array becomes a sweep: toolkit submit FILE.toml --sweep 'argv.name=a b,c,d'\n" in said.err
    from toolkit.submission.sweep.sweep import read_sweep_options

    rows = read_sweep_options(["argv.name=a b,c,d"], None)
    assert [row["argv.name"].value for row in rows] == ["a b", "c", "d"]


@pytest.mark.parametrize(
    ("tasks", "arguments"),
    [
        ("0-2", "${LRS[$SLURM_ARRAY_TASK_ID]} --seed $SLURM_ARRAY_TASK_ID"),
        ("0-1", "${TWICE[$SLURM_ARRAY_TASK_ID]}"),
        ("0-20", "$SLURM_ARRAY_TASK_ID"),
        ("0-2", "a,$SLURM_ARRAY_TASK_ID"),
    ],
)
def test_values_that_no_option_sweeps_keep_the_script(tmp_path: Path, tasks: str, arguments: str) -> None:
    lines = f"#SBATCH --array={tasks}\nLRS=(0.1 3e-4 1e-5)\nTWICE=(1 1)\nsrun ./a.out --lr {arguments}"
    tables, notes = imported(tmp_path, lines)
    assert tables["job"]["once"] and "Fix: write a job file and a --grid file" in notes[-1]


@pytest.mark.parametrize(
    "lines",
    [
        "python a.py --lr ${LRS[$SLURM_ARRAY_TASK_ID]} --lr 4 ${LRS[$SLURM_ARRAY_TASK_ID]}x${OTHER[$SLURM_ARRAY_TASK_ID]}",
        "LRS=('1 2' 3 4)\npython a.py --lr ${LRS[$SLURM_ARRAY_TASK_ID]}",
        "LRS=(1 2)\npython a.py --lr ${LRS[$SLURM_ARRAY_TASK_ID]}",
        "source env.sh\npython a.py --lr ${LRS[$SLURM_ARRAY_TASK_ID]}",
        "O=(-x -y -z)\npython a.py --mode ${O[$SLURM_ARRAY_TASK_ID]}",
        "P=(./a ./b ./c)\nsrun ${P[$SLURM_ARRAY_TASK_ID]} -x",
        "python a.py $(sed -n ${SLURM_ARRAY_TASK_ID}p missing)",
    ],
)
def test_values_that_only_the_shell_knows_keep_the_script(tmp_path: Path, lines: str) -> None:
    tables, notes = imported(tmp_path, TASKS + lines)
    assert tables["job"]["once"] and tables["job"]["array"] == "0-2" and "line " in notes[-1]


@pytest.mark.parametrize(
    ("lines", "argument"),
    [
        ("srun bash -c 'python a.py --seed $SLURM_ARRAY_TASK_ID'", "python a.py --seed $SLURM_ARRAY_TASK_ID"),
        ("python a.py --tag '$SLURM_ARRAY_TASK_ID'", "$SLURM_ARRAY_TASK_ID"),
        ("python a.py \\$SLURM_ARRAY_TASK_ID", "$SLURM_ARRAY_TASK_ID"),
        ("python a.py \"it's\" '$SLURM_ARRAY_TASK_ID'", "$SLURM_ARRAY_TASK_ID"),
    ],
)
def test_what_the_shell_of_the_script_does_not_expand_is_kept(tmp_path: Path, lines: str, argument: str) -> None:
    job = imported(tmp_path, TASKS + lines)[0]["job"]
    assert (job["array"], [*job["entry"], *job.get("argv", ())][-1], "once" in job) == ("0-2", argument, False)


def test_a_value_that_is_exported_stays_with_the_shell(tmp_path: Path) -> None:
    tables, _ = imported(tmp_path, f"{TASKS}export LR=${{LRS[$SLURM_ARRAY_TASK_ID]}}\npython a.py")
    assert tables["job"]["array"] == "0-2" and tables["job"]["entry"] == "a.py"
    assert tables["env"]["setup"] == ["LRS=(0.1 3e-4 1e-5) || true", "export LR=${LRS[$SLURM_ARRAY_TASK_ID]}"]
