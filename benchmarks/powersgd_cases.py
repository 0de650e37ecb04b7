"""Three cases in which torch's PowerSGD hook fails on gloo, beside the hook of toolkit: what each of them does.

    python benchmarks/powersgd_cases.py

Two ranks on this machine per case: several buckets, a layer whose gradient is zero at first, and one infinity in step 5 of 12,
whose step the optimizer skips. Prints for each how it ended, and whether the gradients of the last step are finite.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from toolkit.comm.compression.reducer import GradientCompression
from toolkit.comm.gradient import find_reduction
from toolkit.config.gradient_compression import GradientCompressionTable
from toolkit.topology.facts import Topology
from toolkit.world.facts import World

RANKS, STEPS, PATIENCE_S = 2, 12, 20
CASES = {"several buckets": 0.05, "zero gradients": 1000.0, "one infinity": 1000.0}  # bucket sizes in MiB


class Branches(nn.Module):
    """Layers, and a gate that keeps the gradient of the last one at zero."""

    def __init__(self, gate: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(96, 96) for _ in range(4)))
        self.last, self.gate = nn.Linear(96, 96), gate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(x)
        return hidden + self.gate * self.last(hidden)


def run(
    rank: int, folder: Path, case: str, register: Callable[[DistributedDataParallel, World], Callable[[], None]]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=timedelta(seconds=PATIENCE_S)
    )
    world = World(
        rank=rank, local_rank=rank, size=RANKS, local_size=RANKS, node=0, nodes=1, host="localhost", device="cpu",
        launcher="local", discovered_by="benchmark", attempt=0, run_dir=folder,
    )  # fmt: skip
    torch.manual_seed(0)
    parallel = DistributedDataParallel(Branches(0.0 if case == "zero gradients" else 1.0), bucket_cap_mb=CASES[case])
    skip = register(parallel, world)
    for step in range(STEPS):
        torch.manual_seed(100 * step + rank)
        parallel.zero_grad()
        x = torch.randn(16, 96) * (torch.inf if case == "one infinity" and step == 5 and rank == 0 else 1.0)
        parallel(x).square().mean().backward()
        if step == 5 and case == "one infinity":
            skip()
    is_finite = all(bool(torch.isfinite(one.grad).all()) for one in parallel.parameters() if one.grad is not None)
    if rank == 0:
        (folder / "finite").write_text(str(is_finite))
    dist.barrier()
    os._exit(0)  # torch's hook can leave threads that wait


def torch_hook(parallel: DistributedDataParallel, world: World) -> Callable[[], None]:
    state = powerSGD_hook.PowerSGDState(
        dist.group.WORLD, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1
    )
    parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return lambda: None  # it has no way to skip a step


def toolkit_hook(parallel: DistributedDataParallel, world: World) -> Callable[[], None]:
    settings = GradientCompressionTable(algorithm="powersgd", rank=2, min_elements=1000)
    compression = GradientCompression(settings, dict(parallel.module.named_parameters()))
    assert dist.group.WORLD is not None
    find_reduction(dist.group.WORLD, world, "auto", Topology((), {}), compression=compression).register_on(parallel)
    return compression.kept.discard


def outcome(case: str, register: Callable[[DistributedDataParallel, World], Callable[[], None]]) -> str:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        try:
            mp.spawn(run, (folder, case, register), RANKS)
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            return f"fails: {lines[-1].strip()[:110]}"
        is_finite = (folder / "finite").read_text() == "True"
        return "completes, finite" if is_finite else "completes, gradients are not finite in the last step"


def main() -> None:
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    for case in CASES:
        for name, register in (("torch", torch_hook), ("toolkit", toolkit_hook)):
            print(f"{case:<16} {name:<8} {outcome(case, register)}", flush=True)


if __name__ == "__main__":
    main()
