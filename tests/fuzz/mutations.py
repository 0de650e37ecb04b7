"""Texts and JSON as accidents leave them: cut, swapped, doubled, of the wrong type, too large, of another alphabet."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

TOKENS = (
    "nan", "inf", "-inf", "1e400", "-1", "0", "9" * 25, "0x10", "1_0", "1979-05-27", "07:32:00", "1979-05-27T07:32:00Z",
    "2026-02-30", "true", "''", '""', "[]", "{}", "[[1], 'a']", "{ a = { b = 1 } }", '"\\u0000"', '"a\\nb"', '"\\ud800"',
    '"$(x)"', '"~x"', '"../x"', '"%j"', "'\x1b[31m'", "\ufeff", "\u2028", "ü", "e\u0301", "\x00", "\x1b", "\r", "\r\n",
    "'''", '"""', "[job]", "[[job]]", "[args.x]", "[job.name]", "a.b.c = 1\n", "x = 1\n", "=", ".", "#", "\\", '"', "'",
    "[" * 150, "{a=" * 150, "[env]\nvars = { A = 1 }\n", '"1-99999"', '"0-9%2"', '"UNLIMITED"', "1.5", '"x.py:main"',
)  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn, texts: tuple[str, ...]) -> str:
    """One of `texts` after one to four accidents."""
    text = draw(st.sampled_from(texts))
    for _ in range(draw(st.integers(1, 4))):
        lines = text.split("\n")
        here, there = (draw(st.integers(0, len(lines) - 1)) for _ in range(2))
        token = draw(st.one_of(st.sampled_from(TOKENS), st.text(max_size=5)))
        kind = draw(st.sampled_from(("value", "value", "value", "key", "cut", "drop", "double", "swap", "insert")))
        if kind == "value" and "=" in lines[here]:
            lines[here] = f"{lines[here].partition('=')[0]}= {token}"
        elif kind == "key" and "=" in lines[here]:
            lines[here] = f"{token} ={lines[here].partition('=')[2]}"
        elif kind == "drop":
            del lines[here]
        elif kind == "double":
            lines.insert(there, lines[here])
        elif kind == "swap":
            lines[here], lines[there] = lines[there], lines[here]
        text = "\n".join(lines)
        place = draw(st.integers(0, len(text)))
        if kind == "insert":
            text = text[:place] + token + text[place:]
        elif kind == "cut":
            text = text[:place]
    return text


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.just([]), st.just({}), st.just("../x"),
    st.just(10**30), st.just("\x1b[31m"), st.just([{}]), st.just({"a": None}),
)  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn, value: Any) -> Any:
    """A JSON value with some of its parts missing, of another type, or renamed, as another version may write it."""
    if draw(st.integers(0, 9)) == 0:
        return draw(VALUES)
    if isinstance(value, dict) and value:
        name = draw(st.sampled_from(sorted(value)))
        kind = draw(st.sampled_from(("inside", "inside", "drop", "replace", "rename", "add")))
        others = {key: one for key, one in value.items() if key != name}
        if kind == "inside":
            return {**others, name: draw(damaged(value[name]))}
        if kind == "drop":
            return others
        if kind == "replace":
            return {**others, name: draw(VALUES)}
        return {**(value if kind == "add" else others), draw(st.text(max_size=5)): value[name]}
    if isinstance(value, list) and value:
        return value[: draw(st.integers(0, len(value) - 1))] + draw(st.lists(VALUES, max_size=2))
    return draw(VALUES)
