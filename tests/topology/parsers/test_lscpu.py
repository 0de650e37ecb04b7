"""`lscpu` in its forms, languages and damages; texts written here after its formats."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.errors import ToolkitError
from toolkit.topology.parsers.cpu_lists import cpu_list, read_cpu_list, read_cpu_mask
from toolkit.topology.parsers.lscpu import answer_lscpu, parse_lscpu

SUMMARY = """\
Architecture:            x86_64
  CPU op-mode(s):        32-bit, 64-bit
CPU(s):                  16
  On-line CPU(s) list:   0-15
Vendor ID:               AuthenticAMD
  Model name:            AMD EPYC 1234 4-Core Processor
    Thread(s) per core:  2
    Core(s) per socket:  4
    Socket(s):           2
    Flags:               fpu vme de
NUMA:
  NUMA node(s):          3
  NUMA node0 CPU(s):     0-3,8-11
  NUMA node1 CPU(s):     4-7,12-15
  NUMA node2 CPU(s):
Vulnerabilities:
  Spectre v1:            Mitigation; usercopy/swapgs barriers
"""
TABLE = """\
CPU NODE SOCKET CORE L1d:L1i:L2:L3 ONLINE    MAXMHZ   MINMHZ      MHZ
  0    0      0    0 0:0:0:0          yes 3000.0000 800.0000 799.1230
  1    0      0    1 1:1:1:0          yes 3000.0000 800.0000 800.0000
  2    1      1    2 2:2:2:1          yes 3000.0000 800.0000 800.0000
  3    1      1    3 3:3:3:1          yes 3000.0000 800.0000 800.0000
  4    0      0    0 0:0:0:0          yes 3000.0000 800.0000 800.0000
  5    0      0    1 1:1:1:0          yes 3000.0000 800.0000 800.0000
  6    1      1    2 2:2:2:1          yes 3000.0000 800.0000 800.0000
  7    1      1    3 3:3:3:1          yes 3000.0000 800.0000 800.0000
"""
TABLE_ANSWER = {
    "cpus": 8, "numa_nodes": 2, "sockets": 2, "cores": 4, "threads_per_core": 2, "node0_cpus": [0, 1, 4, 5],
    "node_cpus": {"0": "0-1,4-5", "1": "2-3,6-7"},
}  # fmt: skip
PARSABLE = """\
# The following is the parsable format, which can be fed to other
# programs. Each different item in every column has an unique ID
# starting usually from zero.
# CPU,Core,Socket,Node,,L1d,L1i,L2,L3
0,0,0,0,,0,0,0,0
1,1,0,0,,1,1,1,0
2,2,1,1,,2,2,2,1
3,3,1,1,,3,3,3,1
4,0,0,0,,0,0,0,0
5,1,0,0,,1,1,1,0
6,2,1,1,,2,2,2,1
7,3,1,1,,3,3,3,1
"""


def test_the_summary_with_indentation_sections_and_a_node_of_memory_alone():
    assert answer_lscpu(SUMMARY) == (
        {
            "cpus": 16, "numa_nodes": 3, "sockets": 2, "cores": 8, "threads_per_core": 2,
            "node0_cpus": [0, 1, 2, 3, 8, 9, 10, 11],
            "node_cpus": {"0": "0-3,8-11", "1": "4-7,12-15", "2": ""},
        },
        (),
    )  # fmt: skip


def test_tables_in_columns_and_with_commas():
    assert answer_lscpu(TABLE) == (TABLE_ANSWER, ())
    assert answer_lscpu(PARSABLE) == (TABLE_ANSWER, ())


@pytest.mark.parametrize("text", [SUMMARY, TABLE, PARSABLE])
@pytest.mark.parametrize("prefix", ["node1: ", "0: ", "2024-05-06T07:08:09.123Z ", "[2024-05-06 07:08:09] ", "\x1b[1m"])
def test_prefixes_of_launchers_escapes_and_windows_line_ends(text, prefix):
    dressed = "".join(f"{prefix}{line}\r\n" for line in text.splitlines())
    assert answer_lscpu(dressed) == answer_lscpu(text)


def test_other_languages():
    german = """\
Architektur:                     x86_64
CPU(s):                          8
Liste der Online-CPU(s):         0-7
Thread(s) pro Kern:              2
Kern(e) pro Socket:              4
Sockel:                          1
NUMA-Knoten:                     1
NUMA-Knoten0 CPU(s):             0-7
"""
    facts, warnings = parse_lscpu(german)
    assert (facts.cpus, facts.cores, facts.numa_nodes, warnings) == (8, 4, 1, ())
    chinese = """\
架构：           x86_64
CPU:             4
在线 CPU 列表：  0-3
每个核的线程数： 1
每个座的核数：   4
座：             1
NUMA 节点：      1
NUMA 节点0 CPU： 0-3
"""
    facts, warnings = parse_lscpu(chinese)
    assert (facts.cpus, facts.cores, facts.node_cpus, warnings) == (4, 4, {0: (0, 1, 2, 3)}, ())


def test_two_types_of_cores_repeat_their_keys():
    text = """\
