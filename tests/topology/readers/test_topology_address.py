"""A node's place in the switch tree, as a job step's environment says it."""

import pytest

from toolkit.errors import CheckFailedError
from toolkit.topology.readers.topology_address import parse_topology_address

ADDRESS, PATTERN = "SLURM_TOPOLOGY_ADDR=core.leaf[1-2].n7\n", "SLURM_TOPOLOGY_ADDR_PATTERN=switch.switch.node\n"
FACTS = {"node": "n7", "levels": ["core", "leaf[1-2]"], "kinds": ["switch", "switch"], "leaf": "leaf[1-2]"}
NOTHING = dict.fromkeys(FACTS)


@pytest.mark.parametrize(
    "text",
    [
        ADDRESS + PATTERN,
        PATTERN + ADDRESS,
        "HOME=/home/a\n" + ADDRESS + "SLURM_JOB_ID=7\n" + PATTERN,
        "export " + ADDRESS + "declare -x " + PATTERN.replace("=", '="').replace("\n", '"\n'),
        "".join("0: " + line + "\n" for line in (ADDRESS + PATTERN).splitlines()),
    ],
)
def test_the_two_variables_are_read(text):
    assert parse_topology_address(text) == (FACTS, ())


def test_a_cluster_without_switches_names_the_node_alone():
    facts, warnings = parse_topology_address("SLURM_TOPOLOGY_ADDR=n7\nSLURM_TOPOLOGY_ADDR_PATTERN=node\n")
    assert (facts, warnings) == ({"node": "n7", "levels": [], "kinds": [], "leaf": None}, ())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (ADDRESS, "line 1: SLURM_TOPOLOGY_ADDR_PATTERN not found"),
        (PATTERN, "line 1: SLURM_TOPOLOGY_ADDR not found"),
        (ADDRESS.replace("core.", "") + PATTERN, "line 1: address 'leaf[1-2].n7' has 2 parts"),
        (
            ADDRESS + PATTERN.replace("switch.node", "swtch.node"),
            "line 2: expected switch, block or node as a level, got 'swtch'",
        ),
        (ADDRESS + PATTERN.replace(".node", ".switch"), "expected an address that ends with a node name"),
        (ADDRESS.replace("]", "") + PATTERN, "line 1: expected an address"),
        (ADDRESS + PATTERN + ADDRESS.replace("n7", "n8"), "line 3: SLURM_TOPOLOGY_ADDR is also on line 1"),
        (
            (ADDRESS + PATTERN).replace("SLURM_TOPOLOGY_ADDR=", "SLUM_TOPOLOGY_ADDR="),
            "line 1: expected a SLURM_TOPOLOGY_ADDR variable",
        ),
    ],
)
def test_damage_is_named_and_nothing_is_read(text, said):
    facts, warnings = parse_topology_address(text)
    assert facts == NOTHING
    assert any(said in warning for warning in warnings), warnings


def test_other_texts_are_refused():
    for text in ("", "\n\nHello\n"):
        with pytest.raises(CheckFailedError):
            parse_topology_address(text)
    assert "may be truncated" in parse_topology_address((ADDRESS + PATTERN)[:-1])[1][0]
