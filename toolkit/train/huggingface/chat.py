"""Chat messages as rows of tokens, of which only those of the assistant are trained.

A row contains one conversation, or several. The first token of each is stored as its complement, a negative number, from
which a model derives positions and a mask.
"""

import json
import re
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toolkit.errors import ToolkitError

__all__ = ["IGNORED", "check_template", "encode", "rows_of"]

IGNORED = -100  # the target of tokens without a loss
_MARKED = re.compile(r"\{%-?\s*generation\b")  # in templates that mark replies themselves
_PROBE = [{"role": role, "content": role} for role in ("user", "assistant") * 2]
Conversation = tuple[np.ndarray, np.ndarray]  # its tokens, and True for those to train
Rows = tuple[Tensor, Tensor, str]  # tokens and targets, each (rows, context), and a line that describes them


def encode(tokenizer: Any, record: Any) -> Conversation:
    """Apply the tokenizer's chat template to the messages of a record.

    A reply is what the assistant's message appends to the rendered messages before it, with the generation prompt.
    Raises a ValueError if there are no messages, or if one changes how the template renders earlier ones.
    """
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not all(isinstance(one, dict) and "role" in one for one in messages):
        raise ValueError('expected {"messages": [{"role": ..., "content": ...}, ...]}')
    for number, message in enumerate(messages, 1):
        content = message.get("content")
        # Templates render any value, such as a list of parts or None, as the text of its Python object.
        if not isinstance(content, str) and (content is not None or not message.get("tool_calls")):
            raise ValueError(f"expected a string as the content of message {number}, got {json.dumps(content)[:60]}")
    render = tokenizer.apply_chat_template
    if _MARKED.search(tokenizer.chat_template):
        marked = render(messages, return_dict=True, return_assistant_tokens_mask=True)
        return np.array(marked["input_ids"], np.int32), np.array(marked["assistant_masks"], bool)
    whole, replies = render(messages, tokenize=False), []
    for number in [number for number, message in enumerate(messages) if message["role"] == "assistant"]:
        before = render(messages[:number], tokenize=False, add_generation_prompt=True)
        after = render(messages[: number + 1], tokenize=False)
        if not (after.startswith(before) and whole.startswith(after)):
            raise ValueError(f"the chat template renders the messages before reply {number + 1} in two ways")
        replies.append(range(len(before), len(after)))
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    trained = [any(begin in reply for reply in replies) for begin, _ in encoded["offset_mapping"]]
    return np.array(encoded["input_ids"], np.int32), np.array(trained, bool)


def check_template(tokenizer: Any, where: str) -> None:
    """Raise a ToolkitError if the tokenizer's chat template does not show which tokens are replies."""
    fix = "use a template that only appends messages, or marks replies with {% generation %}"
    try:
        if not encode(tokenizer, {"messages": _PROBE})[1].any():
            raise ValueError("the chat template renders no reply")
    except Exception as error:  # a template may raise any exception
        message = f"cannot find the tokens of replies: {error}"
        raise ToolkitError(
            message if tokenizer.chat_template else "has no chat template", where=where, fix=fix
        ) from error


def rows_of(conversations: Sequence[Conversation], context: int, padding: int, *, is_packed: bool) -> Rows:
    """Put conversations, cut to `context` tokens, into rows. Raises a ToolkitError if none has a reply."""
    # A token is trained as the target of the one before it, so the first one is not trained.
    used = [(ids[:context], trained[:context]) for ids, trained in conversations if trained[1:context].any()]
    if not used:
        message, fix = f"no conversation has a reply within {context} tokens", "add replies, or increase args.context"
        raise ToolkitError(message, where="data.paths", fix=fix)
    lengths = [len(ids) for ids, _ in used]
    members = _packed(lengths, context) if is_packed else [[number] for number in range(len(used))]
    tokens, targets = (np.full((len(members), context), value, np.int32) for value in (padding, IGNORED))
    for row, numbers in enumerate(members):
        begin = 0
        for ids, trained in (used[number] for number in numbers):
            end = begin + len(ids)
            tokens[row, begin:end] = (~ids[0], *ids[1:])
            targets[row, begin : end - 1] = np.where(trained[1:], ids[1:], IGNORED)
            begin = end
    line = (
        f"chat: {len(used)} conversations in {len(members)} rows, {sum(lengths) / tokens.size:.0%} filled, "
        f"{(targets != IGNORED).sum() / sum(lengths):.0%} trained; {sum(len(ids) > context for ids, _ in conversations)} "
        f"cut to {context} tokens, {len(conversations) - len(used)} without a reply omitted"
    )
    return torch.from_numpy(tokens), torch.from_numpy(targets), line


def _packed(lengths: Sequence[int], context: int) -> list[list[int]]:
    """Return the members of each row: the longest first, each in the fullest row that has space for it."""
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # the space of each row and its number, sorted
    for number in sorted(range(len(lengths)), key=lambda one: -lengths[one]):
        at = bisect_left(free, (lengths[number], 0))
        space, row = free.pop(at) if at < len(free) else (context, len(rows))
        rows += [[]] if row == len(rows) else []
        rows[row].append(number)
        insort(free, (space - lengths[number], row))
    return sorted(map(sorted, rows))  # in the order of the data, whose end may be held out
