"""Real outputs, if the collection is on this machine: facts are those of the sidecars, or unknown and named."""

import json
from pathlib import Path

import pytest
from damage import leaves, wrong_facts

from toolkit.cli.parse import KINDS, parse_hostlist, reader_of
from toolkit.errors import CheckFailedError

CORPUS = Path(__file__).parents[4] / "shared" / "corpus"
SIDECARS = [path for kind in KINDS for path in sorted((CORPUS / kind).glob("*.json"))]


def sample_of(sidecar):
    record = json.loads(sidecar.read_text())
    text = (sidecar.parent / record["file"]).read_bytes().decode("utf-8-sig", errors="replace")
    return record, text


@pytest.mark.parametrize("sidecar", SIDECARS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_real_output_reads_as_its_sidecar_says(sidecar):
    record, text = sample_of(sidecar)
    reader, keys = reader_of(sidecar.parent.name)
    facts, warnings = reader(text)
    truth = {key: value for key, value in record["truth"].items() if key in keys}
    known = {key: facts[key] for key in truth}
    assert wrong_facts(truth, known) == {}
    assert leaves(known) == leaves(truth) or warnings
    if sidecar.parent.name != "hostlist" and "damaged" in record["genuine"]:
        assert warnings


@pytest.mark.parametrize(
    "sidecar", [path for path in SIDECARS if path.parent.name == "hostlist"], ids=lambda path: path.stem
)
def test_the_sidecar_of_a_host_list_says_when_it_is_rejected(sidecar):
    record, text = sample_of(sidecar)
    try:
        facts, _ = parse_hostlist(text)
    except CheckFailedError:
        facts = {"valid": False}
    assert facts["valid"] is (record["truth"].get("expected") != "reject")


INTACT = {"nvidia-smi-topo-m", "lscpu", "numactl-H", "sysfs"}  # complete and undamaged ones are read completely


@pytest.mark.parametrize(
    "sidecar",
    [path for path in SIDECARS if path.parent.name in INTACT],
    ids=lambda path: f"{path.parent.name}-{path.stem}",
)
def test_an_intact_output_is_read_completely_and_without_a_warning(sidecar):
    record, text = sample_of(sidecar)
    if not record["complete"] or "damaged" in record["genuine"]:
        pytest.skip("cut or damaged")
    facts, warnings = reader_of(sidecar.parent.name)[0](text)
    truth = {key: value for key, value in record["truth"].items() if key in facts}
    assert warnings == () and {key: facts[key] for key in truth} == truth
