"""`lscpu` in its forms; texts written here after its formats."""

import pytest

from toolkit.errors import ToolkitError
from toolkit.topology.readers.lscpu import Processors, answer_lscpu, parse_lscpu

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


def test_two_types_of_cores_repeat_their_keys():
    text = """\
Architecture:           aarch64
CPU(s):                 6
On-line CPU(s) list:    0-5
Model name:             Cortex-A55
Thread(s) per core:     1
Core(s) per socket:     4
Socket(s):              1
NUMA node(s):           1
NUMA node0 CPU(s):      0-5
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
    assert warnings == ("line 1: no column NODE, SOCKET",)


@pytest.mark.parametrize("text", ["", "\n", "nothing of it\n", "CPU is fast: yes\n", "available: 2 nodes (0-1)\n"])
def test_what_is_no_lscpu_is_refused(text):
    with pytest.raises(ToolkitError, match="expected the output of lscpu"):
        parse_lscpu(text)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("  3    1      1    3 3:3:3:1", "  3    1           3 3:3:3:1", "line 5: expected the row of CPU 3"),
        ("  3    1      1    3 3:3:3:1", "  3    1      x    3 3:3:3:1", "line 5: expected the row of CPU 3"),
        (
            "  3    1      1    3 3:3:3:1",
            "  3    0      1    3 3:3:3:1",
            "line 9: the CPUs of a core have different sockets",
        ),
        (TABLE.splitlines(keepends=True)[4], "", "line 5: expected the row of CPU 3"),
        (
            TABLE.splitlines(keepends=True)[8],
            "",
            "line 8: the CPUs of a core have different sockets or nodes, or rows are missing",
        ),
    ],
)
def test_a_damaged_row_makes_all_facts_of_a_table_unknown(old, new, said):
    assert old in TABLE
    facts, (warning,) = parse_lscpu(TABLE.replace(old, new, 1))
    assert warning.startswith(said) and facts == Processors()


@pytest.mark.parametrize(
    ("old", "new", "said", "key"),
    [
        (
            "Socket(s):           2\n",
            "Socket(s):           x\n",
            "line 17: expected a number for Socket(s), got 'x'",
            "sockets",
        ),
        ("Socket(s):           2\n", "", "line 16: expected a number for Socket(s), got no line", "cores"),
        ("Socket(s):           2\n", "Socket(s):           1\n", "line 17: 16 CPUs, but sockets x cores", "cores"),
        ("0-3,8-11", "8-11,0-3", "line 13: expected the CPUs of NUMA node 0, got '8-11,0-3'", "node0_cpus"),
        ("0-3,8-11", "0-3,8-13", "line 14: NUMA nodes 0 and 1 share CPUs", "node0_cpus"),
        ("per core:  2\n", "per core:  2", "line 7: expected one key and its value", "threads_per_core"),
    ],
)
def test_a_damaged_line_of_a_summary_gives_no_fact_and_is_named(old, new, said, key):
    assert old in SUMMARY
    facts, (warning,) = answer_lscpu(SUMMARY.replace(old, new, 1))
    assert warning.startswith(said) and facts[key] is None
