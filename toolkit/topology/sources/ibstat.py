"""NICs and their ports, from `ibstat`."""

from __future__ import annotations

from toolkit.topology.claims import Answer
from toolkit.topology.readers.ibstat import Adapter, parse_ibstat
from toolkit.topology.sources.commands import COMMAND_TIMEOUT_S, read_text, run_command

COMMAND = ("ibstat",)
TELLS = (("nics",), ("nic", None, "port"))
NOT_ACTIVE = "the port is not active, so that its rate is no measurement"


def ask_ibstat(timeout_s: float = COMMAND_TIMEOUT_S) -> Answer:
    """Run `ibstat` and claim what it prints; it prints nothing where there is no adapter."""
    answer = Answer("ibstat", "printed", tells=TELLS)
    result = run_command(COMMAND, timeout_s)
    if result.output is None:
        answer.miss(result.missing)
        return answer
    adapters: tuple[Adapter, ...] | None = ()
    if result.output.strip():
        adapters = read_text(result.output, parse_ibstat, answer)
    if adapters is not None:
        answer.say(True, "nics")
    for adapter in adapters or ():
        answer.claims["nic", adapter.name] = True
        for port in adapter.ports:
            about = ("nic", adapter.name, "port", port.number)
            answer.say(port.state, *about, "state")
            answer.say("InfiniBand" if port.link_layer == "IB" else port.link_layer, *about, "link_layer")
            if port.active:
                answer.say(port.rate_gb_per_s, *about, "rate")
            else:
                answer.miss(NOT_ACTIVE, *about, "rate")
    return answer
