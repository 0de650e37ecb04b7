"""Run one program with a slow rank under toolkit and under TraceML, and print what each of them says about it.

python benchmarks/beside_traceml.py TRACEML [--fault work data]

TRACEML is a folder with TraceML: `pip install --no-deps --target TRACEML traceml-ai msgspec psutil pyyaml`. From the start,
rank 1 of two works twice as long, or waits for its data as long as it works. TraceML speaks when the run has ended.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

from toolkit.metrics.verdicts import line_of_verdict, read_verdicts

TOOLKIT = [sys.executable, "-c", "from toolkit.cli.main import main; main()"]
SECONDS = 180
PROGRAM = """
import os, time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

TOOL, FAULT, SECONDS = os.environ["TOOL"], os.environ["FAULT"], float(os.environ["SECONDS"])
if TOOL == "toolkit":
    import toolkit
else:
    import traceml_ai
    traceml_ai.init(mode="auto")
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()


class Samples(Dataset):
    def __len__(self):
        return 10**9

    def __getitem__(self, index):
        time.sleep(0.05 if rank == 1 and FAULT == "data" else 0.001)
        return torch.ones(256, 512)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))

    def forward(self, value):
        for _ in range(8 if rank == 1 and FAULT == "work" else 1):
            result = self.layers(value)
        return result


torch.manual_seed(0)
model = DistributedDataParallel(Model())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
ends = torch.tensor([time.time() + SECONDS], dtype=torch.float64)
dist.broadcast(ends, 0)
for number, batch in enumerate(DataLoader(Samples(), batch_size=1)):
    with nullcontext() if TOOL == "toolkit" else traceml_ai.trace_step(model):
        loss = model(batch[0]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if TOOL == "toolkit":
        toolkit.step(number)
    over = torch.tensor([float(time.time() > ends)])
    dist.broadcast(over, 0)
    if over:
        break
dist.destroy_process_group()
"""


def run_toolkit(folder: Path, variables: dict[str, str]) -> str:
    """Return the verdicts of a run, with the time from its start to each of them."""
    (folder / "work.toml").write_text('[job]\nentry = "work.py"\nranks_per_node = 2\n')
    (folder / "here.toml").write_text('name = "here"\n[scheduler]\nkind = "local"\n[launcher]\nkind = "local"\n')
    began_s = time.time()
    command = [
        *TOOLKIT,
        "run",
        "work.toml",
        "--site",
        "./here.toml",
        "--runs",
        "runs",
        "--set",
        'env.pass=["TOOL","FAULT","SECONDS"]',
    ]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    found = list(folder.glob("runs/work/2*/metrics/verdicts.jsonl"))
    if done.returncode != 0 or not found:
        return f"exit code {done.returncode}, {len(found)} files of verdicts\n{done.stderr}"
    raised = [one for one in read_verdicts(found[0]) if one.state == "raised"]
    return "\n".join(
        f"after {datetime.fromisoformat(one.time).timestamp() - began_s:.0f} s: {line_of_verdict(one)}"
        for one in raised
    )


def run_traceml(folder: Path, variables: dict[str, str], traceml: Path) -> str:
    variables = variables | {"PYTHONPATH": str(traceml)}
    command = [
        sys.executable,
        str(traceml / "bin" / "traceml"),
        "run",
        "work.py",
        "--nproc-per-node",
        "2",
        "--run-name",
        "one",
    ]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    summaries = list(folder.rglob("final_summary.txt"))
    return (
        summaries[0].read_text()
        if summaries
        else f"exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traceml", type=Path, metavar="TRACEML")
    parser.add_argument("--fault", nargs="+", choices=["work", "data"], default=["work", "data"])
    given = parser.parse_args()
    for fault in given.fault:
        folder = Path(tempfile.mkdtemp(prefix="beside-", dir=Path.home()))
        try:
            (folder / "work.py").write_text(PROGRAM)
            variables = os.environ | {"OMP_NUM_THREADS": "1", "TOOLKIT_INDEX": str(folder / "index")}
            variables |= {"FAULT": fault, "SECONDS": str(SECONDS)}
            print(f"== toolkit, {fault} ==\n{run_toolkit(folder, variables | {'TOOL': 'toolkit'})}\n", flush=True)
            summary = run_traceml(folder, variables | {"TOOL": "traceml"}, given.traceml.absolute())
            print(f"== TraceML, {fault} ==\n{summary}\n", flush=True)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
