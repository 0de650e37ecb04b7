"""`lstopo` on a terminal and in XML, and their damages; texts written here after its formats."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.errors import ToolkitError
from toolkit.topology.parsers.lstopo import answer_lstopo, parse_lstopo

VERBOSE = """\
Machine (P#0 total=96GiB DMIBoardName="X + Y (Z)" HostName=n1)
  Package L#0 (P#0 total=96GiB CPUModel="CPU  (R)")
    Group0 L#0 (total=64GiB)
      NUMANode L#0 (P#0 local=64GiB total=64GiB)
      NUMANode(HBM) L#1 (P#1 local=32GiB total=32GiB)
      L3Cache L#0 (size=16MiB linesize=64 ways=16)
        Core L#0 (P#0)
          PU L#0 (P#0)
          PU L#1 (P#2)
        Core L#1 (P#1)
          PU L#2 (P#1)
          PU L#3 (P#3)
    HostBridge L#0 (buses=0000:[16-17])
      PCIBridge L#1 (busid=0000:16:02.0 id=8086:347a class=0604(PCIBridge) link=31.51GB/s buses=0000:[17-17])
        PCI L#0 (busid=0000:17:00.0 id=15b3:101b class=0207(InfiniBand) link=31.51GB/s)
          OSDev[Network] L#0 (Address=00:00) "ib0"
          OSDev[OpenFabrics] L#1 (NodeGUID=0:1) "mlx5_0"
depth 0:         1 Machine (type #0)
 depth 1:        1 Package (type #1)
  depth 2:       1 Group (type #12)
   depth 3:      1 L3Cache (type #7)
    depth 4:     2 Core (type #3)
     depth 5:    4 PU (type #4)
Special depth -3:  2 NUMANode (type #14)
Special depth -4:  2 Bridge (type #16)
Special depth -5:  1 PCIDev (type #17)
Special depth -6:  2 OSDev (type #18)
Relative latency matrix (name NUMALatency kind 5) between 2 NUMANodes (depth -3) by logical indexes:
 index     0     1
     0    10    13
     1    13    10
Topology infos: Backend=Linux
Topology not from this system
"""
SHORT = """\
Machine (96GB total)
  Package L#0
    NUMANode L#0 (P#0 96GB)
    L3 L#0 (16MB)
      L2 L#0 (1024KB) + L1d L#0 (32KB) + L1i L#0 (32KB) + Core L#0
        PU L#0 (P#0)
        PU L#1 (P#2)
      L2 L#1 (1024KB) + L1d L#1 (32KB) + L1i L#1 (32KB) + Core L#1 + PU L#2 (P#1)
    HostBridge
      PCIBridge
        PCI 17:00.0 (InfiniBand)
          Net "ib0"
          OpenFabrics "mlx5_0"
      PCI 00:11.5 (SATA)
        Block(Disk) "sda"
"""
XML = """\
<?xml version="1.0" encoding="ISO-8859-1"?>
<!DOCTYPE topology SYSTEM "hwloc2.dtd">
<topology version="2.0">
  <object type="Machine" os_index="0" cpuset="0x0000000f" nodeset="0x00000003" gp_index="1">
    <info name="OSName" value="Linux"/>
    <object type="Package" os_index="0" cpuset="0x0000000f" gp_index="2">
      <object type="NUMANode" os_index="0" cpuset="0x0000000f" nodeset="0x00000001" gp_index="3" local_memory="5"/>
      <object type="NUMANode" os_index="1" cpuset="0x0000000f" nodeset="0x00000002" gp_index="4" subtype="HBM"/>
      <object type="L3Cache" cpuset="0x0000000f" gp_index="5" cache_size="16">
        <object type="Core" os_index="0" cpuset="0x00000005" gp_index="6">
          <object type="PU" os_index="0" cpuset="0x00000001" gp_index="7"/>
          <object type="PU" os_index="2" cpuset="0x00000004" gp_index="8"/>
        </object>
        <object type="Core" os_index="1" cpuset="0x0000000a" gp_index="9">
          <object type="PU" os_index="1" cpuset="0x00000002" gp_index="10"/>
          <object type="PU" os_index="3" cpuset="0x00000008" gp_index="11"/>
        </object>
      </object>
      <object type="Bridge" gp_index="12" bridge_type="0-1" depth="0">
        <object type="Bridge" gp_index="13" bridge_type="1-1" depth="1" pci_busid="0000:16:02.0">
          <object type="PCIDev" gp_index="14" pci_busid="0000:17:00.0">
            <object type="OSDev" gp_index="15" name="ib0" osdev_type="2"/>
          </object>
        </object>
      </object>
    </object>
  </object>
</topology>
"""
NAMES = ("packages", "numa_nodes", "cores", "pus", "l3", "host_bridges", "pci", "groups", "osdevs", "memory_only_nodes")


def numbers(text):
    facts, warnings = answer_lstopo(text)
    assert tuple(facts) == NAMES
    return tuple(facts.values()), warnings


def test_a_terminal_with_and_without_v_and_xml():
    assert numbers(VERBOSE) == ((1, 2, 2, 4, 1, 1, 1, 1, 2, 1), ())
    assert numbers(SHORT) == ((1, 1, 2, 3, 1, 1, 2, 0, 3, 0), ())
    assert numbers(XML) == ((1, 2, 2, 4, 1, 1, 1, 0, 1, 1), ())


def test_prefixes_of_launchers_and_windows_line_ends():
    for text in (VERBOSE, SHORT):
        assert numbers("".join(f"node1: {line}\r\n" for line in text.splitlines())) == numbers(text)
    assert numbers(XML.replace("\n", "\r\n")) == numbers(XML)


def test_names_of_hwloc_1():
    text = "Machine (8GB)\n  NUMANode L#0 (P#0 8GB) + Socket L#0 + L3 L#0 (8MB)\n    Core L#0 + PU L#0 (P#0)\n"
    assert numbers(text) == ((1, 1, 1, 1, 1, 0, 0, 0, 0, 0), ())
    xml = """\
<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE topology SYSTEM "hwloc.dtd">
<topology>
  <object type="Machine" os_index="0" cpuset="0x00000001">
    <object type="NUMANode" os_index="0" cpuset="0x00000001">
      <object type="Socket" os_index="0" cpuset="0x00000001">
        <object type="Cache" cpuset="0x00000001" depth="3" cache_type="0">
          <object type="PU" os_index="0" cpuset="0x00000001"/>
        </object>
      </object>
    </object>
  </object>
</topology>
"""
    (packages, nodes, _, units, caches, *_), _ = numbers(xml)
    assert (packages, nodes, units, caches) == (1, 1, 1, 1)


@pytest.mark.parametrize(
    ("old", "new", "said", "key"),
    [
        ("          PU L#2 (P#1)\n", "", "line 11: PU L#3 stands behind L#1", "pus"),
        ("          PU L#3 (P#3)\n", "", "4 PU, but 3 are printed", "pus"),
        ("PU L#3 (P#3)", "PU L#3 (P#1)", "line 12: PU P#1 stands in line 11, too", "pus"),
        ("PU L#3 (P#3)", "PX L#3 (P#3)", "line 12: no object of hwloc: 'PX L#3 (P#3)'", "pus"),
        ("PU L#3 (P#3)", "PU L#3 (P#3", "line 12: no object of hwloc", "pus"),
        ("          PU L#2 (P#1)\n          PU L#3 (P#3)\n", "", "the Core above has nothing in it", "pus"),
        ("(P#1)\n          PU", "(P#1)          PU", "line 10: no object of hwloc", "pus"),
        (" depth 1:        1 P", " depth 1:        2 P", "line 19: 2 Package, but 1 are printed", "packages"),
        ("Special depth -6:  2 OSDev (type #18)\n", "", "no line below the tree says how many OSDev", None),
        ("      L3Cache", "         L3Cache", "line 6: indented by 9, below an object at 6", None),
        ("     1    13    10", "     1    14    10", "line 31: from node 1 to 0 it is 14, back 13", None),
        ("     1    13    10\n", "", "there is no row of distances of node 1", None),
        ("Machine (P#0 total=96GiB DMIBoardName=\"X + Y (Z)\" HostName=n1)\n", "", "does not begin with the machine", None),
        (VERBOSE[VERBOSE.index("depth 0"):], "", "no line below the tree says how many PU", None),
        (VERBOSE[VERBOSE.index("  Package"):], "", "no cores and no processing units", None),
        ("Topology infos", "    Core L#1 (P#1)\nTopology infos", "line 32: does not belong below the tree", None),
    ],
)  # fmt: skip
def test_damage_of_the_tree_is_named(old, new, said, key):
    assert old in VERBOSE
    facts, warnings = answer_lstopo(VERBOSE.replace(old, new, 1))
    assert any(said in warning for warning in warnings), warnings
    assert key is None or facts[key] is None


@pytest.mark.parametrize(
    ("old", "new", "said", "key"),
    [
        ("</topology>\n", "", "no well-formed XML: no element found", "pus"),
        ('gp_index="8"/>', 'gp_index="8">', "no well-formed XML: mismatched tag", "pus"),
        ('          <object type="PU" os_index="3" cpuset="0x00000008" gp_index="11"/>\n', "", "line 14: the set of this Core", "pus"),
        ('cpuset="0x00000008"', 'cpuset="0x0000g08"', "line 16: PU without its set", "pus"),
        ('os_index="3" cpuset', 'os_index="4" cpuset', "line 16: the set of this PU is not its number", "pus"),
        ('gp_index="11"', 'gp_index="10"', "line 16: gp_index '10' stands in line 15, too", "pus"),
        ('      <object type="NUMANode" os_index="1" cpuset="0x0000000f" nodeset="0x00000002" gp_index="4" subtype="HBM"/>\n',
         "", "line 4: the machine's set of NUMA nodes", "numa_nodes"),
        ('bridge_type="0-1"', 'bridge_type="0"', "line 19: a bridge without its type", "host_bridges"),
        ('type="PCIDev"', 'type="PCDev"', "line 21: no type of hwloc: 'PCDev'", "pci"),
        ('<object type="Package"', '<objct type="Package"', "no well-formed XML", "packages"),
        ('"Linux"/>\n', '"Linux"/>\n    <info name="OSName" value="Linux"/>\n', "line 6: the same as the line above", None),
        ("gp_index=\"7\"/>\n", "gp_index=\"7\"/>", "line 11: 2 tags, where each other line has one", None),
    ],
)  # fmt: skip
def test_damage_of_xml_is_named(old, new, said, key):
    assert old in XML
    facts, warnings = answer_lstopo(XML.replace(old, new, 1))
    assert any(said in warning for warning in warnings), warnings
    assert key is None or facts[key] is None


@pytest.mark.parametrize(
    "doctype",
    [
        '<!DOCTYPE topology [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;&a;">]>',
        '<!DOCTYPE topology SYSTEM "file:///etc/passwd">',
        '<!DOCTYPE topology SYSTEM "hwloc2.dtd" [<!ENTITY x SYSTEM "file:///etc/passwd">]>',
        '<!DOCTYPE topology PUBLIC "x" "hwloc2.dtd">',
        '<!DOCTYPE lolz SYSTEM "hwloc2.dtd">',
    ],
)
def test_entities_and_other_doctypes_are_refused(doctype):
    text = XML.replace('<!DOCTYPE topology SYSTEM "hwloc2.dtd">', doctype).replace('value="Linux"', 'value="x"')
    with pytest.raises(ToolkitError, match="which XML of lstopo never does") as error:
        parse_lstopo(text)
    assert error.value.where.startswith("line ")


def test_what_fills_the_memory_is_refused(monkeypatch):
    with pytest.raises(ToolkitError, match="nests more than 256"):
        parse_lstopo("<topology>" + "<object>" * 100_000)
    monkeypatch.setattr("toolkit.topology.parsers.xml_elements.LARGEST_LETTERS", 100)
    with pytest.raises(ToolkitError, match="letters are far more"):
        parse_lstopo(XML)


@pytest.mark.parametrize("text", ["", "Hello\n", "<html></html>\n", "<", "CPU(s): 5\n"])
def test_what_is_no_lstopo_is_refused(text):
    with pytest.raises(ToolkitError, match="nothing that lstopo prints"):
        parse_lstopo(text)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([VERBOSE, SHORT, XML]), st.integers(0, 2000), st.integers(0, 60), st.text(max_size=5))
def test_no_damage_raises_anything_else(text, start, length, between):
    try:
        _, warnings = answer_lstopo(text[:start] + between + text[start + length :])
    except ToolkitError:
        return
    assert all(warning.startswith("line ") for warning in warnings)
