"""The traffic of each dimension in `topo groups`: nominal, from a model (--model), or single values (--bytes)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from toolkit.config.resolved import ResolvedJob
    from toolkit.topology.model_traffic import Step, Transformer
    from toolkit.topology.traffic import Traffic

# Names in --model, with the fields of a Transformer; the number without a name is that of the parameters.
_WORDS = {
    "layers": "layers",
    "width": "width",
    "context": "context",
    "key-width": "key_width",
    "experts": "experts",
    "experts-per-token": "experts_per_token",
    "bytes": "bytes_per_element",
}
_MUST = ("layers", "width", "context")
_EXAMPLE = "70e9,layers=80,width=8192,context=4096"


def read_model(text: str) -> Transformer:
    """Parse the value of --model, such as "70e9,layers=80,width=8192,context=4096"."""
    from toolkit.topology.model_traffic import Transformer

    first, *words = (word.strip() for word in text.split(","))
    parameters = _number(first)
    if not parameters:
        raise _refusal(f"expected a number of parameters, got {first!r}", f"begin with one, as in {_EXAMPLE}")
    given: dict[str, int] = {}
    for word in words:
        name, _, number = word.partition("=")
        value = _number(number)
        if name not in _WORDS:
            raise _refusal(f"{name!r} is not a property of a model", f"use {', '.join(_WORDS)}, as in {_EXAMPLE}")
        if not value or value != int(value):
            raise _refusal(f"expected a whole number of at least 1, got {word!r}", f"write {name}=N, as in {_EXAMPLE}")
        given[_WORDS[name]] = int(value)
    if missing := [name for name in _MUST if name not in given]:
        raise _refusal(f"{text!r} lacks {' and '.join(missing)}", f"add the missing values, as in {_EXAMPLE}")
    return Transformer(parameters, **given)


def traffic_of_job(
    resolved: ResolvedJob, sizes: Mapping[str, int], model: Transformer | None, payloads: tuple[str, ...]
) -> dict[str, Traffic]:
    """Return the traffic per dimension: from the model with the job's batch, else nominal; --bytes overrides it."""
    from toolkit.topology.model_traffic import model_traffic
    from toolkit.topology.placement import nominal_traffic

    traffic = nominal_traffic(sizes)
    if model is not None:
        settings = resolved.parallel
        traffic |= model_traffic(model, job_step(resolved, sizes), sizes, settings.zero, settings.context)
    for text in payloads:
        name, _, number = text.partition("=")
        payload_bytes = _number(number)
        if name not in traffic or payload_bytes is None:
            raise _refusal(
                f"expected DIM=BYTES, got {text!r}",
                f"write tp=4e9, for example; DIM is one of {', '.join(traffic)}",
                where="--bytes",
            )
        if sizes.get(name, 1) == 1:
            raise _refusal(
                f"dimension {name} has a single rank, which exchanges nothing",
                f"omit {text}, or set parallel.{name}",
                "--bytes",
            )
        traffic[name] = replace(traffic[name], payload_bytes=payload_bytes, source="--bytes")
    return traffic


def job_step(resolved: ResolvedJob, sizes: Mapping[str, int]) -> Step:
    """Return how a rank divides the job's optimizer step into micro-batches."""
    from toolkit.topology.model_traffic import step_of

    return step_of(resolved.train.batch, resolved.train.micro_batch, sizes)


def _number(text: str) -> float | None:
    """Return a finite number of at least 0; None if the text is not one."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 <= number < float("inf") else None


def _refusal(message: str, fix: str, where: str = "--model") -> Exception:
    from toolkit.errors import ToolkitError

    return ToolkitError(message, where=where, fix=fix)
