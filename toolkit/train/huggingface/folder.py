"""Check the folder of a causal language model without torch and transformers, as before a submission."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.config.resolved import ResolvedJob
from toolkit.errors import ToolkitError

__all__ = ["FETCH", "STYLED", "check_fit", "read_folder"]

FETCH = "fetch the whole folder, for example with `hf download NAME --local-dir FOLDER`"
# The values of `model_type` with a style for each layer; see `models`.
STYLED = ("llama", "mistral", "qwen2", "qwen3")
_REFUSED = {
    "auto_map": ("needs Python code of the folder, which toolkit does not run", "use a model that transformers contains"),
    "quantization_config": ("describes quantised weights", "use unquantised weights, with adapters.quantize"),
    "device_map": ("places layers on devices", "remove device_map, and set parallel.shard or parallel.tp"),
}  # fmt: skip


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the configurations of a model and of its tokenizer. Raises a ToolkitError if toolkit cannot train it."""
    found = []
    for path in (folder / "config.json", folder / "tokenizer_config.json"):
        try:
            settings = dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            why = getattr(error, "strerror", None) or error
            raise ToolkitError(f"cannot be read as JSON: {why}", where=str(path), fix=FETCH) from None
        if name := next((name for name in _REFUSED if settings.get(name)), None):
            raise ToolkitError(f"{name} {_REFUSED[name][0]}", where=str(path), fix=_REFUSED[name][1])
        found.append(settings)
    if not any(folder.glob("*.safetensors")):
        pickles = [path.name for path in sorted(folder.iterdir()) if path.suffix in (".bin", ".pt", ".pth", ".ckpt")]
        message = f"{pickles[0]} is a pickle, which may run code" if pickles else "contains no weights"
        raise ToolkitError(message, where=str(folder), fix="use a folder with *.safetensors" if pickles else FETCH)
    return found[0], found[1]


def check_fit(settings: Mapping[str, Any], job: ResolvedJob, context: int, *, is_packed: bool) -> None:
    """Raise a ToolkitError for settings of the job that the model of a configuration cannot have."""
    kind = settings.get("model_type")
    # Qwen2 has a window that only `use_sliding_window` enables.
    names = ["max_position_embeddings", *(["sliding_window"] if settings.get("use_sliding_window", True) else [])]
    limits = [settings.get(name) for name in names]
    most = min((limit for limit in limits if isinstance(limit, int) and limit), default=context)
    for where, is_wrong, message, fix in (
        ("parallel.pp", job.parallel.pp > 1, "models of transformers have no pipeline stages", "set pp = 1"),
        ("parallel.sequence", job.parallel.sequence, "models of transformers need whole sequences", "set it to false"),
        ("args.packed", is_packed and kind not in STYLED, f"expected one of {', '.join(STYLED)}, got a {kind}", "set packed = false"),
        ("args.context", context > most, f"the model attends to {most} tokens, got {context}", f"set it to {most}"),
    ):  # fmt: skip
        if is_wrong:
            raise ToolkitError(message, where=where, fix=fix)
