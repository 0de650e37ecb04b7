"""`toolkit topo check` as the page shows it, its JSON, and clear words for wrong input."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from toolkit.topology.facts import Fact, Nic, NicPort, unknown
from toolkit.topology.machine_facts import topology_of_machine
from toolkit.topology.topology_json import topology_of_node, write_topology

PAGE = (Path(__file__).parents[3] / "docs" / "fabric.md").read_text(encoding="utf-8")
LOG = """\
node1:100:200 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 1.
node1:100:200 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>
node1:100:200 [0] NCCL INFO Using network Socket
node1:100:200 [0] NCCL INFO comm 0x55d0 rank 0 nRanks 16 nNodes 2 localRanks 8 localRank 0 MNNVL 0
"""


def node(*, known: bool = True) -> str:
    """What `topo show --json` prints of a node with two adapters."""
    port = NicPort(1, told("Active"), told(400.0), told("InfiniBand"))
    nothing = unknown("/sys", "not asked")
    nics = tuple(Nic(name, nothing, nothing, nothing, (port,)) for name in ("mlx5_0", "mlx5_1"))
    adapters = told(nics) if known else unknown("ibstat", "ibstat: No such file")
    whole = topology_of_machine("dgx-1", [1]).nodes[0]
    hardware = replace(whole.hardware, gpus=(), links=(), nics=adapters)
    guids = (nothing,) * 2 * known
    own = replace(whole, hardware=hardware, gpu_uuids=(), gpu_fabrics=(), nic_guids=guids)
    return write_topology(topology_of_node(own))


def told(value: Any) -> Fact[Any]:
    return Fact(value, "ibstat", "printed")


@pytest.fixture
def check(toolkit, monkeypatch):
    """The command in a folder with the page's files, in an environment without variables of NCCL's."""
    for name in [name for name in os.environ if name.startswith(("NCCL_", "GLOO_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(toolkit.folder))
    monkeypatch.chdir(toolkit.folder)
    script = re.search(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert script
    Path("job.env").write_text(script[1])
    Path("slurm-42.out").write_text(LOG)
    Path("node.json").write_text(node())
    return lambda *words: toolkit("topo", "check", *words)


@pytest.mark.parametrize("command", re.findall(r"^\$ toolkit topo check (.*)$", PAGE, re.MULTILINE))
def test_the_page_shows_what_is_printed(check, command):
    shown = re.search(rf"^\$ toolkit topo check {re.escape(command)}\n((?:.+\n)+?)```", PAGE, re.MULTILINE)
    said = check(*shlex.split(command))
    assert shown and said.code == 1 and said.out.startswith(shown[1]), said


def test_json_has_the_keys_of_the_page(check):
    said = check("--log", "slurm-42.out", "--facts", "node.json", "--settings", "--json")
    answer = json.loads(said.out)
    keys = re.findall(r"^\| `(\w+)` ", PAGE.split("## As JSON")[1], re.MULTILINE)
    assert list(answer) == keys and said.code == 1 and answer["ok"] is False
    assert list(answer["findings"][0]) == ["level", "variable", "value", "where", "does", "why", "fix", "source"]
    assert list(answer["log"]) == ["network", "devices", "gpu_direct", "connections", "as_planned"]
    assert [list(one) for one in answer["settings"]][:1] == [["name", "value", "reason", "source", "kept"]]


def test_this_environment(check, monkeypatch):
    assert check().out.endswith("0 variables in environment, 0 wrong, 0 to note\n")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    said = check("--nccl", "2.27.7")
    assert said.code == 0 and said.out.startswith("note: NCCL_DEBUG=INFO  [environment]")
    Path(".nccl.conf").write_text("NCCL_P2P_LEVEL=2\n")
    said = check("--nccl", "2.27.7")
    assert said.code == 1 and "wrong: NCCL_P2P_LEVEL=2  [" in said.out and ".nccl.conf:1]" in said.out


def test_what_is_set_is_kept_and_said_so(check, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert "for ranks: GLOO_SOCKET_IFNAME=lo is already set, so toolkit does not set eth0" in check("--settings").out


def test_a_log_as_planned(check):
    Path("good.out").write_text(
        "node1:1:2 [0] NCCL INFO NCCL version 2.27.7+cuda12.9\n"
        "node1:1:2 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB ib0:10.0.0.1<0>\n"
        "node1:1:2 [0] NCCL INFO Using network IB\n"
        "node1:1:2 [0] NCCL INFO Channel 00/0 : 7[7] -> 8[0] [send] via NET/IB/0/GDRDMA\n"
    )
    said = check("--log", "good.out", "--expect-net", "IB", "--expect-nics", "mlx5_0,mlx5_1", "--expect-gdr", "yes")
    assert (said.code, said.out.splitlines()[:3]) == (
        0, ["fine: network IB", "fine: adapters mlx5_0, mlx5_1", "fine: GPUDirect RDMA is used"],
    )  # fmt: skip
    assert "NCCL 2.27.7 [the log]" in said.out


def test_a_damaged_line_is_quoted_with_each_escape_once(check):
    Path("cut.out").write_text(
        "node1:1:2 [0] NCCL INFO NCCL version 2.27.7+cuda12.9\nnode1:1:2 [0] NCCL INFO Usi\x07ng"
    )
    said = check("--log", "cut.out")
    assert "'node1:1:2 [0] NCCL INFO Usi\\x07ng'" in said.err, said


def test_a_run(check, toolkit):
    more = "[env]\nvars = { NCCL_IB_TIMEOUT = '22', NCCL_ALGO = 'Rng' }\n"
    run_id = toolkit.ok("render", toolkit.job("true", more=more)) and next(toolkit.runs.glob("*/*")).name
    said = check("--run", run_id, "--nccl", "2.27.7")
    assert said.code == 1 and said.out.startswith("wrong: NCCL_ALGO=Rng  [record.json: env.vars]")
    assert "2 variables in" in said.out


@pytest.mark.parametrize(
    ("words", "why", "code"),
    [
        (("--env-file", "none"), "none: cannot read the file: No such file", 2),
        (("--env-file", "job.env", "--run", "last"), "--env-file cannot be combined with --run", 2),
        (("--nccl", "new"), "--nccl: expected an NCCL version, got 'new'. Fix: write the version as 2.21.5", 2),
        (("--expect-net", "IB"), "the --expect options require a log. Fix: pass --log FILE", 2),
        (("--log", "job.env"), "job.env:1: expected the output of NCCL", 1),
        (("--log", "none"), "none: cannot be read", 2),
        (("--facts", "job.env"), "job.env: line 1: expected JSON", 2),
        (("--facts", "bad.json"), "bad.json: ", 2),
        (("--facts", "unknown.json"), "the file does not contain the adapters of a node: ibstat: No such file", 2),
        (("--facts", "odd.json"), "odd.json: ", 2),
        (("--run", "last"), "no runs found", 4),
    ],
)
def test_wrong_input_has_clear_words(check, words, why, code):
    Path("bad.json").write_text("[1]")
    Path("unknown.json").write_text(node(known=False))
    Path("odd.json").write_text(node().replace('"mlx5_0"', "3"))
    said = check(*words)
    assert (said.code, said.out) == (code, "") and why in said.err and "Traceback" not in said.err, said


def test_torch_is_not_imported():
    code = "import sys; from toolkit.cli.main import main\ntry: main()\nfinally: assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code, "topo", "check", "--settings"], capture_output=True, text=True)
    assert "AssertionError" not in done.stderr and "for ranks: " in done.stdout, done
