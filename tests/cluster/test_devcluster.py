"""The dev cluster behaves as a real site does: separate machines, links, MPI, preemption, failures, accounting."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from clusters import ACCOUNTING, RELEASE
from on_slurm import mpi_of, wait_for

from toolkit.cli.devcluster import devcluster as commands
from toolkit.devcluster import cluster as devcluster
from toolkit.devcluster.configuration import GRACE_S
from toolkit.devcluster.layout import ClusterSpec, make_layout
from toolkit.devcluster.nodes import process_in_node
from toolkit.errors import NotFoundError, OwnFailureError, ToolkitError

pytestmark = pytest.mark.cluster

NODES = ["node1", "node2", "node3", "node4"]


def test_nodes_partitions_and_topology(cluster):
    rows = cluster.run("sinfo", "--noheader", "--format=%P %D %G %c %t").split("\n")
    assert rows[0].split() == ["main*", "4", "gpu:4", "8", "idle"]
    assert {row.split()[0] for row in rows if row} == {"main*", "debug", "short", "low", "high"}
    topology = cluster.run("scontrol", "show", "topology")
    assert "SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=node[1-2]" in topology
    assert "SwitchName=spine Level=1" in topology


def test_each_node_is_a_machine_of_its_own(cluster, shared_path):
    # Each step leaves a file in /tmp under one and the same name, then lists what it sees.
    script = (
        "echo $SLURMD_NODENAME > /tmp/mine-$SLURM_JOB_ID; echo shm > /dev/shm/mine; sleep 0.5;"
        f"echo $(hostname) $(cat /tmp/mine-$SLURM_JOB_ID) $SLURM_TOPOLOGY_ADDR $CUDA_VISIBLE_DEVICES"
        f" $(hostname -I) $(ps ax | grep -c '[s]lurmd -D') | tee {shared_path}/$SLURMD_NODENAME"
    )
    said = cluster.run("srun", "-N4", "--gpus-per-node=2", "sh", "-c", script).splitlines()
    by_node = {line.split()[0]: line.split()[1:] for line in said}
    assert sorted(by_node) == NODES
    for node, (owner_of_tmp, place, gpus, address, slurmds) in by_node.items():
        leaf = "leaf1" if node in NODES[:2] else "leaf2"
        assert (owner_of_tmp, place, gpus, slurmds) == (node, f"spine.{leaf}.{node}", "0,1", "1")
        assert address.endswith(f".{10 + int(node[-1])}")
    assert sorted(path.name for path in shared_path.iterdir()) == NODES


def test_mpi_ranks_find_each_other_over_the_bridge(cluster, shared_path):
    program = shared_path / "ranks.py"
    program.write_text(
        "from mpi4py import MPI\n"
        "import numpy, socket\n"
        "world = MPI.COMM_WORLD\n"
        "total = numpy.empty(1 << 20)\n"
        "world.Allreduce(numpy.ones(1 << 20), total)\n"
        "print(world.rank, world.size, socket.gethostname(), total[0], flush=True)\n"
    )
    mpi, cluster.env["MPI4PY_LIBMPI"] = mpi_of(cluster.layout)
    before = _bytes_to(cluster, "node3")
    said = cluster.run("srun", "-N4", "--ntasks-per-node=2", f"--mpi={mpi}", sys.executable, str(program))
    rows = sorted(line.split() for line in said.splitlines())
    assert [row[0] for row in rows] == [str(rank) for rank in range(8)]
    assert {row[1] for row in rows} == {"8"} and {row[3] for row in rows} == {"8.0"}
    assert [row[2] for row in rows] == [node for node in NODES for _ in range(2)]
    # An all-reduce of 8 MiB brings at least that much to every node.
    assert _bytes_to(cluster, "node3") - before > 8 * 2**20


def _bytes_to(cluster, node: str) -> int:
    link = cluster.layout.link(node)
    return int(Path(f"/sys/class/net/{link}/statistics/tx_bytes").read_text())


SEND = """
import socket, sys, time
size = int(sys.argv[2])
with socket.create_connection((sys.argv[1], 5000)) as link:
    begin = time.monotonic()
    link.sendall(bytes(size))
    link.recv(1)
print(size * 8 / (time.monotonic() - begin))
"""
RECEIVE = """
import socket, sys
with socket.create_server(("", 5000)) as server:
    print("ready", flush=True)
    link, _ = server.accept()
    left = int(sys.argv[1])
    while left:
        left -= len(link.recv(min(left, 1 << 20)))
    link.send(b"x")
