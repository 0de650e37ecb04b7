"""Compare what scripts save after `toolkit stop`, at the walltime and after `scontrol requeue` with `scancel --signal`.

    python benchmarks/stopped_scripts.py [--only WORD] [--guests PYTHON]

Starts a dev cluster of two nodes, and removes it at the end. Each program below saves for 3 s after it has received TERM
(Lightning: USR1) and then writes a file. A cell is the number of processes that saved, of all that can. `--guests` names
an interpreter with Lightning, such as that of .venv-guests; R and Lightning are skipped if they are not installed. The
reference signals the steps of a plain sbatch job, which never reaches a program without srun. Takes about five minutes;
the exit code is 1 if a script saves less than with the reference.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from toolkit.devcluster import cluster as devcluster
from toolkit.devcluster.layout import ClusterSpec, make_layout

NAME = "stopped"
BIN = Path(sys.executable).parent
SAVE_S = 3
WARN_S = 40
PATIENCE_S = 240.0  # for the imports of Lightning, four times at once
PYTHON_SOURCE = f"""
import os, pathlib, signal, sys, time
asked = []
for one in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(one, lambda number, frame: asked.append(number))
rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID", "0")
name = sys.argv[1] + os.environ.get("SLURM_ARRAY_TASK_ID", "") + "-" + rank
pathlib.Path(name + ".ready").touch()
while not asked:
    time.sleep(0.1)
time.sleep({SAVE_S})
print(name, "saved", flush=True)
pathlib.Path(name + ".saved").touch()
"""
C_SOURCE = f"""
#include <mpi.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>
static volatile int asked;
static void on_term(int number) {{ asked = number; }}
static void touch(const char *name, int rank, const char *end) {{
    char path[256];
    snprintf(path, sizeof path, "%s-%d.%s", name, rank, end);
    FILE *file = fopen(path, "w");
    if (file) fclose(file);
}}
int main(int argc, char **argv) {{
    int rank;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    signal(SIGTERM, on_term);
    touch(argv[1], rank, "ready");
    while (!asked) usleep(100000);
    sleep({SAVE_S});
    touch(argv[1], rank, "saved");
    MPI_Finalize();
    return 0;
}}
"""
# R saves its workspace on USR1, and has no handler for TERM.
R_SOURCE = 'file.create("{name}-0.ready"); while (TRUE) Sys.sleep(0.1)\n'
LIGHTNING_SOURCE = """
import pathlib, sys, time
import lightning, torch
from torch.utils.data import DataLoader, TensorDataset
name = sys.argv[1]
class Model(lightning.LightningModule):
    def __init__(self): super().__init__(); self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, _): time.sleep(0.1); return self.layer(batch[0]).square().mean()
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), 1e-3)
    def on_train_start(self): pathlib.Path(f"{name}-{self.trainer.global_rank}.ready").touch()
    def on_save_checkpoint(self, _):
        pathlib.Path(f"{name}-0.saved").touch()  # all ranks call it
