"""Claim facts from `lscpu` and `nvidia-smi topo -m`, in case NVML and /sys do not report them.

Each command has a time limit, so that a broken driver does not block a job.
"""

import os
import re
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from toolkit.errors import ToolkitError
from toolkit.topology.claims import Answer
from toolkit.topology.readers.lscpu import parse_lscpu
from toolkit.topology.readers.nvidia_smi_topo import LinkMatrix, parse_nvidia_smi_topo
from toolkit.world.cpu_lists import cpu_list, read_cpu_list

__all__ = ["COMMAND_TIMEOUT_S", "answer_of_matrix", "ask_lscpu", "ask_nvidia_smi", "run_command"]

COMMAND_TIMEOUT_S = 5.0
_SMI_COMMAND = ("nvidia-smi", "topo", "-m")
_SMI_SOURCE = " ".join(_SMI_COMMAND)
_SMI_COVERS = (("gpu_count",), ("GPU", None, "numa_node"), ("GPU", None, "cpus"), ("link",), ("nics",))
T = TypeVar("T")


@dataclass(frozen=True)
class CommandResult:
    """The output of a command, or the reason why it is missing."""

    output: str | None
    missing: str = ""

    def read(self, parse: Callable[[str], tuple[T, tuple[str, ...]]], answer: Answer) -> T | None:
        """Return the parsed output, or None if it is missing or invalid; add the reason or warnings to `answer`."""
        if self.output is None:
            answer.miss(self.missing)
            return None
        try:
            facts, warnings = parse(self.output)
        except ToolkitError as error:
            answer.miss(f"{answer.source}: {error.message}")
            return None
        answer.warnings += [f"{answer.source}: {warning}" for warning in warnings]
        return facts


def run_command(arguments: tuple[str, ...], timeout_s: float = COMMAND_TIMEOUT_S) -> CommandResult:
    """Run a command and return its output, or the reason if it fails; no exception is raised."""
    try:
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "LC_ALL": "C"},
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return CommandResult(None, f"{arguments[0]}: {error.strerror or error}")
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        # A process that hangs inside the driver does not react to SIGKILL, so do not wait for it.
        if process.stdout:
            process.stdout.close()
        return CommandResult(None, f"{' '.join(arguments)} did not finish within {timeout_s:g} s and was killed")
    if process.returncode != 0:
        last = (output.strip().splitlines() or ["no output"])[-1]
        return CommandResult(None, f"{' '.join(arguments)} exited with {process.returncode}: {last[:200]}")
    return CommandResult(output)


def ask_lscpu(timeout_s: float = COMMAND_TIMEOUT_S) -> Answer:
    """Return the claims in the output of `lscpu`."""
    answer = Answer("lscpu", "printed", (("sockets",), ("numa_nodes",), ("numa", None, "cpus")))
    facts = run_command(("lscpu",), timeout_s).read(parse_lscpu, answer)
    if facts is not None:
        answer.say(facts.sockets, "sockets")
        for node, cpus in (facts.node_cpus or {}).items():
            answer.say(True, "numa", node)
            answer.say(None if cpus is None else cpu_list(cpus), "numa", node, "cpus")
    return answer


def ask_nvidia_smi(timeout_s: float = COMMAND_TIMEOUT_S) -> Answer:
    """Return the claims in the output of `nvidia-smi topo -m`."""
    return _answer(run_command(_SMI_COMMAND, timeout_s), _SMI_SOURCE)


def answer_of_matrix(text: str, source: str = _SMI_SOURCE) -> Answer:
    """Return the claims in a matrix that `nvidia-smi topo -m` printed."""
    return _answer(CommandResult(text), source)


def _answer(printed: CommandResult, source: str) -> Answer:
    answer = Answer(source, "printed", _SMI_COVERS)
    matrix = printed.read(parse_nvidia_smi_topo, answer)
    if matrix is not None and not matrix.gpus:
        answer.miss(f"{source}: no GPUs in the output")
    elif matrix is not None:
        answer.say(len(matrix.gpus), "gpu_count")
        _claim_gpus(matrix, answer)
        _claim_links(matrix, answer)
    return answer


def _claim_gpus(matrix: LinkMatrix, answer: Answer) -> None:
    for gpu, cpus, node in zip(matrix.gpus, matrix.cpu_affinity, matrix.numa_affinity, strict=True):
        number = int(gpu.removeprefix("GPU"))
        answer.claims["GPU", number] = True
        # The driver prints only CPUs in the cpuset of the job. The claim is marked as derived, so that it does not
        # contradict a source that lists all near CPUs.
        near = read_cpu_list(cpus) if cpus else None
        answer.say(cpu_list(near) if near else None, "GPU", number, "cpus", derived=True)
        if node is None or not re.fullmatch("[0-9]+", node):
            printed = "prints no NUMA node" if node is None else f"prints NUMA node {node}"
            answer.miss(f"{answer.source}: {printed}", "GPU", number, "numa_node")
        else:
            answer.say(int(node), "GPU", number, "numa_node")


def _claim_links(matrix: LinkMatrix, answer: Answer) -> None:
    names = [device or nic for nic, device in zip(matrix.nics, matrix.nic_devices, strict=True)]
    # The matrix omits some kinds of NIC, so its list is used only if no other source has a list.
    answer.say(True, "nics", derived=True)
    for name in names:
        answer.say(True, "nic", name, derived=True)
    for row, gpu in enumerate(matrix.gpus):
        others = zip(
            (*matrix.gpus[row + 1 :], *names), (*matrix.gpu_links[row][row + 1 :], *matrix.nic_links[row]), strict=True
        )
        for other, link in others:
            if link is None:
                answer.miss(f"{answer.source}: the link of {gpu} and {other} is unknown", "link", gpu, other)
            answer.say("SYS" if link == "SOC" else link, "link", gpu, other)  # older drivers print SOC for SYS
