"""Run the main job on this host: train on 4 ranks, then continue from the checkpoint on 2. Called by `make demo`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOLKIT = Path(sys.executable).with_name("toolkit")
STAGES = (
    ("train a small GPT on 4 ranks", ["submit", "train_lm", "--site", "local", "--wait"]),
    (
        "continue on 2 ranks from the last checkpoint",
        ["resume", "last", "-n", "2", "--set", "train.steps=200", "--wait"],
    ),
    ("list the checkpoints", ["ckpt", "ls", "last"]),
)


def main() -> None:
    environment = {**os.environ, "TOOLKIT_RUNS": str(ROOT / "runs")}  # so that `last` is the run of this demo
    for number, (text, arguments) in enumerate(STAGES, start=1):
        print(f"\n[demo {number}/{len(STAGES)}] {text}: toolkit {' '.join(arguments)}", flush=True)
        code = subprocess.run([str(TOOLKIT), *arguments], cwd=ROOT, env=environment, check=False).returncode
        if code:
            sys.exit(f"[demo] this stage failed with exit code {code}; `.venv/bin/toolkit logs last` shows details")
    run = max((ROOT / "runs" / "train_lm").iterdir())
    print(
        f"""
[demo] done. All files of this run are in {run.relative_to(ROOT)}:
    loss.png             the loss, with the change from 4 to 2 ranks
    checkpoints/         sharded HDF5; plain h5py opens the index.h5 of any step
    metrics/train.jsonl  every step
    attempts/            logs, heartbeats and results of each attempt

Try next:
    . .venv/bin/activate
    toolkit status last
    toolkit logs last --rank 0
    toolkit ckpt show last
    toolkit resume last -n 8 --set train.steps=250 --wait
    toolkit jobs copy train_lm my_job
    toolkit run my_job/train_lm.toml --site local
    toolkit submit train_lm --site lumi -A ACCOUNT -N 2 --dry-run --runs elsewhere
""",
        end="",
    )


if __name__ == "__main__":
    main()
