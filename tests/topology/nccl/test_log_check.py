"""Logs against a plan. The lines are written by hand after NCCL's forms; real logs are read where they lie."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.topology.nccl.log_check import Plan, check_log, plan_from_ports
from toolkit.topology.nccl.log_evidence import read_evidence
from toolkit.topology.nccl.node import AdapterPort
from toolkit.topology.readers.nccl_log import parse_nccl_log

CORPUS = Path("/work/shared/corpus/nccl-log")
PORTS = tuple(AdapterPort(f"mlx5_{number}", 1, True, 400.0, "InfiniBand") for number in range(4))
START = "comm 0x55d0 rank 0 nRanks 16 nNodes 2 localRanks 8 localRank 0 MNNVL 0"
USING = "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [2]mlx5_2:1/IB [3]mlx5_3:1/IB [RO]; OOB ib0:10.0.0.1<0>"


def check(*said: str, plan: Plan | None = None, start: str = START) -> tuple[list[str], list[str]]:
    text = "".join(
        f"node1:100:200 [0] NCCL {line if line.startswith('WARN') else 'INFO ' + line}\n" for line in (start, *said)
    )
    findings, fine = check_log(parse_nccl_log(text)[0], read_evidence(text), plan or plan_from_ports(PORTS), "log")
    return [f"{found.level}: {found.why} / {found.fix}" for found in findings], fine


def hop(channel: int, sender: int, receiver: int, direction: str, nic: int, way: str = "/GDRDMA") -> str:
    return f"Channel {channel:02d}/0 : {sender}[0] -> {receiver}[0] [{direction}] via NET/IB/{nic}{way}"


def test_as_planned():
    findings, fine = check(USING, "Using network IB", hop(0, 7, 8, "send", 1), hop(0, 7, 8, "receive", 1))
    assert findings == []
    assert fine == ["network IB", "adapters mlx5_0, mlx5_1, mlx5_2, mlx5_3", "GPUDirect RDMA is used",
                    "1 connections stay on their rails"]  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "why", "fix"),
    [
        (("NET/IB : No device found.",), "NCCL found no adapter that it may use", "/dev/infiniband"),
        (("Failed to open libibverbs.so[.1]",), "libibverbs cannot be loaded", "also in the container"),
        (
            ("NCCL_IB_DISABLE set by environment to 1.",),
            "NCCL_IB_DISABLE=1 disables InfiniBand and RoCE",
            "remove NCCL_IB_DISABLE",
        ),
        (("NCCL_NET set by environment to Socket.",), "NCCL_NET=Socket forces sockets", "remove NCCL_NET"),
        (("NCCL_IB_HCA set to =mlx5_9", "NET/IB : No device found."), "may use (NCCL_IB_HCA==mlx5_9)", "NCCL_IB_HCA"),
        ((), "the log does not contain the reason", "NCCL_DEBUG_SUBSYS"),
    ],
)
def test_sockets_in_place_of_adapters(lines, why, fix):
    (said,), fine = check(*lines, "NET/Socket : Using [0]eth0:10.0.0.1<0>", "Using network Socket")
    assert said.startswith(
        "wrong: NET/Socket is used although 4 InfiniBand or RoCE ports are active (mlx5_0:1, mlx5_1:1"
    )
    assert why in said.partition(" / ")[0] and fix in said.partition(" / ")[2] and fine == []


def test_adapters_that_are_missing_or_too_many():
    (missing, more), _ = check(
        "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_9:1/IB [RO]; OOB ib0:10.0.0.1<0>", "Using network IB",
        plan=Plan("IB", ("mlx5_0", "mlx5_1"), devices_named=True),
    )  # fmt: skip
    assert missing.startswith("wrong: 1 of 2 expected adapters are not used: mlx5_1")
    assert more.startswith("wrong: unexpected adapters are used: mlx5_9 / NCCL_IB_HCA==mlx5_0,mlx5_1")


def test_a_choice_that_somebody_made_is_a_note_where_nobody_named_the_adapters():
    lines = (
        "NCCL_IB_HCA set to =mlx5_0",
        "NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB ib0:10.0.0.1<0>",
        "Using network IB",
    )
    (said,), _ = check(*lines)
    assert (
        said.startswith("note: 3 of 4 expected adapters are not used")
        and "fix NCCL_IB_HCA==mlx5_0, which selected these adapters" in said
    )


def test_gpu_direct():
    lines = ("Using network IB", USING, hop(0, 7, 8, "send", 1), hop(1, 7, 8, "send", 2, ""),
             "GPU Direct RDMA Disabled for GPU 0 / HCA 2 (distance 9 > 4)")  # fmt: skip
    (said,), _ = check(*lines)
    assert said.startswith("note: GPUDirect RDMA: 1 of 2 connections between nodes use host memory; NCCL logs: GPU")
    (said,), _ = check(*lines, plan=Plan("IB", gpu_direct=True))
    assert said.startswith("wrong: GPUDirect RDMA")
    (said,), _ = check("Using network IB", USING, plan=Plan("IB", gpu_direct=True))
    assert said.startswith("wrong: the log does not show whether GPUDirect RDMA is used")
    (said,), _ = check("Using network IB", USING, hop(0, 7, 8, "send", 1), plan=Plan("IB", gpu_direct=False))
    assert said.startswith("wrong: GPUDirect RDMA is used, but was expected not to be")


def test_rails():
    lines = ("Using network IB", USING, hop(0, 7, 8, "send", 1), hop(0, 7, 8, "receive", 2), hop(1, 7, 8, "send", 1))
    (said,), _ = check(*lines)
    assert said.startswith("note: 1 of 1 connections cross rails, for instance channel 0, rank 7 to 8: NIC 1 to NIC 2")
    assert check(*lines, plan=Plan("IB", rails=True))[0][0].startswith("wrong: 1 of 1")
    assert (
        "does not show both ends of any connection"
        in check(USING, "Using network IB", plan=Plan("IB", rails=True))[0][0]
    )


def test_one_node_needs_no_network():
    alone = "comm 0x55d0 rank 0 nRanks 8 nNodes 1 localRanks 8 localRank 0 MNNVL 0"
    assert check("Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM", start=alone) == ([], [])


def test_a_log_that_is_cut_says_so():
    (said,), _ = check("P2P Chunksize set to 131072")
    assert said.startswith("wrong: expected network IB, but no line names the network in use: the log is incomplete")


def test_what_nccl_warns_of_and_a_way_that_ends_at_the_node():
    findings, _ = check(
        "Using network IB", USING.replace("OOB ib0", "OOB docker0"), "WARN Call to ibv_modify_qp failed"
    )
    assert [said.partition(" / ")[0] for said in findings] == [
        "wrong: NCCL warns: Call to ibv_modify_qp failed",
        "wrong: the ranks connect over docker0, which does not reach other nodes",
    ]


def test_numbers_without_end_are_passed_over():
    long = "9" * 5000
    text = f"NCCL INFO NCCL version 2.{long}\nNCCL INFO Channel {long}/0 : {long}[0] -> 1[0] [send] via NET/IB/{long}\n"
    evidence = read_evidence(text)
    assert (evidence.version, evidence.hops) == ("", [])


def test_traffic_over_tcp_without_a_plan_is_a_note():
    (said,), _ = check("NET/Socket : Using [0]eth0:10.0.0.1<0>", "Using network Socket", plan=Plan())
    assert said.startswith("note: traffic between nodes uses TCP on [0]eth0")


REAL = {
    "001": (
        Plan("IB", tuple(f"mlx5_{n}" for n in (0, 3, 4, 5, 6, 9, 10, 11)), True, True),
        [],
        "GPUDirect RDMA is used",
    ),
    "003": (Plan("IB"), ["expected network IB, but no line names the network in use: the log is incomplete"], ""),
    "005": (Plan(), [], ""),
    "007": (Plan("IB"), ["NET/Socket is used but IB is expected: NCCL found no adapter", "invalid device pointer"], ""),
    "009": (Plan("OFI"), [], "network OFI"),
    "011": (Plan("AWS Libfabric"), [], "network OFI"),
    "013": (Plan("IB", tuple(f"mlx5_{n}" for n in range(8)), True), [], "adapters mlx5_0"),
    "015": (Plan("IB"), [], ""),
}


@pytest.mark.skipif(not CORPUS.is_dir(), reason="the collection of real logs is not on this machine")
@pytest.mark.parametrize("name", REAL)
def test_real_logs(name):
    plan, wrong, fine = REAL[name]
    text = (CORPUS / f"{name}.txt").read_text(encoding="utf-8")
    findings, said = check_log(parse_nccl_log(text)[0], read_evidence(text), plan, name)
    found = [one.why for one in findings if one.level == "wrong"]
    assert len(found) == len(wrong) and all(why in one for why, one in zip(wrong, found, strict=True)), found
    assert any(one.startswith(fine) for one in said) or not fine, said
