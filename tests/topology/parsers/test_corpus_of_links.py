"""Real outputs, where the collection is at hand; our own fixtures cover the same formats elsewhere."""

import json
from pathlib import Path

import pytest

from toolkit.topology.parsers.ibstat import parse_ibstat

CORPUS = Path(__file__).parents[4] / "shared" / "corpus"


def samples(kind):
    return [pytest.param(path, id=f"{kind}-{path.stem}") for path in sorted((CORPUS / kind).glob("*.json"))]


def read(sidecar):
    record = json.loads(sidecar.read_text())
    return (sidecar.parent / record["file"]).read_text(), record


@pytest.mark.parametrize("sidecar", samples("ibstat"))
def test_ibstat_finds_what_the_sidecar_says(sidecar):
    text, record = read(sidecar)
    adapters, _ = parse_ibstat(text)
    ports = [(f"{adapter.name}:{port.number}", port) for adapter in adapters for port in adapter.ports]
    found = {
        "ca_count": len(adapters),
        "ca_names_in_order": [adapter.name for adapter in adapters],
        "port_count": len(ports),
        "active_ports": sum(port.active for _, port in ports),
        "active_infiniband": [name for name, port in ports if port.active and port.link_layer == "InfiniBand"],
        "active_ethernet": [name for name, port in ports if port.active and port.link_layer == "Ethernet"],
        "not_active": [f"{n} {port.state}/{port.physical_state}" for n, port in ports if not port.active],
        "cas": [
            {
                "name": adapter.name,
                "ca_type": adapter.type,
                "nports": adapter.port_count,
                **({"fw": adapter.firmware} if adapter.firmware else {}),
                "ports": [
                    {
                        "port": port.number,
                        "state": port.state,
                        "phys": port.physical_state,
                        "rate": port.rate_gb_per_s,
                        "base_lid": port.base_lid,
                        "sm_lid": port.subnet_manager_lid,
                        "link_layer": port.link_layer,
                    }
                    for port in adapter.ports
                ],
            }
            for adapter in adapters
        ],
    }
    assert found == {key: record["truth"][key] for key in found}
