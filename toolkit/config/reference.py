"""Generate the key reference in docs/keys.md from the models: `python -m toolkit.config.reference docs/keys.md`.

Only the part of the page between two marker lines is generated.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from toolkit.config.refusal import table_model
from toolkit.config.resolved import JobFile
from toolkit.config.site import Site
from toolkit.config.table import form_of
from toolkit.errors import ToolkitError

__all__ = ["schema_text"]

FILES: dict[str, type[BaseModel]] = {"job": JobFile, "site": Site}
_HEADERS: dict[Any, str] = {dict: "[{}.NAME]", list: "[[{}]]"}
BEGIN, END = "<!-- keys: begin -->", "<!-- keys: end -->"


def reference() -> str:
    """Return the Markdown tables with the keys of the job file and of the site file."""
    lines: list[str] = []
    for kind, model in FILES.items():
        lines += [f"## Keys of the {kind} file", ""]
        top = [(name, field) for name, field in _keys(model) if table_model(field.annotation) is None]
        if top:
            lines += [*_table(top), ""]
        for name, field in _keys(model):
            table = table_model(field.annotation)
            if table is None:
                continue
            header = _HEADERS.get(get_origin(field.annotation), "[{}]").format(name)
            lines += [f"**`{header}`** {field.description}", "", *_table(list(_keys(table))), ""]
            for own, inner in _keys(table):
                if (nested := table_model(inner.annotation)) is not None:
                    lines += [f"**`[{name}.{own}.NAME]`** {inner.description}", "", *_table(list(_keys(nested))), ""]
    return "\n".join(lines)


def _keys(model: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    for attribute, field in model.model_fields.items():
        yield field.alias or attribute, field


def _table(keys: list[tuple[str, FieldInfo]]) -> list[str]:
    rows = [
        f"| `{name}` | {_cell(form_of(field))} | {_cell(_default(field))} | {_cell(field.description or '')} |"
        for name, field in keys
    ]
    return ["| key | value | default | meaning |", "|---|---|---|---|", *rows]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _default(field: FieldInfo) -> str:
    extra = field.json_schema_extra
    if isinstance(extra, dict) and "x-default" in extra:
        return str(extra["x-default"])
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    assert value is not PydanticUndefined
    return f"`{json.dumps(value)}`"


def embed(page: str, *, where: str) -> str:
    """Return `page` with the key tables inserted between its marker lines.

    Raises:
        ToolkitError: the page does not contain the marker lines.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ToolkitError("markers of the key tables not found", where=where, fix=f"add the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{reference()}\n{END}{after}"


def main() -> None:
    """Rewrite the page whose path is the only argument."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m toolkit.config.reference docs/keys.md")
    path = Path(sys.argv[1])
    try:
        path.write_text(embed(path.read_text(), where=str(path)))
    except OSError as error:
        sys.exit(f"toolkit: {path}: {error.strerror}")
    except ToolkitError as error:
        sys.exit(f"toolkit: {error}")


def file_schema(kind: str) -> dict[str, Any]:
    """Return the JSON schema (2020-12) of the file `kind`, "job" or "site"."""
    schema = FILES[kind].model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": f"toolkit {kind} file"}


def schema_text(kind: str) -> str:
    """Return the schema as a string, formatted as in docs/schemas."""
    return json.dumps(file_schema(kind), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    main()
