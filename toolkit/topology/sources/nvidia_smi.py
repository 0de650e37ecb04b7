"""Links between devices, and the NUMA node of each GPU, from `nvidia-smi topo -m`: used if NVML and /sys have none."""

from __future__ import annotations

import re

from toolkit.topology.claims import Answer
from toolkit.topology.readers.nvidia_smi_topo import LinkMatrix, parse_nvidia_smi_topo
from toolkit.topology.sources.commands import COMMAND_TIMEOUT_S, read_text, run_command
from toolkit.world.cpu_lists import cpu_list, read_cpu_list

SMI_COMMAND = ("nvidia-smi", "topo", "-m")
SOURCE = " ".join(SMI_COMMAND)
TELLS = (("gpu_count",), ("GPU", None, "numa_node"), ("GPU", None, "cpus"), ("link",), ("nics",))


def ask_nvidia_smi(timeout_s: float = COMMAND_TIMEOUT_S) -> Answer:
    """Run `nvidia-smi topo -m` and claim what it prints."""
    result = run_command(SMI_COMMAND, timeout_s)
    if result.output is not None:
        return answer_of_matrix(result.output)
    answer = Answer(SOURCE, "printed", covers=TELLS)
    answer.miss(result.missing)
    return answer


def answer_of_matrix(text: str, source: str = SOURCE) -> Answer:
    """What a printed matrix claims."""
    answer = Answer(source, "printed", covers=TELLS)
    matrix = read_text(text, parse_nvidia_smi_topo, answer)
    if matrix is None:
        return answer
    if not matrix.gpus:
        answer.miss(f"{source}: the output names no GPU")
        return answer
    answer.say(len(matrix.gpus), "gpu_count")
    _say_gpus(matrix, answer)
    _say_links(matrix, answer)
    return answer


def _say_gpus(matrix: LinkMatrix, answer: Answer) -> None:
    for gpu, cpus, node in zip(matrix.gpus, matrix.cpu_affinity, matrix.numa_affinity, strict=True):
        number = int(gpu.removeprefix("GPU"))
        answer.claims["GPU", number] = True
        # The driver prints those of the job's cpuset, which is no contradiction to all that are near.
        listed = read_cpu_list(cpus) if cpus else None
        answer.say(cpu_list(listed) if listed else None, "GPU", number, "cpus", derived=True)
        if node is None or not re.fullmatch("[0-9]+", node):
            said = "prints no NUMA node" if node is None else f"prints NUMA node {node}"
            answer.miss(f"{answer.source}: {said}", "GPU", number, "numa_node")
        else:
            answer.say(int(node), "GPU", number, "numa_node")


def _say_links(matrix: LinkMatrix, answer: Answer) -> None:
    names = [device or nic for nic, device in zip(matrix.nics, matrix.nic_devices, strict=True)]
    # It lists not every kind of NIC: these are all that are known where nobody else lists them.
    answer.say(True, "nics", derived=True)
    for name in names:
        answer.say(True, "nic", name, derived=True)
    for row, gpu in enumerate(matrix.gpus):
        cells = [(other, matrix.gpu_links[row][column] or matrix.gpu_links[column][row])
                 for column, other in enumerate(matrix.gpus) if column > row]  # fmt: skip
        for other, link in [*cells, *zip(names, matrix.nic_links[row], strict=True)]:
            if link is None:
                answer.miss(f"{answer.source}: the cell of {gpu} and {other} is damaged", "link", gpu, other)
            answer.say("SYS" if link == "SOC" else link, "link", gpu, other)  # SOC is what older drivers call SYS