data = DataLoader(TensorDataset(torch.zeros(100000, 2)), batch_size=4)
lightning.Trainer(
    accelerator="cpu", devices=2, num_nodes=1, strategy="ddp", max_epochs=1, default_root_dir=name + "-dir", logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
).fit(Model(), data)
"""


@dataclass(frozen=True)
class Kind:
    """A kind of script: its directives and commands, how many processes of it save, and after which signal."""

    commands: str
    saving: int
    directives: str = "--ntasks=2 --ntasks-per-node=2 --nodes=1"
    signal: str = "TERM"
    minutes: int = 1  # the shortest walltime in which it starts
    ready: int = 0  # files that show that all processes handle the signal; 0 means `saving`


KINDS = {
    "python": Kind("python save.py {name}", 1, "--ntasks=1"),
    "srun-python": Kind("srun python save.py {name}", 2, "--nodes=2 --ntasks-per-node=1"),
    "srun-torchrun": Kind("srun --ntasks=1 torchrun --standalone --nproc-per-node=2 save.py {name}", 2),
    "background": Kind("for i in a b; do srun --exact -n1 python save.py {name}$i & done; wait", 2),
    "lightning": Kind("srun {guests} lit.py {name}", 1, "--ntasks=2 --ntasks-per-node=2 --nodes=1 --signal=USR1@{warn}", "USR1", 4, 2),
    "R": Kind("srun -n1 Rscript {name}.R; touch {name}-0.ended", 1),
    "mpi-c": Kind("srun --mpi=pmi2 ./save {name}", 2, "--nodes=2 --ntasks-per-node=1"),
    "array": Kind("srun python save.py {name}", 2, "--array=0-1 --ntasks=1"),
    "pipe": Kind("srun python save.py {name} | tee {name}.log", 2),
    "trap": Kind("trap 'kill $child' TERM; python save.py {name} & child=$!; wait; wait", 1, "--ntasks=1"),
    "timeout": Kind("timeout 300 srun python save.py {name}", 2),
    # Counts as saved only if the trap runs after the save.
    "exit-trap": Kind(
        "mkdir {name}; trap 'mv {name}/r-0.saved {name}-0.saved' EXIT\n"
        "(until [ -e {name}/r-0.ready ]; do sleep 0.2; done; touch {name}-0.ready) &\nsrun python save.py {name}/r", 1, "--ntasks=1",
    ),
}  # fmt: skip
WAYS = ("scancel", "stop", "walltime", "requeue")


def run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{argv}: {done.stdout}{done.stderr}")
    return done.stdout.strip()


def files_of(name: str, end: str) -> int:
    return len([*Path().glob(f"{name}*.{end}")])


def await_files(name: str, end: str, count: int) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while (found := files_of(name, end)) < count and time.monotonic() < deadline:
        time.sleep(0.2)
    return found >= count


def write(kind: str, name: str, guests: str) -> Path:
    one = KINDS[kind]
    fields = {"name": name, "guests": guests, "warn": WARN_S}
    lines = [f"#SBATCH {option}" for option in one.directives.format(**fields).split()]
    script = Path(f"{name}.sh")
    body = one.commands.format(**fields)
    script.write_text("\n".join(["#!/bin/bash", *lines, f"#SBATCH --output={name}-%a.out", body, ""]))
    Path(f"{name}.R").write_text(R_SOURCE.format(name=name))
    return script


def measure(kind: str, way: str, guests: str) -> int:
    """Return how many processes of a kind have saved."""
    one, name = KINDS[kind], f"{kind}-{way}-"
    script = write(kind, name, guests)
    toolkit = str(BIN / "toolkit")
    if way == "scancel":
        job = run("sbatch", "--parsable", "--time=10", str(script))
    else:
        at_walltime = (
            ["--set", "restart.walltimes=-1", "--set", f"restart.warn_s={WARN_S}"] if way == "walltime" else []
        )
        run(
            toolkit,
            "submit",
            str(script),
            "--job-name",
            name,
            "-t",
            str(one.minutes) if way == "walltime" else "10",
            *at_walltime,
        )
        (folder,) = Path("runs", name).iterdir()
        job = run(toolkit, "status", folder.name, "--json")
        job = job.partition('"job_id": "')[2].partition('"')[0]
    if not await_files(name, "ready", one.ready or one.saving):
        return -1
    time.sleep(1)
    if way == "scancel":
        run("scancel", f"--signal={one.signal}", job)
    elif way == "stop":
        run(toolkit, "stop", folder.name)
    elif way == "requeue":
        run("scontrol", "requeue", job)
    deadline = time.monotonic() + (60 * one.minutes + 30 if way == "walltime" else 25)
    while files_of(name, "saved") < one.saving and time.monotonic() < deadline:
        time.sleep(0.2)
    saved = files_of(name, "saved")
    if way != "stop":
        run("scancel", job)
    return saved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--guests", default="")
    chosen = parser.parse_args()
    kinds = [kind for kind in KINDS if chosen.only in kind]
    if not chosen.guests:
        kinds = [kind for kind in kinds if kind != "lightning"]
    if shutil.which("Rscript") is None:
        kinds = [kind for kind in kinds if kind != "R"]
    root = Path(tempfile.mkdtemp(prefix="stopped-", dir=Path.home() / ".toolkit"))
    os.chdir(root)
    Path("save.py").write_text(PYTHON_SOURCE)
    Path("lit.py").write_text(LIGHTNING_SOURCE)
    Path("save.c").write_text(C_SOURCE)
    subprocess.run([BIN / "mpicc", "-o", "save", "save.c"], check=True)
    layout = make_layout(NAME, Path.home() / ".toolkit" / NAME)
    os.environ |= {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "TOOLKIT_RUNS": str(root / "runs"),
        "SLURM_CONF": str(layout.slurm_conf),
    }
    devcluster.up(layout, ClusterSpec(nodes=2, gpus=0, link="", accounting=False, subnet=""))
    is_less = False
    try:
        print(f"| script | {' | '.join(WAYS)} |\n|{'---|' * (1 + len(WAYS))}")
        for kind in kinds:
            with ThreadPoolExecutor(len(WAYS)) as pool:
                saved = list(pool.map(lambda way, kind=kind: measure(kind, way, chosen.guests), WAYS))
            total = KINDS[kind].saving
            is_less = is_less or any(one < saved[0] for one in saved)
            print(f"| {kind} | {' | '.join(f'{one} of {total}' for one in saved)} |", flush=True)
    finally:
        devcluster.down(layout)
    if not is_less:
        shutil.rmtree(root)
    sys.exit(is_less)


if __name__ == "__main__":
    main()
