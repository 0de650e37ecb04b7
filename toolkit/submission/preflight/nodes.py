"""Compare a request with the existing nodes: CPUs, memory, GPUs and features, each alone and all combined."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from toolkit.config.resolved import ResolvedJob
from toolkit.errors import ToolkitError, counted
from toolkit.runs.record.job import Request
from toolkit.slurm.hostlist import expand_hostlist
from toolkit.slurm.limits import NodeShape
from toolkit.slurm.sbatch_options import memory_mib
from toolkit.submission.preflight.cluster import Cluster
from toolkit.submission.preflight.finding import About, Finding
from toolkit.submission.preflight.partitions import cpu_fix, in_gib

__all__ = ["against_nodes"]


def against_nodes(job: ResolvedJob, request: Request, cluster: Cluster) -> Iterator[Finding]:
    """Yield findings on resources that too few nodes have, and on GPU options that this Slurm does not support."""
    yield from _gpu_dialect(About(job, "gpu_dialect"), request, cluster)
    yield from _other_gres(About(job, "gpu_dialect"), request, cluster)
    shapes = cluster.shapes or ()
    if not shapes:
        return
    asked_mib, whose = _memory(job, request, cluster, request.cpus_per_node)
    alone = [
        *_default_memory(job, request, cluster, shapes),
        *_cpus(About(job, "cpus"), request, shapes),
        *_whole_nodes(About(job, "cpus"), request, cluster, shapes),
        *_memory_of_nodes(About(job, "memory"), asked_mib, whose, shapes),
        *_gpus(About(job, "gpus"), request, shapes),
        *_features(About(job, "constraint"), request, shapes),
    ]
    yield from _named_nodes(About(job, "nodes"), request, cluster, shapes)
    yield from alone or _together(About(job, "nodes"), request, asked_mib, _without_excluded(request, shapes))


def _named_nodes(about: About, request: Request, cluster: Cluster, shapes: Sequence[NodeShape]) -> Iterator[Finding]:
    """Check -w and -x against the nodes in the partitions of the job; only Slurm checks files of node names."""
    here = expand_hostlist(",".join(shape.names for shape in shapes))
    everywhere = {*here, *expand_hostlist(",".join(one.nodes for one in cluster.partitions.values()))}
    wanted, unwanted = _names_in(request.nodelist), _names_in(request.exclude)
    for key, letter, names in (("job.nodelist", "-w", wanted), ("job.exclude", "-x", unwanted)):
        if unknown := [name for name in names if name not in everywhere]:
            what = f"this cluster has no node {unknown[0]!r}"
            yield about.refuse(key, what, f"choose from {_some(here)} with {letter}")
    if elsewhere := [name for name in wanted if name in everywhere and name not in here]:
        what = f"node {elsewhere[0]} is not in a partition of the job"
        yield about.refuse("job.nodelist", what, f"choose from {_some(here)} with -w, or another partition with -p")
    if len(set(wanted)) > request.max_nodes and set(wanted) <= set(here):
        what = f"-w lists {counted(len(set(wanted)), 'node')}, but the job uses {request.max_nodes}"
        yield about.refuse("job.nodelist", what, f"nodes = {len(set(wanted))}, or list fewer with -w")
    away = {
        name for shape in shapes if wanted and not _is_usable(shape, request) for name in expand_hostlist(shape.names)
    }
    if waited_for := [name for name in wanted if name in away]:
        what = f"node {waited_for[0]} is down, drained or reserved: the job would wait for it"
        yield about.warn("job.nodelist", what, "wait, or choose others with -w")
    left = [name for name in here if name not in unwanted]
    if len(left) < request.min_nodes <= len(here):
        leaves = f"leaves {counted(len(left), 'node')} of {_some(here)}" if left else f"leaves none of {_some(here)}"
        yield about.refuse(
            "job.exclude",
            f"-x {request.exclude} {leaves}, but the job needs {request.min_nodes}",
            f"list fewer with -x, or nodes = {len(left)}" if left else "list fewer with -x",
        )


def _without_excluded(request: Request, shapes: Sequence[NodeShape]) -> list[NodeShape]:
    unwanted = set(_names_in(request.exclude))
    if not unwanted:
        return list(shapes)
    return [replace(shape, nodes=len({*expand_hostlist(shape.names)} - unwanted)) for shape in shapes]


def _names_in(hosts: str) -> list[str]:
    if "/" in hosts:
        return []
    try:
        return expand_hostlist(hosts)
    except ToolkitError:  # sbatch accepts more forms than toolkit can expand
        return []


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def _gpu_dialect(about: About, request: Request, cluster: Cluster) -> Iterator[Finding]:
    if not request.gpus_per_node:
        return
    kinds = [kind for kind in cluster.settings.get("GresTypes", "").split(",") if kind]
    if "gpu" not in kinds:
        yield about.refuse(
            "job.gpus_per_node", "this cluster has no GPUs (GresTypes in slurm.conf)", "gpus_per_node = 0"
        )
    choice = cluster.settings.get("SelectType", "")
    if request.gpu_option.startswith("--gpus") and choice and not choice.endswith(("cons_tres", "cray_aries")):
        yield about.refuse(
            "gpu.request",
            f"{request.gpu_option} needs select/cons_tres, but this cluster uses {choice}",
            'request = "--gres=gpu:{count}" in [gpu] of the site file',
        )


def _other_gres(about: About, request: Request, cluster: Cluster) -> Iterator[Finding]:
    """Return findings on unknown names of generic resources other than GPUs."""
    kinds = [kind for kind in cluster.settings.get("GresTypes", "").split(",") if kind]
    if unknown := [name for name in request.gres if name not in (*kinds, "gpu")]:
        knows = f"it has {', '.join(kinds)}" if kinds else "it has none"
        what = f"this cluster has no generic resource {unknown[0]!r}: {knows} (GresTypes in slurm.conf)"
        yield about.refuse("job.sbatch", what, f"remove {unknown[0]} from --gres")


def _memory(job: ResolvedJob, request: Request, cluster: Cluster, cpus: int) -> tuple[float | None, str]:
    """Return the memory per node in MiB and its source: the request of the job, else the default of the cluster.

    `cpus` is the number of CPUs per node by which DefMemPerCPU is multiplied.
    """
    if request.memory_mib is not None:
        return request.memory_mib, "the job requests"
    partition = next(iter(cluster.chosen(request)), None)
    by_gpu = "DefMemPerGPU" in cluster.settings.get("JobDefaults", "") or (partition and partition.gives_memory_by_gpu)
    if request.gpus_per_node and by_gpu:
        return None, ""
    of_node = partition.default_memory_per_node_mib if partition else None
    of_cpu = partition.default_memory_per_cpu_mib if partition else None
    if of_node is None and of_cpu is None:
        of_node = memory_mib(cluster.settings.get("DefMemPerNode", ""))
        of_cpu = memory_mib(cluster.settings.get("DefMemPerCPU", ""))
    if of_node:
        return of_node, f"the job requests none, and DefMemPerNode of {job.site.name} is"
    if of_cpu:
        return of_cpu * cpus, f"the job requests none, and DefMemPerCPU x {counted(cpus, 'CPU')} is"
    return None, ""


def _cpus(about: About, request: Request, shapes: Sequence[NodeShape]) -> Iterator[Finding]:
    most = max(shape.cpus for shape in shapes)
    if request.cpus_per_node > most:
        ranks = request.ranks_per_node
        product = f"{counted(ranks, 'rank')} x {counted(request.cpus_per_node // ranks, 'CPU')} = " if ranks > 1 else ""
        yield about.refuse(
            "job.cpus_per_rank",
            f"{product}{counted(request.cpus_per_node, 'CPU')} per node, but the largest node has {most}",
            cpu_fix(request, most),
        )


def _whole_nodes(about: About, request: Request, cluster: Cluster, shapes: Sequence[NodeShape]) -> Iterator[Finding]:
    """Check --exclusive, which requests all CPUs of a node; a partition may allow fewer."""
    chosen = cluster.chosen(request)
    most = chosen[0].max_cpus_per_node if len(chosen) == 1 else None
    least = min(shape.cpus for shape in shapes)
    if request.whole_nodes and most is not None and most < least:
        what = f"--exclusive requests all {least} CPUs of a node, but partition {chosen[0].name} allows at most {most}"
        yield about.refuse("job.sbatch", what, "omit --exclusive, or choose another partition with -p")


def _default_memory(
    job: ResolvedJob, request: Request, cluster: Cluster, shapes: Sequence[NodeShape]
) -> Iterator[Finding]:
    """Refuse a default memory above MaxMemPerNode of the partition, because the job would wait forever."""
    about, cpus = About(job, "memory"), request.cpus_per_node
    if request.whole_nodes:  # the job gets all CPUs of a node, each with DefMemPerCPU
        cpus = max(cpus, min(shape.cpus for shape in shapes))
    asked_mib, whose = _memory(job, request, cluster, cpus)
    chosen = cluster.chosen(request)
    most_mib = chosen[0].max_memory_per_node_mib if len(chosen) == 1 else None
    if request.memory_mib is None and asked_mib is not None and most_mib is not None and asked_mib > most_mib:
        yield about.refuse(
            "job.mem_gb_per_node",
            f"{whose} {in_gib(asked_mib)} GiB per node, but partition {chosen[0].name} allows at most {in_gib(most_mib)}",
            f"mem_gb_per_node = {int(most_mib // 1024)}",
        )


def _memory_of_nodes(
    about: About, asked_mib: float | None, whose: str, shapes: Sequence[NodeShape]
) -> Iterator[Finding]:
    most = max(shape.memory_mib for shape in shapes)
    if asked_mib is not None and asked_mib > most:
        yield about.refuse(
            "job.mem_gb_per_node",
            f"{whose} {in_gib(asked_mib)} GiB per node, but the largest node has {in_gib(most)}",
            f"mem_gb_per_node = {most // 1024}",
        )


def _gpus(about: About, request: Request, shapes: Sequence[NodeShape]) -> Iterator[Finding]:
    if not request.gpus_per_node:
        return
    kinds = sorted({kind for shape in shapes for kind in shape.gpus if kind})
    if request.gpu_type and request.gpu_type not in kinds:
        has = f"they have {', '.join(kinds)}" if kinds else "their GPUs have no type"
        option = request.gpu_option or "job.sbatch"
        yield about.refuse(
            "gpu.request" if request.gpu_option else "job.sbatch",
            f"no node of the partition has GPUs of type {request.gpu_type}: {has}",
            f"use {' or '.join(kinds)} in {option}" if kinds else f"omit the type in {option}",
        )
        return
    most = max(_gpus_on(shape, request) for shape in shapes)
    if request.gpus_per_node > most:
        kind = f" of type {request.gpu_type}" if request.gpu_type else ""
        yield about.refuse(
            "job.gpus_per_node",
            f"{counted(request.gpus_per_node, 'GPU')}{kind} per node, but no node has more than {most}",
            f"gpus_per_node = {most}",
        )


def _features(about: About, request: Request, shapes: Sequence[NodeShape]) -> Iterator[Finding]:
    if request.features and not any(_has_features(shape, request) for shape in shapes):
        known = sorted({feature for shape in shapes for feature in shape.features})
        wanted = " or ".join(" with ".join(sorted(one)) for one in request.features)
        yield about.refuse(
            "job.constraint",
            f"no node of the partition has {wanted}: "
            + (f"they have {', '.join(known[:12])}" if known else "they have no features"),
            "correct -C; `sinfo -o '%N %f'` lists the features of each node",
        )


def _together(
    about: About, request: Request, asked_mib: float | None, shapes: Sequence[NodeShape]
) -> Iterator[Finding]:
    """Return findings if each resource exists, but too few nodes have all of them."""
    fitting = [shape for shape in shapes if _fits(shape, request, asked_mib)]
    have, usable = sum(one.nodes for one in fitting), sum(one.nodes for one in fitting if _is_usable(one, request))
    if have < request.min_nodes <= sum(shape.nodes for shape in shapes):
        yield about.refuse(
            "job.nodes",
            f"{counted(request.min_nodes, 'node')} with {_in_words(request, asked_mib)} each, but "
            f"{counted(have, 'such node')} {'exists' if have == 1 else 'exist'}",
            f"nodes = {have}, or request less on each" if have else "request less on each",
        )
    elif usable < request.min_nodes <= have:
        yield about.warn(
            "job.nodes",
            f"{counted(request.min_nodes, 'node')}, but {have - usable} of the {have} suitable ones are down, drained or reserved: "
            "the job would wait for one",
            f"nodes = {usable}" if usable else "wait, or choose another partition with -p",
        )


def _is_usable(shape: NodeShape, request: Request) -> bool:
    return shape.is_usable and (not shape.is_reserved or bool(request.reservation))


def _fits(shape: NodeShape, request: Request, asked_mib: float | None) -> bool:
    return (
        shape.cpus >= request.cpus_per_node
        and shape.memory_mib >= (asked_mib or 0)
        and _gpus_on(shape, request) >= request.gpus_per_node
        and _has_features(shape, request)
    )


def _gpus_on(shape: NodeShape, request: Request) -> int:
    return shape.gpus.get(request.gpu_type, 0) if request.gpu_type else sum(shape.gpus.values())


def _has_features(shape: NodeShape, request: Request) -> bool:
    return not request.features or any(alternative <= shape.features for alternative in request.features)


def _in_words(request: Request, asked_mib: float | None) -> str:
    parts = [counted(request.cpus_per_node, "CPU")]
    parts += [f"{in_gib(asked_mib)} GiB"] if asked_mib else []
    if request.gpus_per_node:
        parts.append(counted(request.gpus_per_node, f"{request.gpu_type} GPU".strip()))
    parts += [" or ".join(" with ".join(sorted(one)) for one in request.features)] if request.features else []
    return ", ".join(parts)
