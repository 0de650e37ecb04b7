"""The harness itself: accidents are always the same, invented facts are found, and valid texts are told from damaged ones."""

import pytest
from founded import unfounded
from readings import Reading, Sample, is_structural
from rules import VALID
from text_mutations import ACCIDENTS, Mutation, mutations

TABLE = "NAME NUMBER HOST\none 10 n1\ntwo 20 n2\nthree 30 n3\n"
ROWS = [{"name": name, "number": number} for name, number in (("one", 10), ("two", 20), ("three", 30))]


def stated(answer, text=TABLE):
    return unfounded("none", answer, text, {"rows": ROWS}, TABLE)


def test_accidents_are_the_same_for_a_seed_and_change_the_text():
    made = mutations(TABLE, "seed", 50)
    assert made == mutations(TABLE, "seed", 50) != mutations(TABLE, "other", 50)
    assert not any(mutation.same_text(TABLE) for mutation in made)
    assert len({mutation.name for mutation in made}) == len(ACCIDENTS)
    assert mutations("", "seed", 3)[0].text == ""


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"rows": ROWS, "count": 3, "none": None, "yes": True, "empty": ""}, None),
        ({"rows": [{"name": "four", "number": 10}]}, "rows.name = 'four' stands nowhere"),
        ({"rows": [{"name": "on", "number": 10}]}, "rows.name = 'on' stands nowhere"),
        ({"rows": [{"name": "one", "number": 11}]}, "rows.number = 11 stands nowhere"),
        ({"rows": [{"name": "one", "number": 20}]}, "a record of rows is put together from 2 lines"),
        ({"count": 5}, "count = 5 stands nowhere"),
        ({"by_host": {"n1": 10, "n4": 20}}, "by_host.{} = 'n4' stands nowhere"),
    ],
)
def test_an_invented_fact_is_found(answer, said):
    assert stated(answer) == ([said] if said else [])


def test_a_host_of_a_range_stands_there():
    text = "nodes: n[01-03,7]\n"
    assert stated({"hosts": ["n02", "n7"]}, text) == []
    assert stated({"hosts": ["n04"]}, text) == ["hosts = 'n04' stands nowhere"]


def test_what_is_structural():
    sample = Sample("none", "own", TABLE)
    whole, other = Reading({"rows": ROWS}, ()), Reading({"rows": ROWS[:2]}, ())
    lost = Mutation("line dropped", TABLE.replace("two 20 n2\n", ""), (2,))
    assert is_structural(sample, whole, lost, other) and not is_structural(sample, whole, lost, whole)
    assert not is_structural(
        sample, whole, Mutation("bytes dropped", TABLE.replace("20", "2"), (2,), same_form=True), other
    )
    assert not is_structural(sample, whole, Mutation("bytes dropped", TABLE.replace(" 20", "  20"), (2,)), other)
    assert is_structural(sample, whole, Mutation("cut", TABLE[:-3], (3,), mid_line=True), whole)


def test_what_the_command_might_have_printed_is_no_damage():
    (rows, columns) = VALID["squeue"]
    assert rows(TABLE.replace("two 20 n2\n", ""), TABLE) and not rows(TABLE[:-1], TABLE)
    assert not rows(TABLE + "two 20 n2\n", TABLE) and not rows(TABLE.partition("\n")[2], TABLE)
    assert columns("NAME HOST\none n1\ntwo n2\nthree n3\n", TABLE) and not columns(TABLE.replace(" 20", ""), TABLE)
    (topology,) = VALID["slurm-topology-conf"]
    tree = "SwitchName=a Switches=b,c\nSwitchName=b Nodes=n1\nSwitchName=c Nodes=n2\n"
    assert topology(tree.replace("n2", "n3"), tree) and not topology(tree.replace("n2", "n1"), tree)
    assert not topology(tree.replace("SwitchName=c Nodes=n2\n", ""), tree)
