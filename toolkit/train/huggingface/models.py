"""Causal language models of transformers, from a folder of this machine, with toolkit's parallel strategies.

Parameters keep their names, so that checkpoints, adapters and exports have those of the folder.
"""

import importlib
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.checkpoint.convert.adapters import BaseWeights
from toolkit.config.resolved import ResolvedJob
from toolkit.errors import ToolkitError
from toolkit.parallel.materialise import parameters_on_meta
from toolkit.parallel.outline import Outline
from toolkit.train.adapters.adapt import reader_of
from toolkit.train.blocks import needed_blocks
from toolkit.train.huggingface.folder import FETCH, STYLED, check_fit, read_folder

__all__ = ["CausalModel", "library", "open_folder"]

_LLAMA = {
    "self_attn.q_proj": "column by heads", "self_attn.k_proj": "column by key_heads",
    "self_attn.v_proj": "column by key_heads", "self_attn.o_proj": "row",
    "mlp.gate_proj": "column", "mlp.up_proj": "column", "mlp.down_proj": "row",
}  # fmt: skip
_QWEN3 = _LLAMA | {"self_attn.q_norm": "piece", "self_attn.k_norm": "piece"}
# The styles of a layer by `model_type`. These models also accept positions and a mask, which packed rows need.
_KNOWN = dict(zip(STYLED, (_LLAMA, _LLAMA, _LLAMA, _QWEN3), strict=True))


def library() -> Any:
    """Return the module `transformers`, which gets no access to the network. Raises a ToolkitError if it is missing."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        fix = "pip install 'toolkit[finetune]'"
        raise ToolkitError(f"cannot import transformers: {error}", where="transformers", fix=fix) from None


class CausalModel:
    """A model, its tokenizer, its outline, and `read`, which reads weights of its folder; None: they are random."""

    def __init__(self, config: Any, tokenizer: Any, folder: Path | None = None) -> None:
        """Raises a ToolkitError if the names or shapes of the weights are not those of the model."""
        self.config, self.tokenizer, self.folder = config, tokenizer, folder
        self._styles = _KNOWN.get(config.model_type, {})
        with parameters_on_meta(0):
            model = self.build()
        blocks = next(iter(needed_blocks(model, "training"))).rpartition(".")[0]
        ends = {"model.embed_tokens": "embedding", "lm_head": "head"} if self._styles else {}
        self.outline = Outline(blocks, tensor={f"{blocks}.*.{name}": one for name, one in self._styles.items()} | ends)
        self.read = reader_of(BaseWeights(folder), model, FETCH) if folder else None

    def state_dict(self) -> dict[str, str]:
        """Return the folder, whose configuration and tokenizer an export of a checkpoint copies."""
        return {"folder": str(self.folder.resolve())} if self.folder else {}

    def load_state_dict(self, state: dict[str, str]) -> None:
        """Do nothing: a resumed run may use a copy of the folder in another place."""

    def build(self) -> nn.Module:
        """Return the model with unset weights. It maps rows, as of `rows_of`, to logits."""
        made = library().AutoModelForCausalLM.from_config
        with importlib.import_module("transformers.initialization").no_init_weights():
            model: Any = made(self.config, attn_implementation="sdpa", dtype=torch.float32)
        model.tie_weights()
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                module.padding_idx = None  # wrong for a slice of rows; padding has no gradient
            elif hasattr(module, "q_proj"):
                module.heads, module.key_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        plain, is_masked = type(model), bool(self._styles)

        def forward(self: nn.Module, rows: Tensor) -> Any:
            return plain.forward(self, **_inputs(rows, is_masked=is_masked), use_cache=False).logits

        model.__class__ = type(plain.__name__, (plain,), {"forward": forward})
        return model

    def check(self, job: ResolvedJob, context: int, *, is_packed: bool) -> None:
        """Raise a ToolkitError for settings of the job that this model cannot have."""
        check_fit(vars(self.config) | {"model_type": self.config.model_type}, job, context, is_packed=is_packed)


def open_folder(folder: Path) -> CausalModel:
    """Return the model of a folder; its weights are read later. Raises a ToolkitError if toolkit cannot train it."""
    read_folder(folder)
    auto = library()
    try:
        config = auto.AutoConfig.from_pretrained(folder, local_files_only=True)
        return CausalModel(config, auto.AutoTokenizer.from_pretrained(folder, local_files_only=True), folder)
    except ToolkitError:
        raise
    except Exception as error:  # of transformers and the libraries that it calls
        message = f"transformers {auto.__version__} cannot open it: {str(error).strip().partition(chr(10))[0]:.200}"
        raise ToolkitError(message, where=str(folder), fix="use a causal language model that it contains") from error


def _inputs(rows: Tensor, *, is_masked: bool) -> dict[str, Tensor]:
    """Return arguments with which tokens attend to earlier ones of the same conversation, whose first one is negative."""
    starts, places = rows < 0, torch.arange(rows.shape[1], device=rows.device)
    tokens, number = torch.where(starts, ~rows, rows), starts.cumsum(1)
    if not is_masked:
        return {"input_ids": tokens}
    mask = (number[:, :, None] == number[:, None, :]) & (places[:, None] >= places)
    positions = places - torch.where(starts, places, 0).cummax(1).values
    return {"input_ids": tokens, "position_ids": positions, "attention_mask": mask[:, None]}
