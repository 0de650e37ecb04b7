"""Every reader on its own samples: whole ones are read completely, and damage gives unknown facts, never wrong ones."""

from pathlib import Path

import pytest
from damage import cut, garbled, has_lost_facts, leaves, lines_doubled, lines_dropped, lines_joined, wrong_facts

from toolkit.cli.parse import KINDS, reader_of
from toolkit.errors import CheckFailedError

SAMPLES = sorted((Path(__file__).parent / "samples").glob("*.txt"))
ALL = (cut, garbled, lines_dropped, lines_doubled, lines_joined)
# Each line of a log, and each file of a listing, stands alone: without one, the text is as whole as before.
OF_SINGLE_LINES = (cut, garbled, lines_joined)
# Facts that all follow from all lines together: with one of them damaged, none is known.
ALL_OR_NOTHING = {"slurm-topology-addr.txt", "lscpu.2.txt", "lscpu.3.txt"}
DAMAGES = {"nccl-log": OF_SINGLE_LINES, "sysfs": OF_SINGLE_LINES}


def kind_of(path):
    return path.name.split(".")[0]


def read(path, text):
    return reader_of(kind_of(path))[0](text)


def single_facts(facts, whole):
    """An answer whose lists of names are facts of their own: each host, and each nearest NIC by its column."""
    column_of = {device: nic for nic, device in (whole.get("nic_legend") or {}).items()}
    nearest = {
        gpu: near and {"level": near["level"], **{column_of.get(nic, nic): True for nic in near["nics"]}}
        for gpu, near in (facts.get("closest_nics") or {}).items()
    }
    hosts = dict.fromkeys(facts.get("hosts") or (), True)
    return facts | {"closest_nics": nearest, "hosts": hosts}


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_a_whole_sample_is_read_without_a_warning_and_with_windows_line_ends(path):
    text = path.read_text()
    facts, warnings = read(path, text)
    assert warnings == () and leaves(facts)
    assert facts.keys() == reader_of(kind_of(path))[1].keys()
    assert read(path, text.replace("\n", "\r\n")) == (facts, ())


def test_every_kind_of_a_command_has_a_sample():
    assert {kind_of(path) for path in SAMPLES} == KINDS.keys() - {"hostlist"}


@pytest.mark.parametrize(
    ("path", "damage"),
    [
        pytest.param(path, damage, id=f"{path.name}-{damage.__name__}")
        for path in SAMPLES
        for damage in DAMAGES.get(kind_of(path), ALL)
    ],
)
def test_a_fact_of_a_damaged_sample_is_right_or_unknown_and_named(path, damage):
    printed, _ = read(path, path.read_text())
    whole, kept = single_facts(printed, printed), []
    for text in damage(path.read_text()):
        try:
            facts, warnings = read(path, text)
        except CheckFailedError as error:
            assert error.where.startswith("line ")
            continue
        facts = single_facts(facts, printed)
        assert wrong_facts(whole, facts) == {}, text
        assert warnings or not has_lost_facts(whole, facts), text
        kept.append(len(leaves(facts)))
    # A reader that gave up at once would keep the rule, too.
    assert path.name in ALL_OR_NOTHING or max(kept) >= len(leaves(whole)) / 2


def test_the_rule_finds_wrong_and_lost_facts():
    whole = {"count": 2, "names": ["a", "b"], "ports": [{"rate": 400, "lid": None}]}
    assert wrong_facts(whole, whole) == {} and not has_lost_facts(whole, whole)
    assert wrong_facts(whole, {"count": 1}) == {("count",): 1}
    assert wrong_facts(whole, {"names": ["a"]}) == {("names",): ["a"]}
    assert wrong_facts(whole, {"ports": [{"rate": 400, "lid": 7}]}) == {("ports", "0", "lid"): 7}
    assert wrong_facts(whole, {"count": None, "ports": []}) == {} and has_lost_facts(whole, {"count": 2})
