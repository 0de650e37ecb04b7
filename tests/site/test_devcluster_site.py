"""The dev cluster's site file says what the dev cluster is."""

from toolkit.devcluster.configuration import CPUS_PER_NODE, slurm_conf
from toolkit.devcluster.layout import ClusterSpec, make_layout
from toolkit.devcluster.network import NODE_INTERFACE
from toolkit.site.load import load_site
from toolkit.slurm.times import parse_slurm_time


def test_partitions_limits_and_names_are_those_of_its_slurm_conf(monkeypatch):
    monkeypatch.delenv("TOOLKIT_DEVCLUSTER", raising=False)
    site = load_site("devcluster", {})
    layout = make_layout()
    assert site.scheduler.conf.replace("~", str(layout.folder.parent.parent)) == str(layout.slurm_conf)
    assert site.network.interface == NODE_INTERFACE
    conf = slurm_conf(layout, ClusterSpec(nodes=2, gpus=4, link="", accounting=False, subnet="10.9.8"))
    lines = [dict(word.split("=", 1) for word in line.split()) for line in conf.splitlines() if line[:1].isalpha()]
    assert {"ClusterName": site.detect.cluster_name} in lines
    partitions = {line["PartitionName"]: line for line in lines if "PartitionName" in line}
    assert set(partitions) == set(site.partitions)
    for name, line in partitions.items():
        ours = site.partitions[name]
        assert ours.max_time_s == parse_slurm_time(line["MaxTime"])
        assert ours.default is (line.get("Default") == "YES")
        assert ours.cpus_per_node == CPUS_PER_NODE
