"""Tensor names and plain values survive the way into a file and back."""

from __future__ import annotations

import json
import math
from collections import defaultdict

import h5py
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from toolkit.checkpoint.format import jsonvalues
from toolkit.checkpoint.format.shard_layout import escape, unescape
from toolkit.errors import ToolkitError

any_text = st.text(st.characters(codec=None, categories=None), max_size=20)


@given(any_text)
@example("a/b%2Fc")
@example("%")
@example("..")
@example("\ud800x")
def test_a_name_comes_back(name):
    assert unescape(escape(name)) == name


@given(any_text, any_text)
@example("a/b", "a%2Fb")
@example("", "%")
def test_different_names_stay_different(first, second):
    assert (escape(first) == escape(second)) == (first == second)


@given(st.lists(any_text, unique=True, max_size=5))
@example([".", "..", "a/b", "/", "", "\x00"])
def test_hdf5_takes_every_escaped_name(names):
    with h5py.File("names", "w", driver="core", backing_store=False) as file:
        for name in names:
            file.create_group(escape(name))
        assert {unescape(link) for link in file} == set(names)


plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | any_text,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(any_text | st.integers() | st.tuples(st.integers()), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(plain_values)
@example({"$tuple": [1]})
@example({1: "a", "1": "b"})
@example((1, [2, (3,)], math.inf))
def test_a_plain_value_comes_back_with_its_types(value):
    text = json.dumps(jsonvalues.encode(value, "value"), allow_nan=False)
    assert repr(jsonvalues.decode(json.loads(text), "value")) == repr(value)


def test_nan_comes_back():
    assert math.isnan(jsonvalues.decode(jsonvalues.encode(math.nan, "value"), "value"))


@pytest.mark.parametrize("value", [object(), defaultdict(int), len, int, memoryview(b"")])
def test_other_types_are_refused_by_place(value):
    with pytest.raises(ToolkitError, match=r"state\['a'\]\[1\]"):
        jsonvalues.encode({"a": [0, value]}, "state")
