"""torchrun in a script or as the entry: several worlds, or nodes that wait at the wrong address."""

from __future__ import annotations

import pytest

from toolkit.config.request import JobRequest, resolve
from toolkit.submission.preflight.script_lines import check_script

HEAD = 'HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
FIRST_ONLY = "torchrun runs only on the first of 2 nodes, because no srun starts it"
TWO_WORLDS = "torchrun without --nnodes forms a world on each node, but the job has 2 nodes"


def warnings(folder, commands, nodes=2, tasks=1):
    path = folder / "job.sh"
    path.write_text(f"#!/bin/bash\n#SBATCH --nodes={nodes}\n#SBATCH --ntasks-per-node={tasks}\n{commands}\n")
    return [one.what for one in check_script(resolve(JobRequest(str(path)), None, environ={}))]


def waits(what):
    return [f"{what}, where each of 2 nodes would wait for the others"]


@pytest.mark.parametrize(
    ("commands", "found"),
    [
        ("srun torchrun --nproc-per-node=2 train.py", [TWO_WORLDS]),
        ("srun $ENV/bin/python3 -m torch.distributed.run --nproc_per_node 2 train.py", [TWO_WORLDS]),
        ("ARGS='--nproc-per-node 4'\nsrun torchrun $ARGS train.py --nnodes 2", [TWO_WORLDS]),
        ('CMD="torchrun --nproc-per-node 4 train.py"\nsrun bash -c "$CMD"', [TWO_WORLDS]),
        ("srun torchrun --standalone train.py", [TWO_WORLDS.replace("without --nnodes", "with --standalone")]),
        ("torchrun --standalone train.py", [FIRST_ONLY]),
        ("x=1; time python -m torch.distributed.run --nnodes=2 --rdzv-endpoint=$H:1 train.py", [FIRST_ONLY]),
        ("srun torchrun --nproc-per-node=4 $HOME/train.py", [TWO_WORLDS]),
        ("CMD=(srun torchrun\n --tee '3 4')\n${CMD[@]} train.py", [TWO_WORLDS]),
        ("srun bash -c 'cd x && torchrun train.py'", [TWO_WORLDS]),
        ("srun -N $SLURM_NNODES -c 4 apptainer exec x.sif bash -lc \"torchrun train.py\"", [TWO_WORLDS]),
        ("srun torchrun --nnodes=2 --node_rank=$SLURM_NODEID --master_addr=$A x.py",
         ["--node-rank of torchrun is 0 on each of 2 nodes, because the batch shell evaluates $SLURM_NODEID"]),
        ("srun python -m torch.distributed.run --nnodes=3 --node_rank=0 --master_addr=$A x.py",
         ["torchrun has --nnodes=3, but the job has 2 nodes", "--node-rank of torchrun is 0 on each of 2 nodes"]),
        ("N=1\nsrun torchrun --nnodes=$N --rdzv-endpoint=$H:1 train.py", ["torchrun has --nnodes=1, but the job has 2 nodes"]),
        ("srun torchrun --nnodes 2 \\\n --rdzv_endpoint localhost:29512 train.py", waits("--rdzv-endpoint of torchrun is localhost")),
        ("HEAD=${HEAD:-localhost}\nsrun torchrun --nnodes=2 --rdzv-endpoint=$HEAD:1 x.py", waits("--rdzv-endpoint of torchrun may be localhost")),
        ("export A=127.0.0.1\nsrun torchrun --nnodes $SLURM_NNODES --master_addr $A x.py", waits("--master-addr of torchrun is 127.0.0.1")),
        ("srun torchrun --nnodes 2 --nproc-per-node 4 x.py", waits("the default --master-addr of torchrun is 127.0.0.1")),
        ("srun bash -c 'torchrun --nnodes=2 --rdzv-endpoint=$(hostname):1 x.py'",
         ["each node evaluates --rdzv-endpoint $(hostname):1 for itself, and would wait there for the others"]),
    ],
)  # fmt: skip
def test_nodes_that_do_not_find_each_other(tmp_path, commands, found):
    assert warnings(tmp_path, commands) == found
    assert warnings(tmp_path, commands.replace("=2", "=1"), nodes=1) == []


