"""Chat data: which tokens are trained, how rows are packed, and which templates and records are refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

from toolkit.errors import ToolkitError
from toolkit.jobs.finetune_lora import tiny_model
from toolkit.train.data import JsonLinesSource
from toolkit.train.data.broken import BrokenRecordError
from toolkit.train.huggingface.chat import IGNORED, check_template, encode, rows_of

MESSAGES = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Grüezi"},
    {"role": "assistant", "content": "Salü!"},
    {"role": "user", "content": "1 + 1"},
    {"role": "assistant", "content": "2"},
]
MARKED = (
    "{% for one in messages %}<{{ one.role }}>{% if one.role == 'assistant' %}{% generation %}{{ one.content }}<end>"
    "{% endgeneration %}{% else %}{{ one.content }}<end>{% endif %}{% endfor %}"
)
# As templates that remove what the assistant thought before earlier replies.
REWRITING = (
    "{% for one in messages %}<{{ one.role }}>{% if one.role == 'assistant' and loop.last %}hm{% endif %}"
    "{{ one.content }}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def tokenizer():
    return tiny_model().tokenizer


@pytest.mark.parametrize("template", [None, MARKED])
def test_only_replies_are_trained_with_their_ends(tokenizer, template):
    tokenizer.chat_template = template or tokenizer.chat_template
    check_template(tokenizer, "x")
    ids, trained = encode(tokenizer, {"messages": MESSAGES})
    assert ids.tolist() == tokenizer.apply_chat_template(MESSAGES, return_dict=True)["input_ids"]
    ends = np.flatnonzero(np.diff(trained.astype(int))) + 1
    texts = [tokenizer.decode(ids[begin:end]) for begin, end in zip([0, *ends], [*ends, None], strict=True)]
    assert texts == [
        "<system>Be kind.<end><user>Grüezi<end><assistant>", "Salü!<end>", "<user>1 + 1<end><assistant>", "2<end>"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (REWRITING, "renders the messages before reply 2 in two ways"),
        ("{{ messages[0].content }}", "cannot find the tokens of replies"),
        ("{{ raise_exception('no roles') }}", "no roles"),
        (None, "has no chat template"),
    ],
)
def test_a_template_that_does_not_show_replies_is_refused(tokenizer, template, message):
    tokenizer.chat_template = template
    with pytest.raises(ToolkitError, match=message) as error:
        check_template(tokenizer, "/models/x")
    assert error.value.where == "/models/x" and "generation" in error.value.fix


def conversation(length: int, first_trained: int) -> tuple[np.ndarray, np.ndarray]:
    ids = np.arange(10, 10 + length, dtype=np.int32)
    return ids, np.arange(length) >= first_trained


@pytest.mark.parametrize("content", [[{"type": "text", "text": "4"}], None, 4])
def test_content_that_is_no_string_is_refused(tokenizer, content):
    messages = [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": content}]
    with pytest.raises(ValueError, match=r"expected a string as the content of message 2, got (\[\{|null|4)"):
        encode(tokenizer, {"messages": messages})


def test_targets_are_the_next_trained_tokens_of_the_same_conversation():
    tokens, targets, line = rows_of([conversation(3, 1), conversation(4, 3)], 8, 0, is_packed=True)
    assert tokens.tolist() == [[~10, 11, 12, ~10, 11, 12, 13, 0]]
    none = IGNORED
    assert targets.tolist() == [[11, 12, none, none, none, 13, none, none]]
    assert line == (
        "chat: 2 conversations in 1 rows, 88% filled, 43% trained; 0 cut to 8 tokens, 0 without a reply omitted"
    )


def test_long_conversations_are_cut_and_those_without_a_reply_are_omitted():
    given = [conversation(9, 2), conversation(9, 5), conversation(3, 3), conversation(2, 1)]
    tokens, _, line = rows_of(given, 5, 0, is_packed=False)
    assert tokens.tolist() == [[~10, 11, 12, 13, 14], [~10, 11, 0, 0, 0]]
    assert "2 cut to 5 tokens, 2 without a reply omitted" in line
    with pytest.raises(ToolkitError, match="no conversation has a reply within 2 tokens"):
        rows_of([conversation(9, 2)], 2, 0, is_packed=True)


def test_rows_are_full_and_keep_the_order_of_the_data():
    rng = np.random.default_rng(0)
    given = [conversation(int(length), 1) for length in rng.integers(2, 65, 300)]
    tokens, _, _ = rows_of(given, 64, 0, is_packed=True)
    assert (tokens != 0).float().mean() > 0.95
    assert int((tokens < 0).sum()) == 300


def test_a_record_without_messages_names_its_line(tokenizer, tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text("\n".join(map(json.dumps, [{"messages": MESSAGES}, {"text": "x"}])))
    source = JsonLinesSource([path], convert=lambda record: encode(tokenizer, record))
    with pytest.raises(BrokenRecordError, match=r"chat\.jsonl:2: .*expected \{.messages.: \[\{.role"):
        source.read_or_replace(1)
