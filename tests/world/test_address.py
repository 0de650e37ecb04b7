"""The interface that the other nodes reach."""

import pytest

from toolkit.errors import ToolkitError
from toolkit.world import address
from toolkit.world.address import choose_interface, interface_addresses


@pytest.fixture
def interfaces(monkeypatch):
    """A host with these interfaces, whose own name leads to `own`. No machine here has a fabric of its own."""

    def set_up(found, own=""):
        monkeypatch.setattr(address, "interface_addresses", lambda: found)
        monkeypatch.setattr(address, "_own_name_address", lambda: own)

    return set_up


CLUSTER = {"lo": "127.0.0.1", "docker0": "172.17.0.1", "eth0": "10.0.0.5", "ib0": "10.1.0.5"}


def test_this_machines_loopback_is_found():
    assert interface_addresses()["lo"] == "127.0.0.1"
    assert choose_interface("", single_node=True) == ("lo", "127.0.0.1")


@pytest.mark.parametrize(
    ("wanted", "own", "chosen"),
    [
        ("ib0", "10.0.0.5", ("ib0", "10.1.0.5")),  # the site's word wins
        ("", "10.1.0.5", ("ib0", "10.1.0.5")),  # then the host's own name
        ("", "127.0.1.1", ("eth0", "10.0.0.5")),  # Debian's name for itself reaches nobody
        ("", "", ("eth0", "10.0.0.5")),  # never a container's bridge
    ],
)
def test_several_nodes_meet_where_they_reach_each_other(interfaces, wanted, own, chosen):
    interfaces(CLUSTER, own)
    assert choose_interface(wanted, single_node=False) == chosen


def test_an_interface_that_is_not_here_is_named_with_those_that_are(interfaces):
    interfaces(CLUSTER)
    with pytest.raises(ToolkitError, match="has no interface 'ib7' with an IPv4 address") as error:
        choose_interface("ib7", single_node=False)
    assert error.value.where == "network.interface"
    assert "eth0, ib0" in error.value.fix


def test_a_host_that_reaches_nobody_is_refused(interfaces):
    interfaces({"lo": "127.0.0.1", "docker0": "172.17.0.1"})
    with pytest.raises(ToolkitError, match="reaches other nodes"):
        choose_interface("", single_node=False)