@pytest.mark.parametrize(
    "commands",
    [
        f"{HEAD}srun torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29512 train.py",
        "srun torchrun --nnodes=2 --rdzv-endpoint=$(hostname):29500 train.py",  # the batch shell evaluates it
        "if x; then A=$(first); else A=localhost; fi\nsrun torchrun --nnodes=2 --rdzv-endpoint=$A:1 x.py",
        "ARGS=(\n --nnodes $N # all\n --master_addr $M\n)\nsrun torchrun ${ARGS[@]} train.py",
        "RUN='torchrun --nproc-per-node 4'\nsrun $RUN --nnodes 2 --rdzv-endpoint $H:1 train.py",
        "srun torchrun $ARGS train.py",
        "export PET_NNODES=2\nsrun torchrun train.py",
        "srun -N1 -n1 torchrun train.py",
        "srun torchrun --nproc-per-node $(nvidia-smi -L | wc -l) --nnodes 2 --rdzv-endpoint $A:1 x.py",
        "srun torchrun --nproc-per-node `nvidia-smi -L | wc -l` --nnodes 2 --rdzv-endpoint $A:1 x.py",
        "srun torchrun --rdzv-endpoint=$(scontrol show hostnames | head -n 1):29500 --nnodes=2 x.py",
        "srun torchrun --nproc-per-node=$(( GPUS / 2 )) --nnodes=2 --rdzv-endpoint $A:1 x.py",
        "srun torchrun --nproc-per-node=$(( $(nvidia-smi -L | wc -l) / 2 )) --nnodes=2 --rdzv-endpoint $A:1 x.py",
        'srun torchrun --log-dir "/x y/log" --nnodes 2 --rdzv-endpoint $A:1 x.py',
        'srun torchrun --tee "3 4" --nnodes=2 --rdzv-endpoint $A:1 x.py',
        "srun torchrun --nnodes=$(scontrol show hostnames | wc -l) --rdzv-endpoint=$A:1 x.py",
        "srun torchrun --nnodes=$(( SLURM_NNODES )) --rdzv-endpoint=$A:1 x.py",
        'ARGS=(--nproc-per-node=4)\nARGS+=(--nnodes=2 --rdzv-endpoint=$A:1)\nsrun torchrun "${ARGS[@]}" x.py',
        "ARGS=--no-python\nARGS+=' --nnodes=2'\nsrun torchrun $ARGS x.py",
        'run() { srun torchrun "$@"; }\nrun --nnodes=2 x.py',
        "srun torchrun ${EXTRA:+--standalone} --nnodes 2 --rdzv-endpoint $A:1 x.py",
        "command -v torchrun >/dev/null || exit 1",
        "which torchrun || exit 1",
        "pip install torchrun x",
        'echo "Starting torchrun on 2"',
        'LOG="torchrun log"',
        'CMD="torchrun --nproc-per-node 4"\nCMD="$CMD --nnodes 2 x.py"\nsrun $CMD',
        "if [ $SLURM_NNODES -gt 1 ]; then srun torchrun --nnodes 2 --rdzv-endpoint $A:1 x.py; else torchrun --standalone x.py; fi",
        "srun bash -c 'if [ $SLURM_LOCALID = 0 ]; then torchrun x.py; fi'",
        'srun "${SRUN_ARGS[@]}" torchrun x.py',
        "for node in $NODES; do ssh $node torchrun --nnodes 2 x.py & done; torchrun --nnodes 2 --rdzv-endpoint $A:1 x.py",
        "srun -N1 torchrun --nnodes 2 --node-rank 0 --master-addr $A x.py & srun -N1 -r1 torchrun --nnodes 2 --node-rank 1 --master-addr $A x.py",
        "srun torchrun --nnodes 2 --node-rank 0 --rdzv-backend=c10d --rdzv-endpoint $A:1 x.py",
        "srun bash -c 'torchrun --nnodes 2 --node-rank $SLURM_NODEID --master-addr $A x.py'",
        "srun torchrun --nnodes=1:2 --rdzv-endpoint=$H:1 train.py",
        "# srun torchrun train.py\necho 'torchrun train.py'\ncat > x <<E\nsrun torchrun train.py\nE",
    ],
)
def test_nodes_that_find_each_other(tmp_path, commands):
    assert warnings(tmp_path, commands) == []


def test_tasks_that_each_start_torchrun(tmp_path):
    command = "torchrun --nnodes=2 --rdzv-endpoint=$H:1 x.py"
    assert warnings(tmp_path, f"srun {command}", tasks=2) == [
        "2 tasks per node each start torchrun, which starts ranks of its own"
    ]
    for before in ("srun --ntasks-per-node=1", "export SLURM_NTASKS_PER_NODE=1; srun", 'srun "${SRUN_ARGS[@]}"'):
        assert warnings(tmp_path, f"{before} {command}", tasks=2) == []


def test_torchrun_as_the_entry_of_a_job_file(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text('[job]\nentry = ["torchrun", "--nproc-per-node=2", "train.py"]\nnodes = 2\n')
    (found,) = check_script(resolve(JobRequest(str(path)), None, environ={}))
    assert (found.where, found.what) == (f"{path}:2:job.entry", TWO_WORLDS)


def test_directives_after_a_command(tmp_path):
    assert warnings(tmp_path, "set -e\n#SBATCH --exclusive") == [
        "line 5 is ignored by sbatch, because line 4 is a command: set -e"
    ]
