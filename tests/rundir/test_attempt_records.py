"""`start.json` and `exit.json`: as an earlier version wrote them, and with keys of a later one."""

import json
import re
from pathlib import Path

import pytest

from toolkit.errors import DamagedFileError
from toolkit.rundir.attempt_records import AttemptRecord, StartRecord
from toolkit.rundir.states import Cause, Next

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "docs" / "samples"


@pytest.fixture
def attempt(run_directory):
    attempt = run_directory.attempt(0)
    attempt.path.mkdir(parents=True)
    return attempt


@pytest.mark.parametrize(
    ("kind", "name", "sample"),
    [(StartRecord, "start.json", "attempt_start.json"), (AttemptRecord, "exit.json", "attempt_exit.json")],
)
def test_a_record_is_written_as_it_was_read(attempt, kind, name, sample):
    path = attempt.path / name
    value = {**json.loads((SAMPLES / sample).read_text()), "of_a_later_version": [1]}
    path.write_text(json.dumps(value))
    record = kind.read(attempt)
    path.unlink()
    record.write(attempt)
    assert json.loads(path.read_text()) == value
    assert list(json.loads(path.read_text())) == list(value)


def test_the_end_that_another_start_wrote_has_no_symptom_and_no_evidence(attempt):
    value = json.loads((SAMPLES / "attempt_exit.json").read_text())
    for key in ("symptom", "evidence", "seconds"):
        del value[key]
    attempt.exit_file.write_text(json.dumps(value))
    end = AttemptRecord.read(attempt)
    assert (end.cause, end.next, end.symptom, list(end.evidence), end.seconds) == (
        Cause.CRASHED,
        Next.RESTART,
        "",
        [],
        None,
    )


def test_a_task_that_is_done_keeps_its_start_in_its_end(attempt):
    start = json.loads((SAMPLES / "attempt_start.json").read_text())
    end = {**json.loads((SAMPLES / "attempt_exit.json").read_text()), "begun": start, "usage": []}
    attempt.exit_file.write_text(json.dumps(end))
    assert StartRecord.read(attempt).as_json() == start
    AttemptRecord.read(attempt).write(attempt)
    assert json.loads(attempt.exit_file.read_text()) == end


def test_neither_is_there_before_the_attempt_has_started(attempt):
    assert (StartRecord.read(attempt), AttemptRecord.read(attempt)) == (None, None)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("start.json", {"start": "0"}), ("start.json", {"job_id": None}), ("exit.json", {"cause": "boredom"}),
        ("exit.json", {"final": 1}), ("exit.json", {"begun": {"start": 0}}), ("exit.json", {"begun": [1]}),
    ],
)  # fmt: skip
def test_a_damaged_record_is_refused_with_its_name(attempt, name, change):
    kind, sample = (StartRecord, "attempt_start") if name == "start.json" else (AttemptRecord, "attempt_exit")
    value = {**json.loads((SAMPLES / f"{sample}.json").read_text()), **change}
    (attempt.path / name).write_text(json.dumps(value))
    with pytest.raises(
        DamagedFileError, match="another version of toolkit wrote this file, or it is damaged"
    ) as caught:
        kind.read(attempt)
    assert caught.value.where == str(attempt.path / name)


def test_the_rank_that_caused_the_end_is_named(attempt):
    attempt.exit_file.write_text((SAMPLES / "attempt_exit.json").read_text())
    end = AttemptRecord.read(attempt)
    assert (end.culprit, end.blaming("killed")) == ("rank 3 on node2", "rank 3 on node2: killed")


def test_no_other_module_reads_the_files_by_their_keys():
    reads = re.compile(r"(read|write)_json\w*\([\w.()]*\b(exit_file|start_file)")
    found = [str(path) for path in (ROOT / "toolkit").rglob("*.py") if reads.search(path.read_text())]
    assert [Path(path).name for path in found if "reserve" not in path] == ["attempt_records.py"]
