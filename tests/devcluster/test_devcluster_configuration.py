"""What the dev cluster's files say; none of this needs root."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from toolkit.devcluster import configuration, packages
from toolkit.devcluster.cluster import require_machine
from toolkit.devcluster.layout import LONGEST_FOLDER, ClusterSpec, make_layout
from toolkit.devcluster.network import bits_per_second
from toolkit.errors import NotFoundError, ToolkitError

SPEC = ClusterSpec(nodes=4, gpus=4, link="", accounting=False, subnet="10.64.0")


def settings(text: str) -> dict[str, str]:
    """Key to value of the lines that set one key each."""
    return dict(line.split("=", 1) for line in text.splitlines() if re.fullmatch(r"\w+=\S*", line))


def test_all_paths_stay_in_the_folder_and_authentication_is_munge():
    layout = make_layout("one", Path("/srv/one"))
    conf = configuration.slurm_conf(layout, SPEC)
    keys = settings(conf)
    assert keys["AuthType"] == "auth/munge" and keys["CredType"] == "cred/munge"
    assert keys["AuthInfo"].startswith("socket=/srv/one/run/")
    paths = re.findall(r"(?<=[=,])/[^\s,]+", conf)
    assert len(paths) >= 8
    assert all(path.startswith("/srv/one/") for path in paths)


def test_only_the_low_partition_can_be_preempted():
    conf = configuration.slurm_conf(make_layout("one", Path("/srv/one")), SPEC)
    modes = dict(re.findall(r"^PartitionName=(\w+) .*PreemptMode=(\w+)", conf, re.M))
    assert modes == {"main": "OFF", "debug": "OFF", "short": "OFF", "low": "REQUEUE", "high": "OFF"}
    tiers = {name: int(tier) for name, tier in re.findall(r"^PartitionName=(\w+) .*Tier=(\d+)", conf, re.M)}
    assert tiers["low"] < tiers["main"] < tiers["high"]


@pytest.mark.parametrize(
    ("nodes", "leaves"),
    [
        (1, ["leaf1 Nodes=node1", "spine Switches=leaf1"]),
        (2, ["leaf1 Nodes=node1", "leaf2 Nodes=node2", "spine Switches=leaf1,leaf2"]),
        (5, ["leaf1 Nodes=node[1-3]", "leaf2 Nodes=node[4-5]", "spine Switches=leaf1,leaf2"]),
    ],
)
def test_topology_halves_the_nodes(nodes: int, leaves: list[str]):
    text = configuration.topology_conf(replace(SPEC, nodes=nodes))
    assert text.splitlines() == [f"SwitchName={leaf}" for leaf in leaves]


def test_gres_names_one_device_per_gpu():
    layout = make_layout("one", Path("/srv/one"))
    assert "File=/srv/one/dev/nvidia[0-3]\n" in configuration.gres_conf(layout, SPEC)
    assert "File=/srv/one/dev/nvidia0\n" in configuration.gres_conf(layout, replace(SPEC, gpus=1))
    assert "Name=gpu" not in configuration.gres_conf(layout, replace(SPEC, gpus=0))
    assert "Gres=" not in configuration.slurm_conf(layout, replace(SPEC, gpus=0))


def test_options_come_last_so_that_they_win():
    spec = replace(SPEC, options=("SlurmctldParameters=preempt_send_user_signal",))
    conf = configuration.slurm_conf(make_layout("one", Path("/srv/one")), spec)
    assert conf.endswith("SlurmctldParameters=preempt_send_user_signal\n")


def test_clusters_of_other_names_or_folders_share_no_link_and_no_port():
    layouts = [make_layout("one", Path("/srv/one")), make_layout("two", Path("/srv/one"))]
    layouts.append(make_layout("one", Path("/srv/two")))
    assert len({layout.bridge for layout in layouts}) == 3
    assert len({layout.first_port for layout in layouts}) == 3
    # Linux takes 15 characters for a link.
    assert all(len(layout.link("node64")) <= 15 for layout in layouts)


@pytest.mark.parametrize(
    ("name", "folder", "says"),
    [
        ("Bad Name", None, "use the characters a-z, 0-9 and '-', and start with a letter"),
        ("one", Path("/tmp/one"), "each node has its own /tmp"),
        ("one", Path("/srv/a b"), "path of at most 80 characters from A-Z"),
        ("one", Path("/srv/" + "x" * LONGEST_FOLDER), "at most"),
    ],
)
def test_places_that_cannot_work_are_refused(name: str, folder: Path | None, says: str):
    with pytest.raises(ToolkitError, match=says):
        make_layout(name, folder)


def test_the_folder_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TOOLKIT_DEVCLUSTER", "/srv/mine")
    assert make_layout().slurm_conf == Path("/srv/mine/etc/slurm.conf")


def test_spec_is_read_back_and_its_absence_says_what_to_do(tmp_path: Path):
    layout = replace(make_layout("one", Path("/srv/one")), folder=tmp_path)
    with pytest.raises(NotFoundError, match="Fix: run toolkit devcluster --name one up"):
        layout.read_spec()
    spec = replace(SPEC, link="200mbit", options=("KillWait=1",))
    layout.write_spec(spec)
    assert layout.read_spec() == spec
    # Under another name its links would not be found, and `down` would leave them.
    with pytest.raises(ToolkitError, match="Fix: use --name one"):
        replace(layout, name="two").read_spec()


def test_link_speeds():
    assert bits_per_second("200mbit") == 200e6
    assert bits_per_second("1.5gbit") == 1.5e9
    for refused in ("200", "200mb", "0mbit", "-1mbit", "1mbit; reboot"):
        with pytest.raises(ToolkitError, match="200mbit"):
            bits_per_second(refused)


def test_missing_programs_are_named_with_the_line_that_installs_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packages, "SEARCH_PATH", "/nonexistent")
    with pytest.raises(ToolkitError, match=r"munged, .*slurmd.*Fix: apt-get install .*slurmctld slurmd"):
        require_machine()
    assert "mariadbd" not in packages.missing_programs(accounting=False)


def test_packages_are_printed_without_the_toolkit_on_the_path():
    argv = [sys.executable, "-I", "-S", packages.__file__]
    printed = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
    assert printed == sorted(printed) and {"slurmd", "munge", "libpmix-dev"} <= set(printed)


def test_a_cluster_that_shares_the_accounting_of_another_has_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/srv")
    spec = replace(SPEC, accounting=True, accounting_of="first", seat="10.65.7.3")
    layout = make_layout("second", Path("/srv/second"))
    keys = settings(configuration.slurm_conf(layout, spec))
    assert keys["ClusterName"] == "second"
    assert keys["AccountingStorageHost"] == "10.65.7.2"
    first = make_layout("first", Path("/srv/.toolkit/first"))
    assert keys["AccountingStoragePort"] == str(first.first_port + 2)
    assert keys["AccountingStoragePass"] == str(layout.munge_socket)
    assert not spec.has_database and replace(SPEC, accounting=True).has_database
