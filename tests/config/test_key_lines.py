"""An error that names the wrong line is worse than none: the finder agrees with what a TOML writer wrote."""

import tomllib

import tomlkit
from hypothesis import given
from hypothesis import strategies as st

from toolkit.config.document import key_lines, line_of

TEXT = '''\
top = 1
# [not.a.table]
[job]  # a comment with = and [
"name" = "a # b = c"
'quoted key' = """
steps = 1
[train]
\\""" still \\"" inside
"""
list = [
  1, # ]
  "]", [2],
]
nodes = { a = "}", b = [1, 2] }
args.deep.x = 5

[train]
steps = 2
  [train.inner]
  indented = \'\'\'
[x]\'\'\'\'
[[many]]
a = 1
[[many]]
a = 2
'''


def test_headers_keys_and_what_only_looks_like_them():
    tomllib.loads(TEXT)
    lines = key_lines(TEXT)
    assert lines == {
        ("top",): 1,
        ("job",): 3,
        ("job", "name"): 4,
        ("job", "quoted key"): 5,
        ("job", "list"): 10,
        ("job", "nodes"): 14,
        ("job", "args"): 15,
        ("job", "args", "deep"): 15,
        ("job", "args", "deep", "x"): 15,
        ("train",): 17,
        ("train", "steps"): 18,
        ("train", "inner"): 19,
        ("train", "inner", "indented"): 20,
        ("many",): 22,
        ("many", "0"): 22,
        ("many", "0", "a"): 23,
        ("many", "1"): 24,
        ("many", "1", "a"): 25,
    }
    assert line_of(lines, ("job", "nodes", "a")) == 14
    assert line_of(lines, ("job", "missing")) == 3
    assert line_of(lines, ("missing",)) == 1


scalars = st.integers() | st.booleans() | st.text() | st.floats(allow_nan=False)
values = scalars | st.lists(scalars, max_size=4) | st.dictionaries(st.text(min_size=1), scalars, max_size=3)
files = st.dictionaries(st.text(min_size=1), st.dictionaries(st.text(), values, max_size=4), max_size=4)


@given(files)
def test_every_key_that_a_writer_writes_is_found_in_order(content):
    text = tomlkit.dumps(content)
    lines = key_lines(text)
    parsed = tomllib.loads(text)
    for table, keys in parsed.items():
        assert text.split("\n")[lines[(table,)] - 1].startswith("[")
        places = [lines[(table, key)] for key in keys]
        assert places == sorted(places)
        assert all(place >= lines[(table,)] for place in places)
