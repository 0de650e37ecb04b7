"""What a rank sets before it meets the others: its CPUs and threads, and the few settings of the fabric.

It comes before torch is imported: threads that exist already keep the CPUs that they had, and OMP_NUM_THREADS and
NCCL's variables are read once. Executables are left as the launcher started them: an MPI program binds itself, by rules
that its users know, and a mask of ours would be the frame of theirs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.rank.processors import PROCESS_ROOT, SYSTEM_ROOT, cpu_quota, numa_node_of_gpu, read_processors
from toolkit.supervise.shape import shape_of_job
from toolkit.terminal.talk import say
from toolkit.world.binding import Binding, RankOfNode, bind, unbound
from toolkit.world.cpu_lists import cpu_list
from toolkit.world.facts import World
from toolkit.world.masks import Masks, masks_of_node
from toolkit.world.physical_gpu import PhysicalGpu, gpus_of_process


def prepare(world: World, job: Mapping[str, Any], environ: MutableMapping[str, str] = os.environ) -> None:
    """Hold this process to its CPUs, and set what its environment leaves open.

    Collective where MPI started the ranks. `job` is the resolved job. What was set, and why, is said in the rank's log.

    Raises:
        ToolkitError: the site's interface is not here.
    """
    on_gpu, lines = world.device.startswith("cuda"), []
    if on_gpu or world.nodes > 1:  # else ranks meet over loopback, and nothing is left to choose
        from toolkit.rank.fabric import set_fabric  # its imports would keep a laptop waiting

        lines = set_fabric(world, str((job.get("network") or {}).get("interface") or ""), environ)
    # After CUDA_DEVICE_ORDER is set, which numbers the GPUs.
    gpus = gpus_of_process(environ) if on_gpu else []
    masks = masks_of_node(world, environ)
    lines += set_processors(world, job, masks, gpus, environ)
    for line in lines:
        say(line)


def set_processors(
    world: World,
    job: Mapping[str, Any],
    masks: Masks,
    gpus: list[PhysicalGpu],
    environ: MutableMapping[str, str],
    *,
    system_root: Path = SYSTEM_ROOT,
    process_root: Path = PROCESS_ROOT,
) -> list[str]:
    """Hold this process to its CPUs and set OMP_NUM_THREADS; returns what to say of it.

    Args:
        job: the resolved job.
        masks: what the launcher gave to each rank of the node.
        gpus: those that CUDA shows to this process.
    """
    given = masks[world.local_rank]
    assert given is not None  # our own
    processors = read_processors(given, system_root)
    near = _near(world, [numa_node_of_gpu(gpu.bus, processors, system_root) for gpu in gpus])
    on_gpu = world.device.startswith("cuda")
    ranks = [RankOfNode(mask, node) for mask, node in zip(masks, near, strict=True)]
    if job["job"].get("bind") == "none":
        chosen = replace(unbound(world.local_rank, ranks, processors), reason="bind is none")
    else:
        chosen = _hold(bind(world.local_rank, ranks, processors, on_gpu=on_gpu), given)
    threads = _threads(chosen, world, job, environ, cpu_quota(process_root, system_root))
    kept = environ.get("OMP_NUM_THREADS")
    environ.setdefault("OMP_NUM_THREADS", str(threads))
    held = chosen.cpus != given
    if not (held or on_gpu or (world.local_rank == 0 and world.local_size > 1)):
        return []
    said = f"held to CPUs {cpu_list(chosen.cpus)} of {cpu_list(given)}" if held else f"left on CPUs {cpu_list(given)}"
    count = f"OMP_NUM_THREADS={threads}" if kept is None else f"OMP_NUM_THREADS={kept} as it was set"
    return [f"{said}, {count}: {chosen.reason}"]


def _near(world: World, near: list[int | None]) -> list[int | None]:
    """The NUMA node of the GPU of each rank of this node, from those of the GPUs that this rank is shown."""
    known: list[int | None] = [None] * world.local_size
    own = int(world.device.partition(":")[2] or 0)
    if own == world.local_rank:  # all see the same; with a single rank this is unknown
        known[: len(near)] = near[: world.local_size]
    elif own < len(near):
        known[world.local_rank] = near[own]
    return known


def _hold(chosen: Binding, given: frozenset[int]) -> Binding:
    if chosen.cpus == given:
        return chosen
    try:
        # Of this thread, and of all that it will start: data workers and compiled kernels' threads inherit it.
        os.sched_setaffinity(0, chosen.cpus)
    except OSError as error:  # CPUs that went away meanwhile, or a sandbox that allows no such call
        return Binding(given, chosen.threads, f"the kernel refused CPUs {cpu_list(chosen.cpus)}: {error.strerror}")
    return chosen


def _threads(
    chosen: Binding, world: World, job: Mapping[str, Any], environ: Mapping[str, str], quota: float | None
) -> int:
    """One for each core; fewer where Slurm, the job or a container's quota allows less than the mask shows."""
    limits = [chosen.threads]
    # On a local machine the default of one CPU for a rank is not a choice of the user.
    if "SLURM_JOB_ID" in environ or "job.cpus_per_rank" in (job.get("origins") or {}):
        limits.append(shape_of_job(job).component_of(world.rank).cpus_per_rank or 1)
    if quota is not None:
        limits.append(int(quota / world.local_size))
    return max(1, min(limits))
