"""Real outputs read as their sidecars say, where the collection is at hand; our own samples stand in elsewhere."""

from collections import Counter

import pytest
from readings import CORPUS, every_sample, own_samples, read, real_samples
from rules import WARNED, WRONG

from toolkit.cli.parse import KINDS, reader_of

REAL = [sample for kind in KINDS for sample in real_samples(kind)]
NOBODY_CAN_TELL = {"clustershell", "clustershell_order"}  # what another program answers to the same text


def truth_of(sample):
    """The sidecar's values of the table's keys, where it is wrong the right ones."""
    _, keys = reader_of(sample.kind)
    truth = {key: value for key, value in sample.record["truth"].items() if key in keys and key not in NOBODY_CAN_TELL}
    return truth | {key: right for key, (right, _) in WRONG.get((sample.kind, sample.name), {}).items()}


@pytest.mark.parametrize("sample", REAL, ids=str)
def test_a_real_output_reads_as_its_sidecar_says(sample):
    truth = truth_of(sample)
    answer = read(sample.kind, sample.text).answer
    assert {key: answer[key] for key in truth} == truth


@pytest.mark.parametrize("sample", REAL, ids=str)
def test_a_complete_output_is_read_without_a_warning_and_a_damaged_one_with(sample):
    warnings = read(sample.kind, sample.text).warnings
    assert all(warning.startswith("line ") for warning in warnings)
    if "damaged" in sample.record["genuine"]:
        assert warnings
    elif (sample.kind, sample.name) in WARNED:
        said, _ = WARNED[sample.kind, sample.name]
        assert any(said in warning for warning in warnings)
    elif sample.record["complete"] and sample.record["truth"].get("valid", True):
        assert not warnings


@pytest.mark.parametrize(
    "sample", [sample for kind in KINDS for sample in own_samples(kind)], ids=str
)  # fmt: skip
def test_our_own_samples_are_whole(sample):
    reading = read(sample.kind, sample.text)
    assert reading.answer is not None and not reading.warnings


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_sample_of_our_own(kind):
    assert own_samples(kind), f"write tests/topology/parsers/samples/{kind}.txt"


@pytest.mark.skipif(not CORPUS.is_dir(), reason="the real outputs are not here")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if real_samples(kind)])
def test_the_keys_are_those_that_two_sidecars_share(kind):
    truths = [sample.record["truth"] for sample in real_samples(kind)]
    count = Counter(key for truth in truths for key in truth)
    assert {key for key, times in count.items() if times >= min(2, len(truths))} == set(reader_of(kind)[1])


@pytest.mark.parametrize("sample", every_sample(), ids=str)
def test_a_text_with_the_line_ends_of_windows_reads_alike(sample):
    whole = read(sample.kind, sample.text)
    assert read(sample.kind, sample.text.replace("\n", "\r\n")).answer == whole.answer
