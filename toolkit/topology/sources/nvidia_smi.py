"""Claim device links and the NUMA node of each GPU from `nvidia-smi topo -m`, if NVML and /sys have none."""

from __future__ import annotations

import re

from toolkit.topology.claims import Answer
from toolkit.topology.readers.nvidia_smi_topo import LinkMatrix, parse_nvidia_smi_topo
from toolkit.topology.sources.commands import COMMAND_TIMEOUT_S, read_text, run_command
from toolkit.world.cpu_lists import cpu_list, read_cpu_list

__all__ = ["answer_of_matrix", "ask_nvidia_smi"]

SMI_COMMAND = ("nvidia-smi", "topo", "-m")
SOURCE = " ".join(SMI_COMMAND)
COVERS = (("gpu_count",), ("GPU", None, "numa_node"), ("GPU", None, "cpus"), ("link",), ("nics",))


def ask_nvidia_smi(timeout_s: float = COMMAND_TIMEOUT_S) -> Answer:
    """The claims in the output of `nvidia-smi topo -m`."""
    result = run_command(SMI_COMMAND, timeout_s)
    if result.output is not None:
        return answer_of_matrix(result.output)
    answer = Answer(SOURCE, "printed", COVERS)
    answer.miss(result.missing)
    return answer


def answer_of_matrix(text: str, source: str = SOURCE) -> Answer:
    """The claims in a printed matrix."""
    answer = Answer(source, "printed", COVERS)
    matrix = read_text(text, parse_nvidia_smi_topo, answer)
    if matrix is None:
        return answer
    if not matrix.gpus:
        answer.miss(f"{source}: the output contains no GPU")
        return answer
    answer.say(len(matrix.gpus), "gpu_count")
    _claim_gpus(matrix, answer)
    _claim_links(matrix, answer)
    return answer


def _claim_gpus(matrix: LinkMatrix, answer: Answer) -> None:
    for gpu, cpus, node in zip(matrix.gpus, matrix.cpu_affinity, matrix.numa_affinity, strict=True):
        number = int(gpu.removeprefix("GPU"))
        answer.claims["GPU", number] = True
        # The driver prints only CPUs of the job's cpuset. This must not contradict a source that lists all near CPUs,
        # so the claim is a derived one.
        near = read_cpu_list(cpus) if cpus else None
        answer.say(cpu_list(near) if near else None, "GPU", number, "cpus", derived=True)
        if node is None or not re.fullmatch("[0-9]+", node):
            printed = "prints no NUMA node" if node is None else f"prints NUMA node {node}"
            answer.miss(f"{answer.source}: {printed}", "GPU", number, "numa_node")
        else:
            answer.say(int(node), "GPU", number, "numa_node")


def _claim_links(matrix: LinkMatrix, answer: Answer) -> None:
    names = [device or nic for nic, device in zip(matrix.nics, matrix.nic_devices, strict=True)]
    # The matrix omits some kinds of NIC, so its list counts only if no other source has one.
    answer.say(True, "nics", derived=True)
    for name in names:
        answer.say(True, "nic", name, derived=True)
    for row, gpu in enumerate(matrix.gpus):
        cells = [(other, matrix.gpu_links[row][column] or matrix.gpu_links[column][row])
                 for column, other in enumerate(matrix.gpus) if column > row]  # fmt: skip
        for other, link in [*cells, *zip(names, matrix.nic_links[row], strict=True)]:
            if link is None:
                answer.miss(f"{answer.source}: the cell of {gpu} and {other} is damaged", "link", gpu, other)
            answer.say("SYS" if link == "SOC" else link, "link", gpu, other)  # older drivers print SOC for SYS
