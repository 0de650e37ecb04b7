"""ibnetdiscover of a small fabric, its lists, and what one line tells of another that is damaged."""

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.errors import CheckFailedError
from toolkit.topology.parsers.ibnetdiscover import answer_ibnetdiscover, parse_ibnetdiscover

SWITCHES = {"aaaa000000000001": ("leaf1", 11), "aaaa000000000002": ("leaf2", 12)}
HOSTS = {"bbbb000000000001": ("n1 mlx5_0", 21, 0), "bbbb000000000002": ("n2 mlx5_0", 22, 1)}  # and the switch of each


def switch(place):
    guid, (name, lid) = list(SWITCHES.items())[place]
    peer, (peer_name, peer_lid) = list(SWITCHES.items())[1 - place]
    (host, (host_name, host_lid, _)) = list(HOSTS.items())[place]
    return (
        f"vendid=0x2c9\ndevid=0xd2f2\nsysimgguid=0x{guid}\nswitchguid=0x{guid}({guid})\n"
        f'Switch\t64 "S-{guid}"\t\t# "MF0;{name}:MQM9700/U1" enhanced port 0 lid {lid} lmc 0\n'
        f'[1]\t"H-{host}"[1]({host}) \t\t# "{host_name}" lid {host_lid} 4xNDR\n'
        f'[33]\t"S-{peer}"[33]\t\t# "MF0;{peer_name}:MQM9700/U1" lid {peer_lid} 4xNDR\n\n'
    )


def host(place):
    guid, (name, lid, at) = list(HOSTS.items())[place]
    leaf, (leaf_name, leaf_lid) = list(SWITCHES.items())[at]
    return (
        f"vendid=0x2c9\ndevid=0x1021\nsysimgguid=0x{guid}\ncaguid=0x{guid}\n"
        f'Ca\t1 "H-{guid}"\t\t# "{name}"\n'
        f'[1]({guid}) \t"S-{leaf}"[1]\t\t# lid {lid} lmc 0 "MF0;{leaf_name}:MQM9700/U1" lid {leaf_lid} 4xNDR\n\n'
    )


HEADING = (
    "#\n# Topology file: generated on Fri Mar  1 10:00:00 2024\n#\n"
    "# Initiated from node bbbb000000000001 port bbbb000000000001\n\n"
)
TEXT = HEADING + switch(0) + switch(1) + host(0) + host(1)


def test_nodes_and_links():
    nodes, warnings = parse_ibnetdiscover(TEXT)
    assert not warnings
    assert [(node.kind, node.port_count, node.lid) for node in nodes] == [
        ("Switch", 64, 11), ("Switch", 64, 12), ("Ca", 1, None), ("Ca", 1, None),
    ]  # fmt: skip
    first = nodes[0]
    assert (first.guid, first.description) == (0xAAAA000000000001, "MF0;leaf1:MQM9700/U1")
    assert [(link.port, link.remote_port, link.remote_lid, link.width_and_speed) for link in first.links] == [
        (1, 1, 21, "4xNDR"), (33, 33, 12, "4xNDR"),
    ]  # fmt: skip
    assert answer_ibnetdiscover(TEXT)[0] == {"switch_lines": 2, "ca_lines": 2}


def test_full_information_groups_and_a_prefix_read_the_same():
    full = TEXT.replace("4xNDR", "4xNDR s=4 w=2 v=5").replace("#\n# Topology", "\n#\n# Topology")
    grouped = TEXT.replace("vendid", "\nChassis 1 (guid 0xaaaa)\n\n# Spine Nodes\nvendid", 1).replace(
        "[33]", "[33][ext 9]"
    )
    for other in (full, grouped, re.sub("(?m)^(?=.)", "adm1: ", TEXT), TEXT.replace("\n", "\r\n")):
        assert parse_ibnetdiscover(other) == parse_ibnetdiscover(TEXT)


def test_lists_of_nodes():
    text = (
        'Ca\t : 0xbbbb000000000001 ports 1 devid 0x1021 vendid 0x2c9 "n1 mlx5_0"\n'
        'Switch\t : 0xaaaa000000000001 ports 64 devid 0xd2f2 vendid 0x2c9 "leaf1" enhanced port 0 lid 11 lmc 0\n'
        'Router\t : 0xcccc000000000001 ports 2 devid 0x1 vendid 0x2c9 "r1"\n'
    )
    nodes, warnings = parse_ibnetdiscover(text)
    assert [(node.kind, node.port_count, node.lid) for node in nodes] == [
        ("Ca", 1, None),
        ("Switch", 64, 11),
        ("Rt", 2, None),
    ]
    assert not warnings


