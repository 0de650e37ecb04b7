"""Claim NICs and their ports from `ibstat`, if /sys lists no adapter."""

from __future__ import annotations

from toolkit.topology.claims import Answer
from toolkit.topology.readers.ibstat import Adapter, parse_ibstat
from toolkit.topology.sources.commands import COMMAND_TIMEOUT_S, ask_command

__all__ = ["NOT_ACTIVE", "ask_ibstat"]

NOT_ACTIVE = "the port is not active, so its rate is unknown"


def ask_ibstat(timeout_s: float = COMMAND_TIMEOUT_S) -> Answer:
    """The claims in the output of `ibstat`; empty output means that there is no adapter."""
    answer, adapters = ask_command(("ibstat",), _parse, (("nics",), ("nic", None, "port")), timeout_s)
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


def _parse(text: str) -> tuple[tuple[Adapter, ...], tuple[str, ...]]:
    return parse_ibstat(text) if text.strip() else ((), ())
