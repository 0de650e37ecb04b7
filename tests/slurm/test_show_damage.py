"""Records of scontrol that contradict themselves, lack what every record has, or say what scontrol does not."""

from pathlib import Path

import pytest

from toolkit.slurm.parse_show import parse_show_job, parse_show_node, parse_show_partition

SAMPLES = Path(__file__).parents[1] / "topology" / "parsers" / "samples"
JOB, NODE, PARTITION = ((SAMPLES / f"scontrol-show-{sort}.txt").read_text() for sort in ("job", "node", "partition"))
READERS = {
    "job": (JOB, parse_show_job),
    "node": (NODE, parse_show_node),
    "partition": (PARTITION, parse_show_partition),
}


@pytest.mark.parametrize(
    ("sort", "old", "new", "said", "lost"),
    [
        ("job", "NumNodes=2", "NumNodes=3", "line 12: NumNodes=3, but TRES says node=2", ""),
        ("job", "n[1-2]", "n[1-3]", "line 10: NumNodes=2, but NodeList names 3", ""),
        ("job", "n[1-2]", "n[1-", "line 10: NodeList is damaged: the host list", "NodeList"),
        ("job", "NumCPUs=8", "NumCPUs=8x", "line 12: NumCPUs=8x is damaged", "NumCPUs"),
        ("job", "TimeLimit=01:00:00", "TimeLimit=01:0", "line 6: TimeLimit=01:0 is damaged", "TimeLimit"),
        ("job", "node=2,billing=8", "node=2,bill", "line 13: TRES=cpu=8,mem=16G,node=2,bill is damaged", "TRES"),
        ("job", "cpu=8,mem=16G", "mem=16G,cpu=8", "line 13: TRES is not in Slurm's order", ""),
        ("job", "cpu=8,mem", "mem", "line 13: TRES does not say cpu, which NumCPUs does", ""),
        ("job", "JobState=RUNNING", "JobState=RUNING", "line 4: JobState=RUNING is cut, or no state", ""),
        (
            "job",
            "   BatchHost=n1\n",
            "   BatchHost=n1\n   NodeList=n[1-2]\n",
            "line 12: NodeList stands on line 10, too",
            "",
        ),
        ("job", " ExitCode=0:0", "", "line 1: the record ends early, without ExitCode", ""),
        ("job", "JobId=7 JobName=a b", "JobName=a JobId=7", "line 1: JobId does not stand first", ""),
        ("job", "   TRES=", "   x=1 TRES=", "line 13: scontrol has no key x", ""),
        ("node", "CPUTot=16", "CPUTot=12", "line 2: CPUTot=12, but Sockets=2 times CoresPerSocket=4 times", ""),
        ("node", "RealMemory=64000", "RealMemory=6400", "line 8: RealMemory=6400, but CfgTRES says mem=64000M", ""),
        ("node", "CPUAlloc=2", "CPUAlloc=3", "line 2: CPUAlloc=3, but AllocTRES says cpu=2", ""),
        (
            "node",
            "ActiveFeatures=ib",
            "ActiveFeatures=ab",
            "line 4: ActiveFeatures and AvailableFeatures do not fit",
            "",
        ),
        ("node", "Debian", "Tue Apr 18 23:41 UTC 2023", "line 7: OS is damaged, its date is not whole", ""),
        ("node", "Version=23.02.7", "Version=x.02.7", "line 6: Version=x.02.7 is damaged", "Version"),
        ("node", "   Gres=gpu:2\n", "", "line 1: the record ends early, without Gres", ""),
        ("node", "[root@2026-01-02T03:04:05]\n\n", "[root@2026-01-02T03:04:05]", "line 13: has no line end", ""),
        ("partition", "TotalNodes=3", "TotalNodes=4", "line 5: TotalNodes=4, but Nodes names 3", ""),
        ("partition", "Default=YES", "Default=YE", "line 3: Default=YE is damaged", "Default"),
        ("partition", "   State=UP", "   State=U", "line 6: State=U is cut, or no state", ""),
    ],
)
def test_damage_is_named_with_its_line(sort, old, new, said, lost):
    text, reader = READERS[sort]
    assert reader(text)[1] == () and old in text
    facts, warnings = reader(text.replace(old, new, 1))
    assert any(said in warning for warning in warnings), warnings
    if lost:
        (record,) = next(value for value in facts.values() if isinstance(value, list))
        assert record[lost] is None


def test_a_record_that_is_printed_twice_or_without_its_name_is_named():
    assert "line 15: NodeName=n1 has a record on line 1, too" in parse_show_node(NODE * 2)[1]
    one, two = (" ".join(NODE.replace("n1", name).split()) + "\n" for name in ("n1", "n2"))
    assert parse_show_node(one + two)[1] == ()
    facts, warnings = parse_show_node(one + two.removeprefix("NodeName=n2 "))
    assert (facts["node_count"], warnings) == (1, ("line 2: a record without NodeName; nothing is read from it",))
    facts, warnings = parse_show_node(one + "Arch=x86_64 " + two.replace("Arch=x86_64 ", ""))
    assert [node["NodeName"] for node in facts["nodes"]] == ["n1", "n2"]
    assert warnings == ("line 2: NodeName does not stand first",)


def test_a_key_that_others_have_is_missed_in_the_middle_too():
    text = "".join(f"NodeName=n{number} CPUTot=2\n   RealMemory=5 State=IDLE\n" for number in (1, 2, 3))
    assert parse_show_node(text)[1] == ()
    _, warnings = parse_show_node(text.replace("NodeName=n2 CPUTot=2", "NodeName=n2"))
    assert warnings == ("line 3: the record is not whole, without CPUTot",)


def test_what_is_kept_for_the_system_and_odd_names_are_no_damage():
    kept = NODE.replace("   Partitions=", "   CoreSpecCount=1 MemSpecLimit=500\n   Partitions=")
    kept = kept.replace("CfgTRES=cpu=16,mem=64000M", "CfgTRES=cpu=14,mem=63500M")
    assert parse_show_node(kept)[1] == ()
    licence = "TRES=cpu=8,mem=16G,node=2,billing=8,gres/gpu:a100=2,license/x@server=1"
    assert parse_show_job(JOB.replace("TRES=cpu=8,mem=16G,node=2,billing=8", licence))[1] == ()
    gres = "Gres=gpu:a100:4(S:0-1),nic:2"
    assert parse_show_node(NODE.replace("Gres=gpu:2", gres))[0]["nodes"][0]["Gres"] == gres.removeprefix("Gres=")


def test_very_many_nodes_are_read_in_time():
    text = "".join(NODE.replace("n1", f"n{number}") for number in range(1000))
    facts, warnings = parse_show_node(text)
    assert (facts["node_count"], warnings) == (1000, ())
