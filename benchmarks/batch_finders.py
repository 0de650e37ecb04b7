"""Find the largest batch under a real memory limit with toolkit, Lightning and Accelerate, on one rank and on two.

    python benchmarks/batch_finders.py FOLDER [--ranks 1 2] [--limit-mb 700] [--most 256] [--patience-s 240]

Each finder trains the model of train_lm with AdamW, at a size that RLIMIT_DATA of every rank limits. Lightning and
Accelerate come from `python scripts/guests.py`. Prints, for each finder, the size that it proposes, its time, and whether
20 steps with that size fit into the same memory in a new process. FOLDER receives the runs of toolkit.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GUESTS, TOOLKIT = ROOT / ".venv-guests" / "bin" / "python", ROOT / ".venv" / "bin" / "toolkit"
SHAPE = {"width": 64, "layers": 2, "context": 64}

# Run by the guests' Python on each rank: argv is the finder, the size to begin with, and the size to train with, or 0.
RANK = (
    f"SHAPE = {SHAPE!r}"
    + """
import os, sys, torch, torch.distributed as dist
from torch import nn
from jobs.train_lm import GPT, Arguments
finder, most, fixed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(0); torch.set_num_threads(1)
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
class Texts(torch.utils.data.Dataset):
    def __len__(self): return 4096 * most
    def __getitem__(self, number): return torch.randint(0, 256, (SHAPE["context"] + 1,))
def loss_of(model, text): return nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
def train(batch, steps):
    model = GPT(Arguments(**SHAPE, dropout=0.0))
    if size > 1: model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _, text in zip(range(steps), torch.utils.data.DataLoader(Texts(), batch)):
        loss_of(model, text).backward(); optimizer.step(); optimizer.zero_grad()
    return batch
if finder != "lightning" and size > 1: dist.init_process_group("gloo")
if fixed:
    train(fixed, 20)
elif finder == "accelerate":
    from accelerate.utils import find_executable_batch_size
    found = find_executable_batch_size(train, starting_batch_size=most)
    print("found", found(4), flush=True)
else:
    import lightning, logging; logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    from lightning.pytorch.tuner import Tuner
    class Module(lightning.LightningModule):
        def __init__(self): super().__init__(); self.model, self.batch_size = GPT(Arguments(**SHAPE, dropout=0.0)), 1
        def training_step(self, text, number): return loss_of(self.model, text)
        def configure_optimizers(self): return torch.optim.AdamW(self.parameters())
        def train_dataloader(self): return torch.utils.data.DataLoader(Texts(), self.batch_size)
    trainer = lightning.Trainer(accelerator="cpu", devices=size, strategy="ddp" if size > 1 else "auto", logger=False,
        max_epochs=1, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
    print("found", Tuner(trainer).scale_batch_size(Module(), mode="binsearch", init_val=1, steps_per_trial=4, max_trials=12), flush=True)
"""
)


def on_ranks(ranks: int, limit: int, patience_s: float, *argv: object) -> tuple[str, float]:
    """Return what rank 0 printed or how the ranks ended, and the seconds."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = os.environ | {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    command = [str(GUESTS), "-c", RANK, *map(str, argv)]
    began = time.monotonic()
    started = [
        subprocess.Popen(
            command, env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), "NODE_RANK": "0"}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, cwd=ROOT,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)),
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        out, error = started[0].communicate(timeout=patience_s)
        lines = [line for line in out.splitlines() if line.startswith("found")]
        last = (error.strip().splitlines() or [""])[-1]
        outcome = lines[-1] if lines else f"exit code {started[0].returncode}: {last:.150}"
    except subprocess.TimeoutExpired:
        outcome = f"no end after {patience_s:.0f} s"
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return outcome, time.monotonic() - began


def by_toolkit(folder: Path, ranks: int, limit: int, most: int) -> tuple[str, float]:
    shape = [f"--set=args.{name}={value}" for name, value in SHAPE.items()]
    command = [
        TOOLKIT, "bench", "batch", "train_lm", "--site=local", f"-n{ranks}", f"--runs={folder}", "--json", *shape,
        "--set=args.dropout=0.0", "--set=args.max_bytes=100000", f"--set=train.batch={most * ranks}",
    ]  # fmt: skip
    began = time.monotonic()
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)),
    )  # fmt: skip
    if done.returncode:
        return (
            f"exit code {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1]:.150}",
            time.monotonic() - began,
        )
    found = json.loads(done.stdout)
    return f"found {found['micro_batch']} (largest {found['largest']})", time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--finders", nargs="+", default=["toolkit", "lightning", "accelerate"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--limit-mb", type=int, default=700)
    parser.add_argument("--most", type=int, default=256)
    parser.add_argument("--patience-s", type=float, default=240)
    options = parser.parse_args()
    if not GUESTS.exists():
        sys.exit(f"{GUESTS} not found; run `python scripts/guests.py`")
    limit = options.limit_mb << 20
    print("| finder | ranks | result | seconds | 20 steps with that size |\n|---|---|---|---|---|")
    for ranks in options.ranks:
        for finder in options.finders:
            if finder == "toolkit":
                outcome, seconds = by_toolkit(options.folder, ranks, limit, options.most)
            else:
                outcome, seconds = on_ranks(ranks, limit, options.patience_s, finder, options.most, 0)
            fits = "-"
            if outcome.startswith("found"):
                size = int(outcome.split()[1])
                end, _ = on_ranks(ranks, limit, options.patience_s, "steps", options.most, size)
                fits = "fit" if end.startswith("exit code 0") else end
            print(f"| {finder} | {ranks} | {outcome} | {seconds:.0f} | {fits} |", flush=True)


if __name__ == "__main__":
    main()