Architecture:           aarch64
CPU(s):                 6
On-line CPU(s) list:    0-5
Model name:             Cortex-A55
Thread(s) per core:     1
Core(s) per socket:     4
Socket(s):              1
Model name:             Cortex-A76
Thread(s) per core:     1
Core(s) per socket:     2
Socket(s):              1
"""
    facts, warnings = parse_lscpu(text)
    assert (facts.cpus, facts.sockets, facts.cores, facts.threads_per_core, warnings) == (6, 1, None, 1, ())


def test_offline_processors_and_columns_that_are_not_printed():
    text = "CPU CORE SOCKET NODE ONLINE\n0 0 0 0 yes\n1 1 0 0 yes\n2 - - - no\n"
    facts, warnings = parse_lscpu(text)
    assert (facts.cpus, facts.cores, facts.numa_nodes, warnings) == (3, 2, 1, ())
    facts, warnings = parse_lscpu("CPU CORE\n0 0\n1 1\n")
    assert (facts.cpus, facts.cores, facts.sockets, facts.numa_nodes) == (2, 2, None, None)
    assert warnings == (
        "line 1: 0 columns NODE; what it tells is unknown", "line 1: 0 columns SOCKET; what it tells is unknown"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("  3    1      1    3 3:3:3:1", "  3    1           3 3:3:3:1", "line 5: 8 cells under 9 columns"),
        ("  3    1      1    3 3:3:3:1", "  3    1      x    3 3:3:3:1", "line 5: a cell that does not fit its column SOCKET"),
        ("  3    1      1    3 3:3:3:1", "  3    0      1    3 3:3:3:1", "line 9: processors of core 3 differ"),
        ("  3    1      1    3 3:3:3:1", "  2    1      1    2 2:2:2:1", "line 5: processor 2 stands in line 4, too"),
        (TABLE.splitlines(keepends=True)[4], "", "line 5: processor 4 stands behind 2"),
        (TABLE.splitlines(keepends=True)[8], "", "line 5: core 3 has 1 processors, others 2"),
        (" SOCKET", " SOCKT", "line 1: no column of lscpu: 'SOCKT'"),
        ("800.0000 800.0000\n  7 ", "800.0000 800.0000  7 ", "line 8: 18 cells"),
        (TABLE.splitlines(keepends=True)[0], "", "line 1: no header"),
    ],
)  # fmt: skip
def test_damage_of_a_table_is_named(old, new, said):
    assert old in TABLE
    _, warnings = parse_lscpu(TABLE.replace(old, new, 1))
    assert any(said in warning for warning in warnings), warnings


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("list:   0-15", "list:   0-5", "line 3: 16 processors, but 6 are online"),
        ("Socket(s):           2", "Socket(s):           1", "sockets, cores and threads multiply to 8"),
        ("    Socket(s):           2\n", "", "there is no line 'Socket(s)'"),
        ("NUMA node(s):          3", "NUMA node(s):          2", "line 12: 2 NUMA nodes, but 3 have a line"),
        ("0-3,8-11", "0-3,8-13", "line 14: NUMA nodes 0 and 1 share processors"),
        ("0-3,8-11", "8-11,0-3", "line 13: the processors of NUMA node 0 are no list"),
        ("0-3,8-11", "0-3,8-1", "line 13: the processors of NUMA node 0 are no list"),
        ("CPU(s):     4-7,12-15", "CPU(s):", "line 17: NUMA node 1 has no processors"),
        ("per core:  2\n", "per core:  2", "line 7: not one key with its value"),
        ("Socket(s):           2\n", "Socket(s):           2\nSocket(s):           2\n", "a key that stands in line 9"),
        ("barriers\n", "barr", "line 17: has no line end"),
    ],
)
def test_damage_of_a_summary_is_named(old, new, said):
    assert old in SUMMARY
    _, warnings = parse_lscpu(SUMMARY.replace(old, new, 1))
    assert any(said in warning for warning in warnings), warnings


@pytest.mark.parametrize("text", ["", "\n", "nothing of it\n", "CPU is fast: yes\n", "available: 2 nodes (0-1)\n"])
def test_what_is_no_lscpu_is_refused(text):
    with pytest.raises(ToolkitError, match="nothing that lscpu prints"):
        parse_lscpu(text)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([SUMMARY, TABLE, PARSABLE]), st.integers(0, 900), st.integers(0, 30), st.text(max_size=5))
def test_no_damage_raises_anything_else(text, start, length, between):
    try:
        _, warnings = answer_lscpu(text[:start] + between + text[start + length :])
    except ToolkitError:
        return
    assert all(warning.startswith("line ") for warning in warnings)


@given(st.sets(st.integers(0, 300)))
def test_lists_and_masks_of_processors_go_there_and_back(cpus):
    ordered = tuple(sorted(cpus))
    assert read_cpu_list(cpu_list(cpus)) == ordered
    digits = f"{sum(1 << cpu for cpu in cpus):080x}"
    assert read_cpu_mask(",".join(digits[i : i + 8] for i in range(0, 80, 8))) == ordered
    assert read_cpu_list("3-1") is read_cpu_list("1,1") is read_cpu_list("0-99999999") is read_cpu_mask("g") is None
