"""Settings of a rank before it connects to the others: CPU affinity, threads, and the network fabric.

This runs before torch is imported: existing threads keep their affinity, and libraries read OMP_NUM_THREADS and NCCL's
variables once. toolkit does not change the affinity of executables: an MPI program binds itself, and a mask of toolkit
would restrict its choice.
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
    """Bind this process to its CPUs, and set the variables that its environment does not set.

    Collective if MPI started the ranks. `job` is the resolved job. The rank's log states each setting and its reason.

    Raises:
        ToolkitError: this node does not have the site's interface.
    """
    on_gpu, lines = world.device.startswith("cuda"), []
    if on_gpu or world.nodes > 1:  # otherwise ranks use loopback, without a choice
        from toolkit.rank.fabric import set_fabric  # lazy: slow imports

        lines = set_fabric(world, str((job.get("network") or {}).get("interface") or ""), environ)
    # Requires CUDA_DEVICE_ORDER, which determines the GPU numbers.
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
    """Bind this process to its CPUs and set OMP_NUM_THREADS; return the log lines.

    Args:
        job: the resolved job.
        masks: the CPU mask that the launcher gave to each rank of the node.
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
    affinity = (
        f"held to CPUs {cpu_list(chosen.cpus)} of {cpu_list(given)}" if held else f"left on CPUs {cpu_list(given)}"
    )
    count = f"OMP_NUM_THREADS={threads}" if kept is None else f"OMP_NUM_THREADS={kept} as it was set"
    return [f"{affinity}, {count}: {chosen.reason}"]


def _near(world: World, near: list[int | None]) -> list[int | None]:
    """The NUMA node of the GPU of each rank of this node, from those of the GPUs that this rank sees."""
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
        # Data workers and threads that this thread starts inherit the affinity.
        os.sched_setaffinity(0, chosen.cpus)
    except OSError as error:  # CPUs were removed, or a sandbox forbids the call
        return Binding(given, chosen.threads, f"the kernel refused CPUs {cpu_list(chosen.cpus)}: {error.strerror}")
    return chosen


def _threads(
    chosen: Binding, world: World, job: Mapping[str, Any], environ: Mapping[str, str], quota: float | None
) -> int:
    """One thread per core; fewer if Slurm, the job or a container's quota allows less than the mask."""
    limits = [chosen.threads]
    # On a local machine the default of one CPU for a rank is not a choice of the user.
    if "SLURM_JOB_ID" in environ or "job.cpus_per_rank" in (job.get("origins") or {}):
        limits.append(shape_of_job(job).component_of(world.rank).cpus_per_rank or 1)
    if quota is not None:
        limits.append(int(quota / world.local_size))
    return max(1, min(limits))
