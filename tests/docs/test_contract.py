"""The contract page: its generated parts are current, its schemas hold its samples and what real runs leave."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from toolkit.config import reference as keys
from toolkit.rundir import reference as endings
from toolkit.rundir.files import read_lines
from toolkit.rundir.states import ENDINGS, Cause, Next, RunState

DOCS = Path(__file__).parents[2] / "docs"
SCHEMA = json.loads((DOCS / "schemas" / "run-directory.schema.json").read_text())
SAMPLES = sorted((DOCS / "samples").glob("*.json"))


def check(name: str, value: Any) -> None:
    validator_of(name).validate(value)


@cache
def validator_of(name: str) -> jsonschema.Draft202012Validator:
    """The schema itself is checked once: that takes longer than a value."""
    schema = {**SCHEMA, "$ref": f"#/$defs/{name}"}
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_generated_tables_are_current() -> None:
    page = (DOCS / "contract.md").read_text()
    assert endings.embed(page) == page, "run: python -m toolkit.rundir.reference docs/contract.md"
    page = (DOCS / "keys.md").read_text()
    assert keys.embed(page, where="keys.md") == page, "run: python -m toolkit.config.reference docs/keys.md"


def test_every_state_is_on_the_page() -> None:
    page = (DOCS / "contract.md").read_text()
    section = page[page.index("## States and transitions") : page.index("How an attempt's end")]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == [state.value for state in RunState]


def test_the_schemas_know_every_word_for_an_end() -> None:
    finals = {ending.final_state for ending in ENDINGS.values()}
    follow = set(Next) - {Next.END, Next.RESTART}
    words = {"cause": set(Cause), "next": set(Next), "state": finals}
    of_attempt = SCHEMA["$defs"]["attempt_exit"]["properties"]
    assert {key: set(of_attempt[key]["enum"]) for key in words} == words
    assert set(SCHEMA["$defs"]["end"]["properties"]["state"]["enum"]) == finals | follow


def test_every_definition_has_a_sample() -> None:
    assert {path.stem for path in SAMPLES} == set(SCHEMA["$defs"])


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_samples_hold_and_a_missing_key_does_not(path: Path) -> None:
    sample = json.loads(path.read_text())
    check(path.stem, sample)
    for key in SCHEMA["$defs"][path.stem]["required"]:
        with pytest.raises(jsonschema.ValidationError):
            check(path.stem, {name: value for name, value in sample.items() if name != key})


def test_a_real_run_keeps_to_the_schemas(finished_runs: list[Path]) -> None:
    seen = set()
    for run in finished_runs:
        for pattern, name in (
            ("record.json", "record"), ("submitted-*.json", "submitted"), ("starts/*/claim.json", "claim"),
            ("starts/*/end.json", "end"), ("attempts/*/start.json", "attempt_start"),
            ("attempts/*/exit.json", "attempt_exit"), ("attempts/*/ranks/*.json", "rank_start"),
            ("attempts/*/errors/*.json", "rank_error"), ("attempts/*/usage/*.json", "usage"),
        ):  # fmt: skip
            for path in run.glob(pattern):
                check(name, json.loads(path.read_text()))
                seen.add(name)
        for path in run.glob("attempts/*/events.jsonl"):
            for event in read_lines(path):
                check("event", event)
                seen.add("event")
    assert seen >= {
        "record",
        "submitted",
        "claim",
        "end",
        "attempt_start",
        "attempt_exit",
        "rank_start",
        "rank_error",
        "usage",
        "event",
    }


@pytest.fixture(scope="module")
def finished_runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One run that completes and one that fails, both for real, on this machine."""
    from click.testing import CliRunner

    from toolkit.cli.main import cli
    from toolkit.errors import ToolkitError

    folder = tmp_path_factory.mktemp("contract")
    for name, command in (("good", "true"), ("bad", "exit 3")):
        job = folder / f"{name}.toml"
        job.write_text(f'[job]\nentry = ["bash", "-c", "{command}"]\nranks_per_node = 2\n')
        result = CliRunner().invoke(cli, ["submit", str(job), "--site", "local", "--runs", str(folder), "--wait"])
        assert not isinstance(result.exception, ToolkitError), result.exception
        assert result.exit_code == (0 if name == "good" else 3), result.output
    return [path.parent for path in folder.glob("*/*/record.json")]
