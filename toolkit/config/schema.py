"""JSON schemas of job and site files, for editors and for checks outside Python."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel

from toolkit.config.resolved import JobFile
from toolkit.config.site import Site

FILES: dict[str, type[BaseModel]] = {"job": JobFile, "site": Site}


def file_schema(kind: str) -> dict[str, Any]:
    """Return the JSON schema (2020-12) of the file `kind`, "job" or "site"."""
    schema = FILES[kind].model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": f"toolkit {kind} file"}


def schema_text(kind: str) -> str:
    """Return the schema in the form of the file under docs/schemas."""
    return json.dumps(file_schema(kind), indent=2, ensure_ascii=False) + "\n"
