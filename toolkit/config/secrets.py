"""Secrets: how [env] secrets refers to them, and which other values look like one and should become references."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from toolkit.config.document import Origin
from toolkit.config.resolved import ResolvedJob

HIDDEN = "***"
# A variable is recognised by the last part of its name; a script's argument only by unambiguous names, unlike `pad_token`.
_VARIABLE = re.compile(r"(?i).*(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|\w*KEY)")
_ARGUMENT = re.compile(r"(?i).*(?:^|_)(?:SECRET|PASSWORD|PASSWD|PASSPHRASE|API_?KEY|ACCESS_KEY|PRIVATE_KEY|AUTH_TOKEN)")
# GitHub, GitLab, Hugging Face, OpenAI and others, AWS, Slack, a private key, a JSON web token.
_VALUE = re.compile(
    r"gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}|hf_[A-Za-z0-9]{20,}|sk-[\w-]{20,}|AKIA[0-9A-Z]{16}"
    r"|xox[abprs]-[\w-]{10,}|-----BEGIN [A-Z ]*PRIVATE KEY-----|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]+"
)
_NO_SECRET = re.compile(r"|\d+|(?i:true|false|yes|no|on|off|none)|[/~.].*")  # numbers, switches and paths


def looks_secret(key: str, value: Any) -> bool:
    """True if the value of a dotted key is likely a secret in plain text."""
    if not isinstance(value, str):
        return False
    if _VALUE.search(value):
        return True
    table, _, name = key.rpartition(".")
    of_variable = table in ("env.vars", "site_env.vars", "network.vars")
    telling = _VARIABLE if of_variable else _ARGUMENT
    in_question = of_variable or key.startswith("args.")
    return in_question and bool(telling.fullmatch(name)) and not _NO_SECRET.fullmatch(value)


def shown(key: str, value: Any) -> Any:
    """A value that is safe to print: `***` for what looks like a secret."""
    if isinstance(value, list):
        return [shown(key, one) for one in value]
    return HIDDEN if looks_secret(key, value) else value


def shown_origin(key: str, origin: Origin) -> Origin:
    """An origin that is safe to print: that of a `--set` contains the value."""
    name, equals, value = origin.detail.partition("=")
    return Origin(origin.layer, f"{name}={HIDDEN}") if equals and looks_secret(key, value) else origin


def shown_job(job: ResolvedJob) -> dict[str, Any]:
    """A resolved job that is safe to print."""
    content = shown_tables(job.model_dump(mode="json", by_alias=True, exclude={"origins"}))
    return content | {"origins": {key: asdict(shown_origin(key, origin)) for key, origin in job.origins.items()}}


def shown_tables(content: dict[str, Any], above: str = "") -> dict[str, Any]:
    """A tree of tables that is safe to print."""
    return {
        name: shown_tables(value, f"{above}{name}.") if isinstance(value, dict) else shown(f"{above}{name}", value)
        for name, value in content.items()
    }


def shown_arguments(arguments: list[str]) -> list[str]:
    """A command line that is safe to record: without the values that look like secrets."""
    kept = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        secret = equals and looks_secret(key.lstrip("-"), value)
        kept.append(f"{key}={HIDDEN}" if secret else _VALUE.sub(HIDDEN, argument))
    return kept


def likely_secrets(job: ResolvedJob) -> Iterator[str]:
    """The dotted keys of a job whose values look like secrets."""
    for key, value in job.values():
        values = value if isinstance(value, list) else [value]
        if any(looks_secret(key, one) for one in values):
            yield key