@pytest.mark.parametrize(
    ("said", "instead", "warning"),
    [
        (
            "switchguid=0xaaaa000000000001",
            "switchguid=0xaaaa000000000003",
            "line 10: aaaa000000000001 is not the switchguid",
        ),
        ("devid=0xd2f2\n", "", "line 9: Switch aaaa000000000001 is printed without devid"),
        (
            'Switch\t64 "S-aaaa000000000001"',
            'Switch\t64 "S-aaaa00000000001"',
            "line 10: no node can be read from 'Switch",
        ),
        ('Switch\t64 "S', 'Swich\t64 "S', "line 9: no Switch, Ca or Rt follows"),
        ("[33]\t", "[65]\t", "line 12: port 65 of a node with 64 ports"),
        ("[33]\t", "[1]\t", "line 12: port 1 behind port 1"),
        ("lid 12 4xNDR", "lid 13 4xNDR", "line 12: lid 13 of a node with lid 12"),
        ("lid 12 4xNDR", "lid 12 2xNDR", "line 12: 2xNDR here, 4xNDR at the other end"),
        (
            '"S-aaaa000000000002"[33]',
            '"S-aaaa000000000002"[34]',
            "line 12: the other end of port 33 does not lead back",
        ),
        ('"S-aaaa000000000002"[33]', '"S-aaaa000000000002"[1]', "line 12: the other end of port 33 does not lead back"),
        ('"S-aaaa000000000002"[33]', '"S-aaaa000000000009"[33]', "line 12: 1 links lead to nodes that are not printed"),
        ("# Initiated", "# Initiate", "line 1: no heading 'Initiated from node'"),
        (
            "from node bbbb000000000001",
            "from node bbbb000000000007",
            "line 4: the node bbbb000000000007 is not printed",
        ),
        ('Ca\t1 "H-', 'Ca\t1 "S-', "a Ca has no name that begins with S"),
        ("enhanced port 0 lid 11 lmc 0", "", "line 10: the lid of switch aaaa000000000001 is missing"),
    ],
)
def test_one_line_against_another(said, instead, warning):
    found = parse_ibnetdiscover(TEXT.replace(said, instead, 1))[1]
    assert any(one.startswith(warning) or warning in one for one in found), found


def test_a_node_with_two_guids_has_none():
    nodes, _ = parse_ibnetdiscover(TEXT.replace("switchguid=0xaaaa000000000001", "switchguid=0xaaaa000000000003"))
    assert (nodes[0].guid, nodes[0].lid, nodes[1].guid) == (None, 11, 0xAAAA000000000002)


def test_nodes_twice_and_nodes_without_links():
    assert "line 40: the node of line 10 is printed a second time" in parse_ibnetdiscover(TEXT + switch(0))[1]
    alone = TEXT.replace(TEXT.splitlines(keepends=True)[-2], "")
    assert any("no link of this node is printed" in warning for warning in parse_ibnetdiscover(alone)[1])


def test_every_lost_joined_or_repeated_line_is_named():
    lines = TEXT.splitlines(keepends=True)
    for place, line in enumerate(lines):
        if line.strip() in ("", "#") or "sysimgguid" in line:
            continue
        lost = "".join(lines[:place] + lines[place + 1 :])
        joined = "".join([*lines[:place], line.rstrip("\n"), *lines[place + 1 :]])
        twice = "".join(lines[: place + 1] + lines[place:])
        assert parse_ibnetdiscover(lost)[1], line
        assert parse_ibnetdiscover(twice)[1], line
        assert parse_ibnetdiscover(joined)[1] or lines[place + 1] == "\n", line


def test_large_fabrics_are_read_in_time():
    text = HEADING + "".join(switch(0).replace("aaaa0000", f"{number:08x}") for number in range(0x1000, 0x1000 + 2000))
    assert answer_ibnetdiscover(text)[0]["switch_lines"] == 2000


def test_texts_of_something_else_are_refused():
    for text in ("", "hello\n", "#\n# Topology file\n"):
        with pytest.raises(CheckFailedError):
            answer_ibnetdiscover(text)


@settings(deadline=None)
@given(st.integers(0, len(TEXT)), st.integers(0, 80), st.text(max_size=5), st.randoms(use_true_random=False))
def test_damage_never_raises_nor_counts_what_is_not_there(begin, count, put, rng: random.Random):
    lines = (TEXT[:begin] + put + TEXT[begin + count :]).split("\n")
    if rng.random() < 0.3:
        rng.shuffle(lines)
    try:
        facts, warnings = answer_ibnetdiscover("\n".join(lines))
    except CheckFailedError:
        return
    assert all(re.match(r"line \d+: ", warning) for warning in warnings)
    assert facts["switch_lines"] <= sum(line.strip().startswith("Switch") for line in lines)
