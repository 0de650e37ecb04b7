"""Bad nodes are remembered for a day, one file each, by the site that they belong to."""

from __future__ import annotations

import json
import time
from pathlib import Path

import jsonschema
import pytest

from toolkit.errors import ToolkitError
from toolkit.rundir.bad_nodes import bad_nodes, forget_bad_node, note_bad_node, runs_of, sites_with_bad_nodes
from toolkit.rundir.known import known_runs
from toolkit.rundir.layout import RunDirectory

SCHEMA = Path(__file__).parents[2] / "docs" / "schemas" / "run-directory.schema.json"


def test_a_node_is_remembered_until_its_time_is_over(run_directory: RunDirectory) -> None:
    runs = runs_of(run_directory)
    note_bad_node(run_directory, "ours", "node3", "first")
    note_bad_node(run_directory, "ours", "node3", "Slurm reports that it failed")
    note_bad_node(run_directory, "theirs", "node4", "another cluster's")
    (bad,) = bad_nodes(runs, "ours")
    assert (bad.node, bad.reason, bad.run_id) == ("node3", "Slurm reports that it failed", run_directory.run_id)
    assert 23.9 * 3600 < bad.expires - time.time() < 24.1 * 3600
    assert sites_with_bad_nodes(runs) == ["ours", "theirs"]
    with known_runs(runs) as known:
        assert list(known) == []  # the folder is no job's
    path = runs / ".bad-nodes" / "ours" / "node3.json"
    value = json.loads(path.read_text())
    jsonschema.validate(value, {**json.loads(SCHEMA.read_text()), "$ref": "#/$defs/bad_node"})
    path.write_text(json.dumps({**value, "expires": time.time() - 1}))
    assert bad_nodes(runs, "ours") == []
    assert not path.exists()


def test_a_node_that_another_process_forgets_meanwhile_is_no_error(run_directory: RunDirectory, monkeypatch) -> None:
    note_bad_node(run_directory, "ours", "node3", "it failed")
    path = runs_of(run_directory) / ".bad-nodes" / "ours" / "node3.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "expires": 0.0}))
    remove = Path.unlink

    def removed_before(self: Path, missing_ok: bool = False) -> None:
        remove(self)
        remove(self, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", removed_before)
    assert bad_nodes(runs_of(run_directory), "ours") == []


def test_a_node_can_be_forgotten(run_directory: RunDirectory) -> None:
    note_bad_node(run_directory, "ours", "node3", "it failed")
    assert forget_bad_node(runs_of(run_directory), "ours", "node3")
    assert not forget_bad_node(runs_of(run_directory), "ours", "node3")
    assert bad_nodes(runs_of(run_directory), "ours") == []


def test_a_damaged_note_is_refused_by_its_name(run_directory: RunDirectory) -> None:
    note_bad_node(run_directory, "ours", "node3", "it failed")
    (runs_of(run_directory) / ".bad-nodes" / "ours" / "node3.json").write_text('{"node": "node3"}')
    with pytest.raises(ToolkitError, match=r"node3\.json"):
        bad_nodes(runs_of(run_directory), "ours")