"""


def _bits_per_second(cluster, source: str, target: str, size: int) -> float:
    argv = [sys.executable, "-c", RECEIVE, str(size)]
    command = devcluster.command_in_node(cluster.layout, target, argv)
    with subprocess.Popen(command, env=cluster.env, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None and receiver.stdout.readline() == "ready\n"
        sent = cluster.exec(source, [sys.executable, "-c", SEND, target, str(size)])
    return float(sent.stdout)


def test_a_shaped_link_is_slower_in_both_directions_than_an_unshaped_one(cluster):
    """A shape of 20 Mbit/s costs a link at least three quarters of its speed; other links keep theirs."""
    size = 4 * 2**20
    devcluster.shape(cluster.layout, "node1", "20mbit")
    try:
        shaped = [_bits_per_second(cluster, *pair, size) for pair in (("node1", "node2"), ("node2", "node1"))]
        beside = _bits_per_second(cluster, "node3", "node4", size)
    finally:
        devcluster.shape(cluster.layout, "all", "none")
    unshaped = _bits_per_second(cluster, "node1", "node2", size)
    assert min(beside, unshaped) > 4 * max(shaped), (
        f"shaped {shaped}, beside {beside:.0f}, unshaped {unshaped:.0f} bit/s"
    )


def test_nothing_of_a_job_survives_it(cluster):
    stray = "setsid sleep 4711 > /dev/null 2>&1 &"
    wrap = f"--wrap={stray} ({stray}) ; srun sh -c '{stray} exit 0'"
    job = cluster.run("sbatch", "--parsable", "--nodes=2", "--output=/dev/null", wrap).strip()
    wait_for(lambda: "JobState=COMPLETED" in cluster.run("scontrol", "show", "job", job))
    for node in NODES[:2]:
        wait_for(lambda at=node: cluster.exec(at, ["pgrep", "-f", "sleep 4711"]).returncode == 1)


def test_the_command_line_passes_exit_codes_and_knows_its_nodes(cluster):
    def devcluster_command(*argv: str) -> subprocess.CompletedProcess[str]:
        program = [str(Path(sys.executable).with_name("toolkit")), "devcluster"]
        place = ["--name", cluster.layout.name, "--folder", str(cluster.folder)]
        return subprocess.run([*program, *place, *argv], capture_output=True, text=True, check=False)

    said = devcluster_command("exec", "node2", "--", "sh", "-c", "hostname; echo $SLURM_CONF; exit 7")
    assert (said.returncode, said.stdout) == (7, f"node2\n{cluster.slurm_conf}\n")
    status = json.loads(devcluster_command("status", "--json").stdout)
    assert sorted(status["nodes"]) == NODES and status["daemons"]["slurmd node1"] is True
    again = devcluster_command("up", "--slurm", RELEASE, *(["--accounting"] if ACCOUNTING else []))
    assert "is up already" in again.stderr and again.stdout.startswith(f"export SLURM_CONF={cluster.slurm_conf}\n")
    refused = devcluster_command("exec", "node9", "true")
    assert refused.returncode == 4 and "one of controller, node1" in refused.stderr


def test_a_preempted_job_is_requeued_and_runs_again(cluster, shared_path):
    log = shared_path / "low.out"
    submit = ["sbatch", "--parsable", "--partition=low", "-N4", "--exclusive", "--open-mode=append"]
    cluster.run("scontrol", "update", "PartitionName=low", "GraceTime=0")
    try:
        job = cluster.run(*submit, f"--output={log}", "--wrap=echo life ${SLURM_RESTART_COUNT:-0}; sleep 300")
        wait_for(lambda: log.exists() and "life 0" in log.read_text())
        cluster.run("srun", "--partition=high", "-N4", "--exclusive", "hostname", timeout_s=100)
        assert "DUE TO PREEMPTION" in log.read_text()
        # 120 s by default in Slurm: cred_expire is what shortens the wait.
        wait_for(lambda: "life 1" in log.read_text(), 90)
        cluster.run("scancel", job.strip())
    finally:
        cluster.run("scontrol", "update", "PartitionName=low", f"GraceTime={GRACE_S}")


def typed(cluster, *words: str) -> str:
    """A command of `toolkit devcluster`, as a user types it; what it says."""
    group = ["--name", cluster.layout.name, "--folder", str(cluster.layout.folder)]
    result = CliRunner().invoke(commands, [*group, *words], catch_exceptions=False)
    assert (result.exit_code, result.stdout) == (0, "")
    return result.stderr


def test_an_address_without_a_name_stays_a_number(cluster):
    """torch asks for IPv6 forms of addresses, and warned on every rank while a node waited for a name server."""
    ask = "import socket; print(socket.getnameinfo(('::ffff:10.9.8.7', 1), 0)[0])"
    assert cluster.exec("node1", [sys.executable, "-c", ask]).stdout == "::ffff:10.9.8.7\n"
    assert cluster.exec("node1", ["getent", "hosts", "node2"]).stdout.split()[1] == "node2"


def test_a_lost_node_goes_down_and_comes_back(cluster):
    assert "node4 is disconnected" in typed(cluster, "fail", "node4")
    wait_for(lambda: devcluster.node_states(cluster.layout)["node4"].startswith("down"))
    assert typed(cluster, "restore", "node4") == "node4 is connected and available\n"
    assert devcluster.node_states(cluster.layout)["node4"] == "idle"
    assert cluster.run("srun", "-w", "node4", "hostname") == "node4\n"


def test_a_node_that_lost_its_slurmd_keeps_its_processes_and_comes_back(cluster):
    with subprocess.Popen(["srun", "-w", "node3", "sleep", "4713"], env=cluster.env) as step:
        wait_for(lambda: cluster.exec("node3", ["pgrep", "-f", "sleep 4713"]).returncode == 0)
        assert "node3 no longer runs slurmd" in typed(cluster, "fail", "--slurmd", "node3")
        assert devcluster.status(cluster.layout).daemons["slurmd node3"] is False
        assert cluster.exec("node3", ["pgrep", "-f", "sleep 4713"]).returncode == 0
        typed(cluster, "restore", "node3")
        step.terminate()
    assert cluster.run("srun", "-w", "node3", "hostname") == "node3\n"


def test_up_again_starts_what_died_and_nothing_else(cluster):
    spec = cluster.layout.read_spec()
    assert devcluster.up(cluster.layout, spec) is False
    # A slurmd that dies before it has said that a job is over leaves its node completing for minutes.
    wait_for(lambda: devcluster.node_states(cluster.layout)["node3"] == "idle")
    assert cluster.exec("node3", ["pkill", "-KILL", "-x", "slurmd"]).returncode == 0
    assert devcluster.status(cluster.layout).daemons["slurmd node3"] is False
    assert devcluster.up(cluster.layout, spec) is True
    assert cluster.run("srun", "-w", "node3", "hostname") == "node3\n"
    with pytest.raises(ToolkitError, match="up with other settings: 4 nodes"):
        devcluster.up(cluster.layout, ClusterSpec(2, 4, "", False, ""))


def _traces() -> dict[str, set[str]]:
    """What a cluster could leave on this machine. Other clusters may run meanwhile: see `_of`."""
    links = json.loads(subprocess.run(["ip", "-json", "link"], capture_output=True, check=True).stdout)
    processes = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            content = (entry / "cmdline").read_text() + (entry / "environ").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        processes.add(f"{entry.name} {content}")
    return {
        "links": {link["ifname"] for link in links},
        "processes": processes,
        "mounts": set(Path("/proc/self/mountinfo").read_text().splitlines()),
    }


def _of(layout, traces: dict[str, set[str]]) -> list[str]:
    marks = (str(layout.folder), layout.bridge)
    return [trace for found in traces.values() for trace in found if any(mark in trace for mark in marks)]


def test_down_leaves_nothing(cluster):
    name = f"{cluster.layout.name}-down"
    layout = make_layout(name, cluster.folder.parent / name)
    devcluster.up(layout, ClusterSpec(2, 0, "200mbit", accounting=False, subnet="", slurm=RELEASE))
    env = {**cluster.env, "SLURM_CONF": str(layout.slurm_conf)}
    wrap = "--wrap=setsid sleep 4712 & srun sleep 4712"
    subprocess.run(["sbatch", "-N2", "--output=/dev/null", wrap], env=env, check=True, timeout=120)
    wait_for(lambda: sum("sleep\x004712" in trace for trace in _of(layout, _traces())) >= 2)
    slurmctld = process_in_node(layout, "controller", "slurmctld")
    assert slurmctld is not None
    os.kill(slurmctld, signal.SIGSTOP)  # with it stops the nsenter that it was started by
    devcluster.down(layout)
    assert _of(layout, _traces()) == []
    assert not layout.folder.exists()
    with pytest.raises(NotFoundError, match="is not up"):
        devcluster.down(layout)


def test_a_daemon_that_refuses_is_quoted_and_all_is_taken_away(cluster):
    name = f"{cluster.layout.name}-bad"
    layout = make_layout(name, cluster.folder.parent / name)
    bad = ClusterSpec(1, 0, "", False, "", options=("SchedulerType=sched/nonsense",), slurm=RELEASE)
    with pytest.raises(
        OwnFailureError,
        match=r"(?s)slurmctld in controller (exited with code 1|was not ready|does not respond).*sched/nonsense",
    ):
        devcluster.up(layout, bad)
    assert _of(layout, _traces()) == []
    assert not layout.folder.exists()


def test_jobs_are_recorded_with_accounting(accounting_cluster):
    def row(job: str) -> str:
        return accounting_cluster.run("sacct", "-X", "-n", "-P", "-j", job, "-o", "State,Account,ExitCode")

    job = accounting_cluster.run("sbatch", "--parsable", "--output=/dev/null", "--wrap=exit 3").strip()
    wait_for(lambda: row(job).startswith("FAILED"))
    assert row(job) == "FAILED|toolkit|3:0\n"
    refused = subprocess.run(
        ["srun", "--account=nobody", "true"], env=accounting_cluster.env, capture_output=True, text=True
    )
    assert refused.returncode != 0 and "Invalid account" in refused.stderr
