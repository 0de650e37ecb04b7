"""NCCL's log in its forms; texts written here after its formats."""

import pytest

from toolkit.errors import ToolkitError
from toolkit.topology.readers.nccl_log import answer_nccl_log

LOG = """\
n11:100:100 [0] NCCL INFO NCCL version 2.21.5+cuda12.4
n11:100:140 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to eth0.
n11:100:140 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_3:1/IB [RO]; OOB eth0:10.0.0.1<0>
n11:100:140 [0] NCCL INFO Using network IB
n2:200:240 [0] NCCL INFO Using network IB
loading the data set of rank 0
n2:200:240 [0] NCCL INFO comm 0x55aa rank 1 nRanks 2 nNodes 2 localRanks 1 localRank 0 MNNVL 0
n11:100:140 [0] NCCL INFO comm 0x55bb rank 0 nRanks 2 nNodes 2 localRanks 1 localRank 0 MNNVL 0
n11:100:140 [0] NCCL INFO Channel 00/02 :    0   1
n11:100:140 [0] NCCL INFO Channel 01/02 :    0   1
n11:100:140 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB/0/GDRDMA
n11:100:140 [0] NCCL INFO 2 coll channels, 0 collnet channels, 0 nvls channels, 2 p2p channels, 2 p2p channels per peer
n11:100:140 [0] NCCL INFO ncclCommInitRank comm 0x55bb rank 0 nranks 2 cudaDev 0 busId 19000 commId 0x1 - Init COMPLETE
n2:200:240 [0] NCCL INFO ncclCommInitRank comm 0x55aa rank 1 nranks 2 cudaDev 0 busId 19000 commId 0x1 - Init COMPLETE
"""
ANSWER = {
    "nranks": 2, "net": "IB", "hosts": ["n11", "n2"], "nnodes": 2, "local_ranks": 1, "coll_channels": 2, "channels": 2,
    "nics": ["mlx5_0", "mlx5_3"], "oob": "eth0", "env": {"NCCL_SOCKET_IFNAME": "eth0"},
}  # fmt: skip


def test_a_log_of_two_processes():
    assert answer_nccl_log(LOG) == (ANSWER, ())


@pytest.mark.parametrize("prefix", ["0: ", "[1,0]<stdout>:", "2024-05-06 07:08:09 ", "(worker pid=7) ", "\x1b[36m"])
def test_what_launchers_write_before_each_line(prefix):
    assert answer_nccl_log("".join(f"{prefix}{line}\r\n" for line in LOG.splitlines()))[0] == ANSWER


def test_other_forms_of_other_versions():
    facts, _ = answer_nccl_log(
        "[2025-01-02 03:04:05] n1:7:7 [1] init.cc:99 NCCL WARN Cuda failure 'out of memory'\n"
        "n1:7:8 [1] NCCL INFO NET/IB : No device found.\n"
        "n1:7:8 [1] NCCL INFO NET/Socket : Using [0]eth0:172.17.0.2<0>\n"
        "n1:7:8 [1] NCCL INFO NCCL_DEBUG set to INFO\n"
        "n1:7:8 [1] NCCL INFO Trees [0] -1/-1/-1->1->0 comm 0x17 nRanks 02 busId 3000\n"
    )
    assert (facts["net"], facts["nics"], facts["nranks"], facts["hosts"]) == ("Socket", None, 2, ["n1"])
    assert facts["env"] == {"NCCL_DEBUG": "INFO"}
    facts, _ = answer_nccl_log(
        "NCCL INFO NET/OFI Selected provider is efa (found 4 nics)\nNCCL INFO Using network AWS Libfabric\n"
    )
    assert (facts["net"], facts["hosts"]) == ("AWS Libfabric", None)


def test_of_several_communicators_the_largest_counts():
    small = "n11:100:140 [0] NCCL INFO comm 0x77 rank 0 nRanks 1 nNodes 1 localRanks 1 localRank 0 MNNVL 0\n"
    assert answer_nccl_log(LOG + small)[0] == ANSWER


def test_a_last_line_without_its_end_is_not_read():
    _, warnings = answer_nccl_log(LOG + "n3:1:1 [0] NCCL INFO Using netw")
    assert warnings[0].startswith("line 15: no newline at the end")


@pytest.mark.parametrize("text", ["", "Hello\n", "NCCL is a library\n"])
def test_what_is_no_log_is_refused(text):
    with pytest.raises(ToolkitError, match="expected the output of NCCL"):
        answer_nccl_log(text)


@pytest.mark.parametrize(
    ("old", "new", "said", "key"),
    [
        ("[1]mlx5_3:1/IB ", "[2]mlx5_3:1/IB ", "line 3: expected the devices of NET/IB", "nics"),
        ("2 coll channels, 0", "2 coll channels 0", "line 12: expected the numbers of channels", "coll_channels"),
        ("set by environment to", "by environment to", "line 2: expected an environment variable", "env"),
        ("n2:200:240 [0] NCCL INFO Using network IB", "n2:200:240 [0] NCCL INFO Using network Socket",
         "line 14: lines differ in the network", "net"),
    ],
)  # fmt: skip
def test_a_damaged_line_gives_no_fact_and_is_named(old, new, said, key):
    assert old in LOG
    facts, warnings = answer_nccl_log(LOG.replace(old, new, 1))
    assert warnings[0].startswith(said) and facts[key] is None
    assert {name: value for name, value in facts.items() if name not in (key, "oob")}.items() <= ANSWER.items()
