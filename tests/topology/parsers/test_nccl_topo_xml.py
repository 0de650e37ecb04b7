"""NCCL's topology files and their damages; a text written here after the format."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.errors import ToolkitError
from toolkit.topology.parsers.nccl_topo_xml import answer_nccl_topo_xml

CPU = 'arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143"'
PLACE = 'link_speed="32.0 GT/s PCIe" link_width="16"'
TOPOLOGY = f"""\
<system version="1">
  <cpu numaid="0" affinity="00000000,0000ffff" {CPU}>
    <pci busid="0000:10:00.0" class="0x060400" {PLACE}>
      <pci busid="0000:11:00.0" class="0x030200" {PLACE}>
        <gpu dev="0" sm="90" rank="0" gdr="1">
          <nvlink target="0000:21:00.0" count="18" tclass="0x030200"/>
        </gpu>
      </pci>
      <pci busid="0000:12:00.0" class="0x020700" {PLACE}>
        <nic>
          <net name="mlx5_0" dev="0" speed="400000" port="1" latency="0.000000" guid="0x5a" maxconn="131072" gdr="1"/>
        </nic>
      </pci>
    </pci>
  </cpu>
  <cpu numaid="1" affinity="0000ffff,00000000" {CPU}>
    <pci busid="0000:20:00.0" class="0x060400" {PLACE}>
      <pci busid="0000:21:00.0" class="0x030200" {PLACE}>
        <gpu dev="1" sm="90" rank="1" gdr="1">
          <nvlink target="0000:11:00.0" count="18" tclass="0x030200"/>
        </gpu>
      </pci>
      <pci busid="0000:22:00.0" class="0x020700" {PLACE}>
        <nic>
          <net name="mlx5_1" dev="1" speed="400000" port="1" latency="0.000000" guid="0x5b" maxconn="131072" gdr="1"/>
        </nic>
      </pci>
    </pci>
  </cpu>
</system>
"""


def test_a_dump():
    facts, warnings = answer_nccl_topo_xml(TOPOLOGY)
    assert warnings == ()
    assert facts == {
        "root": "system",
        "version": "1",
        "cpus": [
            {"numaid": str(node), "arch": "x86_64", "vendor": "GenuineIntel", "affinity": mask}
            for node, mask in enumerate(("00000000,0000ffff", "0000ffff,00000000"))
        ],
        "gpu_elements": 2,
        "nets": ["mlx5_0", "mlx5_1"],
        "net_speeds": ["400000", "400000"],
        "pci_elements": 6,
        "pci_gpu_class": 2,
        "pci_ib_class": 2,
        "nvlinks": [
            {"target": "0000:21:00.0", "count": "18", "tclass": "0x030200"},
            {"target": "0000:11:00.0", "count": "18", "tclass": "0x030200"},
        ],
    }
    assert answer_nccl_topo_xml('<?xml version="1.0"?>\n' + TOPOLOGY.replace("\n", "\r\n"))[0] == facts


@pytest.mark.parametrize(
    ("old", "new", "said", "key"),
    [
        ("</system>\n", "", "no well-formed XML: no element found", ("gpu_elements",)),
        ('class="0x020700"', 'class="0x02070"', "line 9: class of pci is '0x02070'", ("pci_ib_class",)),
        ('speed="400000"', 'speed="400k"', "line 11: speed of net is '400k'", ("net_speeds", 0)),
        (' speed="400000"', "", "line 11: net has no attribute speed", ("net_speeds", 0)),
        ('numaid="1"', 'numaid="2"', "the numbers of the NUMA nodes do not follow", None),
        ('"0000ffff,00000000"', '"0000ffff"', "the masks of the NUMA nodes have several lengths", None),
        ('vendor="GenuineIntel"', 'vendor="Genuine"', "the NUMA nodes are of several makes", None),
        ('busid="0000:12:00.0"', 'busid="0000:11:00.0"', "line 9: the same pci as in line 4", None),
        ('dev="1" sm', 'dev="7" sm', "the numbers of the GPUs do not follow one another", None),
        ("<nic>", "<nix>", "no well-formed XML", ("nets",)),
        ('tclass="0x030200"/>\n', 'tclass="0x030200"/>', "line 6: 2 tags", None),
        ('          <nvlink target="0000:21:00.0" count="18" tclass="0x030200"/>\n' * 1, '<x/>\n', "line 6: an element 'x'", None),
    ],
)  # fmt: skip
def test_damage_is_named_and_its_facts_are_unknown(old, new, said, key):
    assert old in TOPOLOGY
    facts, warnings = answer_nccl_topo_xml(TOPOLOGY.replace(old, new, 1))
    assert any(said in warning for warning in warnings), warnings
    for step in key or ():
        facts = facts[step]
    assert key is None or facts is None


def test_a_gpu_without_the_links_of_the_others_and_a_bridge_without_its_device():
    pair = TOPOLOGY.splitlines(keepends=True)[3:8]
    many = "".join(
        "".join(pair)
        .replace("0000:11", f"0000:3{n}")
        .replace('dev="0"', f'dev="{n + 2}"')
        .replace("<nvlink", "<nvlink")
        for n in range(4)
    )
    text = TOPOLOGY.replace("".join(pair), "".join(pair) + many, 1)
    link = '          <nvlink target="0000:21:00.0" count="18" tclass="0x030200"/>\n'
    _, warnings = answer_nccl_topo_xml(text.replace(link, "", 1))
    assert any("line 5: this gpu has other things in it than most" in warning for warning in warnings), warnings


@pytest.mark.parametrize("head", ['<!DOCTYPE system SYSTEM "x">', '<!DOCTYPE system [<!ENTITY a "b">]>'])
def test_no_doctype_is_taken(head):
    with pytest.raises(ToolkitError, match="which a topology of NCCL never does"):
        answer_nccl_topo_xml(head + TOPOLOGY)


@pytest.mark.parametrize("text", ["", "Hello\n", "<topology/>", "<"])
def test_what_is_no_topology_is_refused(text):
    with pytest.raises(ToolkitError, match="no topology of NCCL"):
        answer_nccl_topo_xml(text)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2500), st.integers(0, 60), st.text(max_size=5))
def test_no_damage_raises_anything_else(start, length, between):
    try:
        _, warnings = answer_nccl_topo_xml(TOPOLOGY[:start] + between + TOPOLOGY[start + length :])
    except ToolkitError:
        return
    assert all(warning.startswith("line ") for warning in warnings)
