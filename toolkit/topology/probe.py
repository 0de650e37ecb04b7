"""Collect the facts of this node from NVML and /sys, and run commands only for facts that both of these lack."""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations, product
from pathlib import Path
from typing import Any

from toolkit.topology.claims import About, Answer, Claims
from toolkit.topology.facts import Fact, Gpu, Hardware, LinkFact, Nic, NicPort, NodeFacts, NumaNode, unknown
from toolkit.topology.names import by_numbers
from toolkit.topology.readers.topology_address import parse_slurm_topology
from toolkit.topology.sources.commands import COMMAND_TIMEOUT_S, ask_lscpu, ask_nvidia_smi
from toolkit.topology.sources.kernel_files import SYSTEM_ROOT
from toolkit.topology.sources.nvml import ask_nvml
from toolkit.topology.sources.system_files import ask_system_files, count_gpus

__all__ = ["ask_slurm", "probe_node", "settle", "unknown_hardware"]

ADDRESS_VARIABLE = "SLURM_TOPOLOGY_ADDR"
PATTERN_VARIABLE = "SLURM_TOPOLOGY_ADDR_PATTERN"


def ask_slurm(environ: Mapping[str, str]) -> Answer:
    """Claim the switches in SLURM_TOPOLOGY_ADDR."""
    answer = Answer(ADDRESS_VARIABLE, "direct", covers=(("switches",),))
    address, pattern = environ.get(ADDRESS_VARIABLE), environ.get(PATTERN_VARIABLE)
    if not address or not pattern:
        answer.miss(f"{ADDRESS_VARIABLE if not address else PATTERN_VARIABLE} is not set")
        return answer
    path, warnings = parse_slurm_topology(address, pattern)
    answer.say(path, "switches")
    if path is None:
        answer.miss(warnings[0])
    answer.warnings += [f"{ADDRESS_VARIABLE}: {warning}" for warning in warnings]
    return answer


def probe_node(
    host: Fact[str],
    environ: Mapping[str, str] | None = None,
    timeout_s: float = COMMAND_TIMEOUT_S,
    *,
    nvml: Any = None,
    system_root: Path = SYSTEM_ROOT,
) -> NodeFacts:
    """Return the facts of this node. The caller passes `host`, since only the caller knows the source of the name.

    Args:
        timeout_s: the time limit for NVML, and after that for the commands, which run in parallel.
        nvml: the module of nvidia-ml-py; imported if None.
        system_root: the folder to read instead of /sys.
    """
    gpus = ask_nvml(nvml, timeout_s)
    buses = {
        int(str(about[1])): bus for about, bus in gpus.claims.items() if about[0] == "GPU" and about[2:] == ("bus",)
    }
    files = ask_system_files(buses, system_root)
    commands = _commands_for_missing(Claims([gpus, files]))
    with ThreadPoolExecutor(max_workers=4) as pool:
        running = [pool.submit(command, timeout_s) for command in commands]
        answers = [gpus, files, *(future.result() for future in running)]
    answers.append(ask_slurm(os.environ if environ is None else environ))
    if () in gpus.reasons and (present := count_gpus(system_root)):
        gpus.miss(f"{gpus.reasons[()]}; /sys lists {present} NVIDIA display devices")
    return settle(host, answers)


def _commands_for_missing(claims: Claims) -> list[Callable[[float], Answer]]:
    """Return the commands that can report facts missing from the claims of NVML and /sys.

    These do not include `numactl -H` and `ibstat`, which read the same files of /sys.
    """
    count = claims.fact("gpu_count").value
    gpus = [f"GPU{index}" for index in range(int(count or 0))]
    pairs = [*combinations(gpus, 2), *product(gpus, claims.below("nic"))]
    is_needed: dict[Callable[[float], Answer], bool] = {
        ask_nvidia_smi: count is None or any(claims.fact("link", *pair).value is None for pair in pairs),
        ask_lscpu: not claims.below("numa") or claims.fact("sockets").value is None,
    }
    return [command for command, needed in is_needed.items() if needed]


def settle(host: Fact[str], answers: list[Answer]) -> NodeFacts:
    """Return the facts of a node from the claims of all sources."""
    claims = Claims(answers)
    gpus = sorted(claims.below("GPU"))
    nics = claims.fact("nics")
    names = sorted(claims.below("nic", firm=True) or claims.below("nic"), key=by_numbers)
    hardware = Hardware(
        sockets=claims.fact("sockets"),
        cpus=claims.fact("cpus"),
        numa_nodes=_numa_nodes(claims),
        gpu_count=claims.fact("gpu_count"),
        gpus=tuple(_gpu(claims, index) for index in gpus),
        nics=Fact(tuple(_nic(claims, name) for name in names), nics.source, nics.confidence) if nics.value else nics,
        links=_links(claims, gpus, names),
    )
    return NodeFacts(
        host=host,
        switches=claims.fact("switches"),
        hardware=hardware,
        gpu_uuids=tuple(claims.fact("GPU", index, "uuid") for index in gpus),
        gpu_fabrics=tuple(claims.fact("GPU", index, "fabric") for index in gpus),
        nic_guids=tuple(claims.fact("nic", name, "guid") for name in names),
        warnings=tuple(warning for answer in answers for warning in answer.warnings),
    )


def _numa_nodes(claims: Claims) -> Fact[tuple[NumaNode, ...]]:
    numbers = sorted(claims.below("numa"))
    first: Fact[Any] = claims.fact("numa", numbers[0]) if numbers else claims.fact("numa_nodes")
    if not numbers:
        return first
    nodes = (NumaNode(number, *claims.facts(("numa", number), "socket", "cpus", "memory_mib")) for number in numbers)
    return Fact(tuple(nodes), first.source, first.confidence)


def _gpu(claims: Claims, index: int) -> Gpu:
    names = ("name", "bus", "numa_node", "cpus", "memory_bytes", "mig")
    return Gpu(index, *claims.facts(("GPU", index), *names))


def _nic(claims: Claims, name: str) -> Nic:
    about: About = ("nic", name)
    ports = (
        NicPort(number, *claims.facts((*about, "port", number), "state", "rate", "link_layer"))
        for number in sorted(claims.below(*about, "port"))
    )
    net_device, bus, numa_node = claims.facts(about, "net_device", "bus", "numa_node")
    return Nic(name, net_device, bus, numa_node, tuple(ports))


def _links(claims: Claims, gpus: list[int], nics: list[str]) -> tuple[LinkFact, ...]:
    """Return each kind of link between GPUs, or between GPUs and NICs, with the pairs that it connects."""
    labels = [f"GPU{index}" for index in gpus]
    linked = [other for gpu in labels for other in claims.below("link", gpu) if other not in labels]
    pairs_of: dict[Fact[str], list[tuple[str, str]]] = {}
    for number, gpu in enumerate(labels):
        for other in (*labels[number + 1 :], *sorted({*nics, *linked}, key=by_numbers)):
            pairs_of.setdefault(claims.fact("link", gpu, other), []).append((gpu, other))
    return tuple(LinkFact(link, tuple(pairs)) for link, pairs in pairs_of.items())


def unknown_hardware(source: str, reason: str) -> Hardware:
    """Return the hardware of a node whose facts are all unknown for the same reason."""
    fact = unknown(source, reason)
    return Hardware(fact, fact, fact, fact, (), fact, ())
