"""The adapters in a file that `toolkit topo show --json` wrote, on this node or another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.topology.fabric.node import AdapterPort


def read_facts_file(path: Path) -> tuple[AdapterPort, ...]:
    """The ports of the adapters.

    Raises:
        ToolkitError: the file cannot be read, is no such file, or says that the adapters are unknown.
    """
    fix = "give what `toolkit topo show --json` printed on a compute node"
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ToolkitError(f"cannot be read: {error.strerror}", where=str(path), fix=fix) from error
    except ValueError as error:
        raise ToolkitError("is no JSON", where=str(path), fix=fix) from error
    adapters = facts.get("adapters") if isinstance(facts, dict) else None
    if not isinstance(adapters, dict) or "value" not in adapters:
        raise ToolkitError("has no fact `adapters`", where=str(path), fix=fix)
    if adapters["value"] is None:
        missing = str(adapters.get("missing", ""))[:200]
        raise ToolkitError(f"the adapters are unknown there: {missing}", where=str(path), fix=fix)
    try:
        return tuple(_port(adapter, port) for adapter in adapters["value"] for port in adapter["ports"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ToolkitError(f"an adapter is not as it should be: {error!r}", where=str(path), fix=fix) from error


def _port(adapter: dict[str, Any], port: dict[str, Any]) -> AdapterPort:
    state, rate = port["state"], port["rate_gb_per_s"]
    return AdapterPort(
        adapter=str(adapter["name"]),
        port=int(port["number"]),
        active=None if state is None else state == "Active" and port["physical_state"] == "LinkUp",
        rate_gb_per_s=None if rate is None else float(rate),
        link_layer=port["link_layer"],
    )
