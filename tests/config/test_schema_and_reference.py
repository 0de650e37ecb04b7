"""What is published about the files is what the models say."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jsonschema
import pytest

from toolkit.config.reference import embed, file_schema, reference, schema_text
from toolkit.config.shipped import shipped_jobs
from toolkit.errors import ToolkitError
from toolkit.site.load import site_files

ROOT = Path(__file__).parents[2]
SITES = site_files({})
JOBS = shipped_jobs()


@pytest.mark.parametrize("kind", ["job", "site"])
def test_the_published_schema_is_the_models(kind):
    published = ROOT / "docs" / "schemas" / f"{kind}.schema.json"
    assert published.read_text() == schema_text(kind), f"toolkit config schema {kind} > {published}"


@pytest.mark.parametrize("name", SITES)
def test_shipped_sites_fit_the_schema(name):
    jsonschema.validate(tomllib.loads(SITES[name].read_text()), file_schema("site"))


def test_shipped_jobs_fit_the_schema():
    for path in JOBS.values():
        jsonschema.validate(tomllib.loads(path.read_text()), file_schema("job"))


@pytest.mark.parametrize("wrong", [{"job": {}}, {"job": {"entry": "a"}, "x": 1}, {"job": {"entry": "a", "nodse": 1}}])
def test_the_schema_refuses_what_the_toolkit_refuses(wrong):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, file_schema("job"))


def test_every_key_has_a_meaning():
    for kind in ("job", "site"):
        schema = file_schema(kind)
        for table in [schema, *schema["$defs"].values()]:
            for name, key in table["properties"].items():
                meaning = key.get("description") or schema["$defs"][key["$ref"].split("/")[-1]]["description"]
                # A sentence that says more than the key's own name.
                assert len(set(re.findall(r"\w+", meaning.lower())) - set(name.split("_"))) >= 2, f"{kind}: {name}"


def test_the_reference_is_written_between_the_markers(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- keys: begin -->\nSTALE\n<!-- keys: end -->\nafter\n")
    command = [sys.executable, "-m", "toolkit.config.reference", str(page)]
    subprocess.run(command, check=True)
    text = page.read_text()
    assert text.startswith("before\n<!-- keys: begin -->\n\n## Keys of the job file")
    assert text.endswith("<!-- keys: end -->\nafter\n")
    assert "STALE" not in text
    assert "| `stall_s` | a whole number, at least 1 | `900` |" in text
    assert embed(text, where="page") == text
    page.write_text("no markers")
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 1
    assert "add the lines <!-- keys: begin --> and <!-- keys: end -->" in answer.stderr


def test_the_contract_has_the_keys_of_today():
    page = ROOT / "docs" / "keys.md"
    text = page.read_text()
    assert embed(text, where=str(page)) == text, "python -m toolkit.config.reference docs/keys.md"


def test_markers_are_needed():
    with pytest.raises(ToolkitError, match="markers of the key tables not found"):
        embed("<!-- keys: begin -->", where="page")


def test_reference_rows_have_four_columns():
    rows = [line for line in reference().splitlines() if line.startswith("| `")]
    assert len(rows) > 70
    assert all(row.replace("\\|", "").count("|") == 5 for row in rows)
    assert json.loads(schema_text("job"))["title"] == "toolkit job file"
