"""The settings of the fabric that ranks set for themselves, each with a line, and what they leave as it is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from toolkit.rank import preparation
from toolkit.world.facts import World

ON_GPU = World(0, 0, 2, 2, 0, 1, "node0", "cuda:0", "local", "a test")


@pytest.fixture
def set_here(monkeypatch, tmp_path):
    """A call of `set_fabric` on a node with two GPUs and a second interface."""
    monkeypatch.setattr(preparation, "visible_gpus", lambda _environ: 2)
    monkeypatch.setattr(preparation, "choose_interface", lambda _wanted, *, single_node: ("ib0", "10.0.0.1"))
    monkeypatch.setattr("toolkit.topology.nccl.node.interface_addresses", lambda: {"lo": "", "ib0": "", "eth0": ""})
    monkeypatch.setenv("HOME", str(tmp_path))

    def call(environ, world=ON_GPU, **conf):
        (tmp_path / "nccl.conf").write_text("".join(f"{name}={value}\n" for name, value in conf.items()))
        return preparation.set_fabric(replace(world, nodes=2), "", environ, tmp_path / "nccl.conf")

    return call


def test_what_is_wrong_by_default_is_set_and_said_once_a_node(set_here):
    environ: dict[str, str] = {}
    lines = set_here(environ)
    assert (environ["GLOO_SOCKET_IFNAME"], environ["NCCL_SOCKET_IFNAME"]) == ("ib0", "=ib0")
    assert (environ["CUDA_DEVICE_ORDER"], environ["NCCL_DEBUG"]) == ("PCI_BUS_ID", "WARN")
    assert len(lines) == len(environ) == 4
    for line in lines:
        name, _, value = line.split(": ")[0].removeprefix("set ").partition("=")
        assert environ[name] == value and len(line.split(": ", 1)[1]) > 20, "a reason"
    silent: dict[str, str] = {}
    assert set_here(silent, replace(ON_GPU, rank=1, local_rank=1)) == [] and silent == environ


def test_what_a_user_or_a_site_has_set_is_kept(set_here):
    environ = {"NCCL_SOCKET_IFNAME": "eth0", "CUDA_DEVICE_ORDER": ""}
    set_here(environ, NCCL_DEBUG="INFO")
    assert environ == {"NCCL_SOCKET_IFNAME": "eth0", "CUDA_DEVICE_ORDER": "", "GLOO_SOCKET_IFNAME": "ib0"}


def test_a_file_of_nccl_that_cannot_be_read_is_named_and_not_fatal(set_here, tmp_path):
    (tmp_path / ".nccl.conf").write_bytes(b"#" * ((16 << 20) + 1))
    lines = set_here({})
    assert (
        lines[0].startswith(f"ignoring {tmp_path}/.nccl.conf: expected at most 16 MiB, got a larger file")
        and len(lines) == 5
    )
