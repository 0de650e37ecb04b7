"""Fine-tune a language model of Hugging Face on chat messages. Copy this file to start your own job.

`[args] model` names the folder of a model, `[data] paths` JSON Lines of messages. Without them, a tiny model learns sums.
"""

import sys
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from toolkit.config.resolved import ResolvedJob
from toolkit.errors import ToolkitError
from toolkit.train.arguments import read_arguments
from toolkit.train.data import JsonLinesSource, MapSource, hold_out
from toolkit.train.data.text import check_same_text, named_files
from toolkit.train.held_out import HeldOut
from toolkit.train.huggingface.chat import IGNORED, check_template, encode, rows_of
from toolkit.train.huggingface.models import CausalModel, library, open_folder
from toolkit.train.trainer import Task, Trainer
from toolkit.world.facts import World


@dataclass(frozen=True)
class Arguments:
    """The table `[args]` of this job."""

    model: str = ""  # the folder of a model; empty: a tiny one with random weights
    context: Annotated[int, Field(ge=2)] = 128  # tokens of a row
    packed: bool = True  # several conversations in a row, which do not attend to each other
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.0  # fraction of the rows, at their end, for validation


def tiny_model() -> CausalModel:
    """Return a Llama with a token for each byte and each role."""
    transformers = library()
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={one: number for number, one in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<end>", "<system>", "<user>", "<assistant>"])
    template = "{% for one in messages %}<{{ one.role }}>{{ one.content }}<end>{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", chat_template=template)
    config = transformers.LlamaConfig(
        vocab_size=264, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=256, eos_token_id=257, bos_token_id=None,
    )  # fmt: skip
    return CausalModel(config, fast)


def initialise(name: str, tensor: Tensor) -> None:
    """Set random values: of the tiny model, or of a module that the folder lacks."""
    nn.init.normal_(tensor, std=0.1) if tensor.dim() > 1 else nn.init.ones_(tensor)


def weight_of(targets: Tensor) -> Tensor:
    """Return the number of trained tokens, each of which has the same weight in the loss of a step."""
    return (targets != IGNORED).sum()


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    flat, known = logits.flatten(0, 1).float(), targets.flatten().long()
    total = nn.functional.cross_entropy(flat, known, ignore_index=IGNORED, reduction="sum")
    return total / weight_of(targets).clamp_min(1)


def measure(model: nn.Module, samples: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Return the validation loss of each row, and its number of trained tokens."""
    rows = list(zip(model(samples[0]).split(1), samples[1].split(1), strict=True))
    weights = [weight_of(targets) for _, targets in rows]
    return {"loss": torch.stack([loss_of(*row) for row in rows]), "weight": torch.stack(weights)}


def conversation_about(one: int, two: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{one} + {two}?"}, {"role": "assistant", "content": f"It is {one + two}."}]


def main(world: World, config: ResolvedJob) -> None:
    """Train until `train.steps` or a stop request, and save the last step."""
    args, paths = read_arguments(Arguments, config.args), config.data.paths
    folder = config.job_directory / args.model
    if not folder.is_dir():
        fix = "pass an absolute path; a relative one starts at the folder of the job file"
        raise ToolkitError(f"folder not found: {folder}", where="args.model", fix=fix)
    model = open_folder(folder) if args.model else tiny_model()
    model.check(config, args.context, is_packed=args.packed)
    check_template(model.tokenizer, args.model)
    convert = partial(encode, model.tokenizer)
    conversations = [convert({"messages": conversation_about(*divmod(pair, 10))}) for pair in range(100)]
    if paths:
        lines = JsonLinesSource(named_files(paths, config.job_directory), convert=convert, broken=config.data.broken)
        conversations = [lines.read_or_replace(number) for number in range(lines.count)]
    padding = model.tokenizer.pad_token_id or 0
    tokens, targets, line = rows_of(conversations, args.context, padding, is_packed=args.packed)
    if world.rank == 0:
        sys.stderr.write(f"{line}\n")
    digest = sha256(tokens.numpy().tobytes() + targets.numpy().tobytes()).hexdigest()
    check_same_text(digest)
    if model.folder and config.adapters.rank and not config.adapters.base:
        adapters = config.adapters.model_copy(update={"base": str(model.folder)})
        config = config.model_copy(update={"adapters": adapters})
    learned, last = hold_out(MapSource(TensorDataset(tokens, targets)), args.held_out)
    data, held_out = {"rows": learned.count, "text": digest}, HeldOut(last, measure) if last else None
    extra = {"transformers": model} if model.folder else {}
    task = Task(model.build, initialise, model.outline, loss_of, learned, data, held_out, model.read, weight_of, extra)
    Trainer(world, config, task).train()
