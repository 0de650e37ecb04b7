"""Measure the seconds from the start of srun to a working process group, against torchrun in the same allocation.

    salloc -N 4 --ntasks-per-node 2 python benchmarks/group_start.py [--pairs 5]

Both start 8 torch ranks on 4 nodes, and the time ends when the last rank has finished its first all-reduce. For toolkit
("ours") it includes all of a job's start: srun with PMIx, one guard per rank, discovery over MPI, rank 0's store, gloo,
and the job's `main`. srun starts one torchrun per node, with a c10d rendezvous on the first node. Pairs are interleaved
in alternating order; the ratio is ours / torchrun of each pair. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

from toolkit.slurm.hostlist import first_host

TARGET = 1.0
BIN = Path(sys.executable).parent
PLAIN = """
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
open(f"{sys.argv[1]}/{dist.get_rank()}", "w").write(repr(time.time()))
dist.barrier()
dist.destroy_process_group()
"""
OURS = """
import time, torch, torch.distributed as dist
def main(world, config):
    dist.all_reduce(torch.ones(1))
    open(f"{config.args['folder']}/{world.rank}", "w").write(repr(time.time()))
"""
JOB = '[job]\nname = "group_start"\nentry = "ours.py:main"\n[restart]\ncrashes = 0\n'


def last_stamp(folder: Path, ranks: int) -> float:
    """Return the time at which the last rank was ready."""
    stamps = [float(path.read_text()) for path in folder.iterdir()]
    if len(stamps) != ranks:
        sys.exit(f"expected {ranks} ranks to become ready, got {len(stamps)} in {folder}")
    return max(stamps)


def time_torchrun(folder: Path, nodes: int, per_node: int, port: int) -> float:
    """Start one torchrun per node with srun; return the seconds until the last rank was ready."""
    head = first_host(os.environ["SLURM_JOB_NODELIST"])
    address = subprocess.run(
        ["srun", "-N1", "-n1", "-w", head, "--mpi=none", "bash", "-c", "hostname -I"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()[0]
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    began = time.time()
    subprocess.run(
        ["srun", f"-N{nodes}", f"-n{nodes}", "--ntasks-per-node=1", "--mpi=none", f"--cpus-per-task={per_node}",
         str(BIN / "torchrun"), f"--nnodes={nodes}", f"--nproc-per-node={per_node}", "--rdzv-backend=c10d",
         f"--rdzv-endpoint={address}:{port}", f"--rdzv-id={port}", str(folder.parent / "plain.py"), str(folder)],
        check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **({"GLOO_SOCKET_IFNAME": interface} if interface else {})},
    )  # fmt: skip
    return last_stamp(folder, nodes * per_node) - began


def time_ours(folder: Path, nodes: int, per_node: int) -> float:
    """Run `toolkit run` inside the allocation; return the seconds from the supervisor's srun to the last ready rank."""
    runs = folder.parent / "runs"
    subprocess.run(
        [str(BIN / "toolkit"), "run", str(folder.parent / "ours.toml"), "-N", str(nodes), "--ntasks-per-node", str(per_node),
         "--runs", str(runs), "--set", f"args.folder={folder}"],
        check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    events = max((runs / "group_start").iterdir()) / "attempts" / "000" / "events.jsonl"
    began = datetime.fromisoformat(json.loads(events.read_text().splitlines()[0])["time"]).timestamp()
    return last_stamp(folder, nodes * per_node) - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=5)
    pairs = parser.parse_args().pairs
    if "SLURM_JOB_NODELIST" not in os.environ:
        sys.exit("run this inside an allocation: salloc -N 4 --ntasks-per-node 2 python benchmarks/group_start.py")
    nodes, per_node = int(os.environ["SLURM_JOB_NUM_NODES"]), 2
    # Each node of a dev cluster has its own /tmp, but they share the home folder.
    root = Path.home() / f".group-start-{os.getpid()}"
    root.mkdir()
    (root / "plain.py").write_text(PLAIN)
    (root / "ours.py").write_text(OURS)
    (root / "ours.toml").write_text(JOB)
    ours, theirs = [], []
    for pair in range(pairs):
        for mine in (True, False) if pair % 2 == 0 else (False, True):
            folder = root / f"{'ours' if mine else 'torchrun'}-{pair}"
            folder.mkdir()
            if mine:
                ours.append(time_ours(folder, nodes, per_node))
            else:
                theirs.append(time_torchrun(folder, nodes, per_node, 29500 + pair))
        print(f"pair {pair}: ours {ours[-1]:.2f} s, torchrun {theirs[-1]:.2f} s", file=sys.stderr, flush=True)
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    print(json.dumps({
        "benchmark": "group_start", "host": socket.gethostname(), "nodes": nodes, "ranks": nodes * per_node, "pairs": pairs,
        "ours_median_s": statistics.median(ours), "torchrun_median_s": statistics.median(theirs), "median_ratio": ratio,
        "target": TARGET, "met": ratio <= TARGET,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
