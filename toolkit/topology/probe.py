"""Ask this node what it is. Commands run under a time limit: a broken driver must not stop a job."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from toolkit.errors import ToolkitError
from toolkit.topology.facts import Fact, NodeFacts
from toolkit.topology.parsers.ibstat import Adapter, parse_ibstat
from toolkit.topology.parsers.nvidia_smi_topo import LinkMatrix, parse_nvidia_smi_topo
from toolkit.topology.parsers.topology_address import SwitchPath, parse_slurm_topology

COMMAND_TIMEOUT_S = 5.0
GPU_COMMAND = ("nvidia-smi", "topo", "-m")
ADAPTER_COMMAND = ("ibstat",)
ADDRESS_VARIABLE = "SLURM_TOPOLOGY_ADDR"
PATTERN_VARIABLE = "SLURM_TOPOLOGY_ADDR_PATTERN"


@dataclass(frozen=True)
class CommandResult:
    """What a command printed, or why there is nothing."""

    output: str | None
    missing: str = ""


def run_command(arguments: tuple[str, ...], timeout_s: float = COMMAND_TIMEOUT_S) -> CommandResult:
    """Run a command and return its output; never raises for what the command does, never waits longer."""
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
        # A process that hangs inside the driver does not die even now, so nobody waits for it.
        if process.stdout:
            process.stdout.close()
        return CommandResult(None, f"{' '.join(arguments)} gave no answer in {timeout_s:g} s and was killed")
    if process.returncode != 0:
        last = (output.strip().splitlines() or ["no output"])[-1]
        return CommandResult(None, f"{' '.join(arguments)} ended with {process.returncode}: {last[:200]}")
    return CommandResult(output)


def probe_node(
    host: Fact[str], environ: Mapping[str, str] | None = None, timeout_s: float = COMMAND_TIMEOUT_S
) -> NodeFacts:
    """Collect the facts of this node; `timeout_s` bounds each command. Only the caller knows who named `host`."""
    switches, switch_warnings = _probe_switches(os.environ if environ is None else environ)
    gpu_links, gpu_warnings = _probe_gpus(timeout_s)
    adapters, adapter_warnings = _probe_adapters(timeout_s)
    return NodeFacts(
        host=host,
        switches=switches,
        gpu_links=gpu_links,
        adapters=adapters,
        warnings=switch_warnings + gpu_warnings + adapter_warnings,
    )


def _named(source: str, warnings: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{source}: {warning}" for warning in warnings)


def _probe_switches(environ: Mapping[str, str]) -> tuple[Fact[SwitchPath], tuple[str, ...]]:
    address, pattern = environ.get(ADDRESS_VARIABLE), environ.get(PATTERN_VARIABLE)
    if not address or not pattern:
        name = ADDRESS_VARIABLE if not address else PATTERN_VARIABLE
        return Fact(None, ADDRESS_VARIABLE, f"{name} is not set"), ()
    path, warnings = parse_slurm_topology(address, pattern)
    missing = "" if path else warnings[0]
    return Fact(path, ADDRESS_VARIABLE, missing), _named(ADDRESS_VARIABLE, warnings)


def _probe_gpus(timeout_s: float) -> tuple[Fact[LinkMatrix], tuple[str, ...]]:
    source = " ".join(GPU_COMMAND)
    result = run_command(GPU_COMMAND, timeout_s)
    if result.output is None:
        return Fact(None, source, result.missing), ()
    try:
        matrix, warnings = parse_nvidia_smi_topo(result.output)
    except ToolkitError as error:
        return Fact(None, source, error.message), ()
    if not matrix.gpus:
        return Fact(None, source, "the output names no GPU"), _named(source, warnings)
    return Fact(matrix, source), _named(source, warnings)


def _probe_adapters(timeout_s: float) -> tuple[Fact[tuple[Adapter, ...]], tuple[str, ...]]:
    source = " ".join(ADAPTER_COMMAND)
    result = run_command(ADAPTER_COMMAND, timeout_s)
    if result.output is None:
        return Fact(None, source, result.missing), ()
    if not result.output.strip():
        return Fact((), source), ()  # ibstat prints nothing where there is no adapter
    try:
        adapters, warnings = parse_ibstat(result.output)
    except ToolkitError as error:
        return Fact(None, source, error.message), ()
    return Fact(adapters, source), _named(source, warnings)
