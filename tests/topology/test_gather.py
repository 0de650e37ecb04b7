"""Bringing facts together: the same whatever the order, over a store too, and small for a cluster of equal nodes."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from machine_fakes import FakeNvml

from toolkit.errors import ToolkitError
from toolkit.topology import gather
from toolkit.topology.facts import Fact, RankPlace
from toolkit.topology.gather import Contribution, ContributionRecord, decode, encode, merge
from toolkit.topology.machine_facts import topology_of_machine
from toolkit.topology.topology_json import adapter, read_topology, write_topology
from toolkit.world.facts import World
from toolkit.world.physical_gpu import gpus_of_process

SCALE = """
import resource, time
from dataclasses import replace
from toolkit.topology.facts import Fact, RankPlace
from toolkit.topology.gather import Contribution, ContributionRecord, decode, encode, merge
from toolkit.topology.machine_facts import topology_of_machine
from toolkit.topology.topology_json import adapter

nodes, ranks = 4096, 8
texts, kinds = [], {}
for number, node in enumerate(topology_of_machine("dgx-a100", [32] * (nodes // 32)).nodes):
    identities = tuple(Fact(f"GPU-{number:08x}-{gpu}-90ab-cdef-1234567890ab", "NVML", "direct") for gpu in range(8))
    node = replace(node, gpu_uuids=identities, nic_guids=identities)
    for local in range(ranks):
        place = RankPlace(number * ranks + local, node.host.value, number, local)
        text, name, hardware = encode(Contribution(place, None if local else node))
        texts.append(text)
        if name:
            kinds.setdefault(name, hardware)
del node, identities
before_kib, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
reader = adapter(ContributionRecord)
topology = merge(decode([reader.validate_json(text) for text in texts], kinds))
seconds = time.process_time() - begin
grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) * 1024 / 1e6
assert len(topology.nodes) == nodes and topology.size == nodes * ranks and not topology.conflicts
assert len({id(node.hardware) for node in topology.nodes}) == 1
print(seconds, grown_mb, max(map(len, texts)))
"""


def contributions(nodes=3, ranks=2):
    told = []
    for number, node in enumerate(topology_of_machine("dgx-1", [nodes - 1, 1]).nodes):
        told += [
            Contribution(RankPlace(number * ranks + local, node.host.value, number, local), None if local else node)
            for local in range(ranks)
        ]
    return told


def test_4096_nodes_are_merged_in_two_seconds_and_200_megabytes():
    """Of the processor's time: the machine may have other work. Equal nodes share what they have in common."""
    done = subprocess.run([sys.executable, "-c", SCALE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seconds, grown_mb, longest = map(float, done.stdout.split())
    assert seconds < 2, f"{seconds:.2f} s"
    assert grown_mb < 200, f"{grown_mb:.0f} MB"
    assert longest < 4096, "what is common to nodes is not sent by each"


def test_what_is_sent_comes_back_whatever_the_order():
    told = contributions()
    sent = [encode(one) for one in told]
    kinds = {name: hardware for _, name, hardware in sent if name}
    assert len(kinds) == 1, "equal nodes have one hardware"
    read = [adapter(ContributionRecord).validate_json(text) for text, _, _ in sent]
    whole = merge(told)
    random.Random(1).shuffle(read)
    again = merge(decode(read, kinds))
    assert again == whole
    assert len({id(node.hardware) for node in again.nodes}) == 1
    assert read_topology(write_topology(again), "file") == whole


def test_a_node_that_tells_two_things_is_unknown_whatever_the_order():
    first, *_ = told = contributions()
    other = replace(
        first, place=replace(first.place, rank=6), facts=replace(first.facts, switches=Fact(None, "a", "unknown", "b"))
    )
    for order in ([*told, other], [other, *reversed(told)]):
        topology = merge(order)
        node = next(node for node in topology.nodes if node.host.value == "node0")
        assert node.hardware.gpu_count.missing == "the node reported conflicting hardware information"
        assert "node0 reported conflicting hardware information, so toolkit ignores all of it" in topology.conflicts


def test_files_of_single_nodes_in_any_order_are_one_topology(tmp_path):
    whole = topology_of_machine("gb200", [2, 1])
    single = [write_topology(replace(whole, nodes=(node,))) for node in whole.nodes]
    together = read_topology("\n".join(single), "file")
    assert together == whole and len({id(node.hardware) for node in together.nodes}) == 1
    assert read_topology("\n\n".join([*reversed(single), single[0]]), "file") == whole


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "",
            "file: expected a topology in JSON, got an empty file. "
            "Fix: pass the output of `toolkit topo show --json` from each node",
        ),
        ('{"topology": 1}\nsrun: error', "file: line 2: expected JSON, got 'srun: error'"),
        ("[]", "file: object 1: expected a JSON object with topology = 1, got []"),
        ('{"topology": 2}', "file: object 1: expected a JSON object with topology = 1, got topology = 2"),
        ("{}", "file: object 1: expected a JSON object with topology = 1, got an object without that key"),
        ('{"topology": 1, "hardware": {}}', "file: object 1: nodes: Field required"),
        ('{"topology": 1,\n"hardware" 2}', "file: line 2: expected JSON, got '2}'"),
        ('{"topology": 1,\n', "file: line 2: expected JSON, got ''"),
        ("[" * 100_000, "file: line 1: expected JSON, got '[[["),
    ],
)
def test_what_is_no_topology_is_refused_with_its_place(text, said):
    with pytest.raises(ToolkitError) as refused:
        read_topology(text, "file")
    assert said in str(refused.value)


def test_a_node_whose_hardware_is_lost_is_refused():
    text = write_topology(topology_of_machine("dgx-1", [1])).replace('"hardware": "', '"hardware": "x')
    with pytest.raises(ToolkitError, match=r"nodes.0.hardware: expected a name in `hardware`, got 'x"):
        read_topology(text, "file")


def test_all_ranks_have_the_same_over_a_store(tmp_path, monkeypatch):
    from torch.distributed import FileStore

    monkeypatch.setattr(
        gather, "probe_node", lambda host: replace(topology_of_machine("dgx-1", [1]).nodes[0], host=host)
    )
    found = {}

    def run(rank):
        world = World(rank, rank % 2, 4, 2, rank // 2, 2, f"host{rank // 2}", "cpu", "test", "a test")
        found[rank] = gather.gather_over_store(world, FileStore(str(Path(tmp_path) / "store"), 4))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found[0] == found[1] == found[2] == found[3]
    assert found[0].ranks_by_host == {"host0": (0, 1), "host1": (2, 3)}
    assert [node.host.value for node in found[0].nodes] == ["host0", "host1"]


def test_a_rank_names_its_gpu_whatever_number_cuda_gives_it(monkeypatch):
    shown = {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    gpus = FakeNvml([{"bus": "0000:03:00.0"}, {"bus": "0000:83:00.0"}])
    monkeypatch.setattr(gather, "gpus_of_process", lambda environ: gpus_of_process(environ, gpus))
    for name, value in shown.items():
        monkeypatch.setenv(name, value)
    world = World(5, 1, 8, 2, 2, 4, "node2", "cuda:0", "srun", "a test")
    place = gather.contribution_of(world).place
    assert place.gpu == "GPU-0000:83:00.0"
    assert gather.contribution_of(replace(world, device="cpu")).place.gpu is None
    told = [replace(one, place=replace(one.place, gpu=f"GPU-{one.place.rank}")) for one in contributions()]
    topology = merge(told)
    assert topology.gpu_of_rank == {rank: f"GPU-{rank}" for rank in range(6)}
    assert read_topology(write_topology(topology), "file") == topology
    assert merge(contributions()).gpu_of_rank == {}
