from __future__ import annotations

import gzip
import json
import os
import pickle

import numpy as np
import pytest

from toolkit.errors import NotFoundError, ToolkitError
from toolkit.train.data import BrokenRecordError, JsonLinesSource
from toolkit.train.data import line_index as line_index_module
from toolkit.train.data.line_index import index_path, line_index


def written(path, text):
    path.write_bytes(text.encode())
    return path


def values(source):
    return source.take(np.arange(source.count)).tolist()


@pytest.mark.parametrize(
    ("text", "numbers", "lines"),
    [
        ("1\n2\n3\n", [1, 2, 3], [1, 2, 3]),
        ("1\n2\n3", [1, 2, 3], [1, 2, 3]),
        ("\n\n1\n\r\n2\r\n\n3", [1, 2, 3], [3, 5, 7]),
        ("1", [1], [1]),
    ],
)
def test_empty_lines_are_no_records_and_lines_keep_their_numbers(text, numbers, lines, tmp_path):
    path = written(tmp_path / "a.jsonl", text)
    assert values(JsonLinesSource([path])) == numbers
    for _ in range(2):  # built, and read from its file
        index = line_index(path)
        assert [index.line(record) for record in range(len(index.starts))] == lines


def test_blocks_join(tmp_path, monkeypatch):
    monkeypatch.setattr(line_index_module, "_BLOCK_BYTES", 5)
    path = written(tmp_path / "a.jsonl", "".join(f"{number}\n" for number in range(300)) + "\n7")
    assert values(JsonLinesSource([path])) == [*range(300), 7]


def test_the_index_is_built_once_and_again_when_the_file_has_changed(tmp_path, monkeypatch):
    path = written(tmp_path / "a.jsonl", "1\n2\n")
    assert values(JsonLinesSource([path])) == [1, 2]
    assert index_path(path).exists()
    build = line_index_module._build
    built = []
    monkeypatch.setattr(line_index_module, "_build", lambda path: built.append(path) or build(path))
    assert values(JsonLinesSource([path])) == [1, 2] and not built
    written(path, "1\n2\n3\n")
    assert values(JsonLinesSource([path])) == [1, 2, 3] and len(built) == 1
    written(path, "4\n\n5\n")  # of the same size, a moment later
    os.utime(path, ns=(1, 1))
    assert values(JsonLinesSource([path])) == [4, 5] and len(built) == 2


@pytest.mark.parametrize("damage", [b"", b"hello", None])
def test_a_damaged_index_is_made_anew(damage, tmp_path):
    path = written(tmp_path / "a.jsonl", "1\n2\n")
    line_index(path)
    data = index_path(path).read_bytes()
    index_path(path).write_bytes(data[:-8] if damage is None else damage)
    assert values(JsonLinesSource([path])) == [1, 2]
    assert index_path(path).read_bytes() == data


def test_indexes_go_where_they_are_told_to_and_names_do_not_clash(tmp_path):
    files = []
    for folder, text in (("a", "1\n"), ("b", "2\n3\n")):
        (tmp_path / folder).mkdir()
        files.append(written(tmp_path / folder / "x.jsonl", text))
    assert values(JsonLinesSource(files, index_folder=tmp_path / "indexes")) == [1, 2, 3]
    assert len(list((tmp_path / "indexes").iterdir())) == 2
    assert not index_path(files[0]).exists()


def test_a_folder_that_takes_no_files_leaves_the_index_to_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = written(tmp_path / "a.jsonl", "1\n2\n")
    index_path(path).mkdir()  # root may write everywhere; over a folder nobody can
    monkeypatch.setattr(line_index_module, "is_unwritable", lambda error: isinstance(error, OSError))
    assert values(JsonLinesSource([path])) == [1, 2]
    assert len(list((tmp_path / "cache/toolkit/lines").iterdir())) == 1
    assert sorted(found.name for found in tmp_path.iterdir()) == [index_path(path).name, "a.jsonl", "cache"]


@pytest.mark.parametrize(("name", "command"), [("a.jsonl.gz", "gunzip -k"), ("a.jsonl", "gunzip -k")])
def test_compressed_files_are_refused_with_the_fix(name, command, tmp_path):
    path = tmp_path / name
    path.write_bytes(gzip.compress(b"1\n"))
    with pytest.raises(ToolkitError, match=rf"got a compressed file \(gzip\).* Fix: run {command} {path}"):
        JsonLinesSource([path])


def test_files_that_are_missing_or_empty_are_named(tmp_path):
    with pytest.raises(NotFoundError, match=r"none.jsonl: file not found"):
        JsonLinesSource([tmp_path / "none.jsonl"])
    for files in ([written(tmp_path / "a.jsonl", "\n\n")], []):
        with pytest.raises(ToolkitError, match="expected 1 or more records, got none"):
            JsonLinesSource(files)


def test_a_broken_line_and_one_that_cannot_be_converted_are_named_by_line(tmp_path):
    path = written(tmp_path / "a.jsonl", '{"x": 1}\n\n{"x"\n{"y": 1}\n')

    def convert(record):
        return record["x"]

    source = JsonLinesSource([path], convert=convert)
    with pytest.raises(BrokenRecordError, match=rf"{path}:3: not valid JSON: Expecting .:. delimiter: column 5\."):
        source.read(1)
    with pytest.raises(BrokenRecordError, match=rf"{path}:4: KeyError: 'x' \(in test_json_lines.py:"):
        source.read(2)
    skipping = JsonLinesSource([path], convert=convert, broken="skip")
    assert values(skipping) == [1, 1, 1]
    assert [skip.partition(": ")[0] for skip in skipping.drain_skips()] == [f"{path}:3", f"{path}:4"]


def test_it_travels_without_its_open_files(tmp_path):
    source = JsonLinesSource([written(tmp_path / "a.jsonl", json.dumps({"x": 1}))])
    source.read(0)
    assert pickle.loads(pickle.dumps(source)).read(0) == {"x": 1}
