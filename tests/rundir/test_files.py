"""Small files of a run: whole or not at all, as open as their folder, one JSON line a record."""

import os
import resource
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.errors import ToolkitError
from toolkit.rundir.files import append_line, make_folder, not_permitted, read_json, read_lines, tail_text, write_json

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@pytest.mark.parametrize("step", ["fsync", "rename"])
def test_a_write_that_fails_keeps_the_old_file_and_leaves_no_part(tmp_path, monkeypatch, step):
    path = tmp_path / "exit.json"
    write_json(path, {"code": 1})

    def full(*_arguments):
        assert read_json(path) == {"code": 1}, "a reader saw the new text before it was safe"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*{"fsync": (os, "fsync"), "rename": (Path, "replace")}[step], full)
    with pytest.raises(OSError, match="No space"):
        write_json(path, {"code": 2})
    assert read_json(path) == {"code": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["exit.json"]


def test_a_line_that_finds_no_room_leaves_no_half_of_itself(tmp_path):
    """A later line would stand behind that half, and no reader could take the file any more."""
    path = tmp_path / "events.jsonl"
    append_line(path, {"event": "started", "time": "now"})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, before[1]))  # room for 5 bytes more
    try:
        with pytest.raises(OSError, match="No space"):
            append_line(path, {"event": "stalled", "time": "now"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    append_line(path, {"event": "ended", "time": "now"})
    assert [line["event"] for line in read_lines(path)] == ["started", "ended"]


@pytest.mark.parametrize(("folder_mode", "file_mode"), [(0o700, 0o600), (0o750, 0o640)])
@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_the_folder_decides_who_can_read_and_not_the_umask(tmp_path, umask, folder_mode, file_mode):
    tmp_path.chmod(folder_mode)
    before = os.umask(umask)
    try:
        make_folder(tmp_path / "inner")
        write_json(tmp_path / "inner" / "a.json", {})
        append_line(tmp_path / "inner" / "b.jsonl", {})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "inner").stat().st_mode) == folder_mode
    assert stat.S_IMODE((tmp_path / "inner" / "a.json").stat().st_mode) == file_mode
    assert stat.S_IMODE((tmp_path / "inner" / "b.jsonl").stat().st_mode) == file_mode


@settings(max_examples=30, deadline=None)
@given(records=st.lists(st.dictionaries(st.text(), JSON), max_size=5))
def test_every_record_comes_back(tmp_path_factory, records):
    path = tmp_path_factory.mktemp("lines") / "events.jsonl"
    for record in records:
        append_line(path, record)
    assert list(read_lines(path)) == records


def test_separators_that_json_leaves_alone_do_not_end_a_record(tmp_path):
    append_line(tmp_path / "events.jsonl", {"reason": "a\u2028b\u0085c"})
    assert list(read_lines(tmp_path / "events.jsonl")) == [{"reason": "a\u2028b\u0085c"}]


def test_an_unfinished_last_line_is_no_record_yet(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step')
    assert list(read_lines(path)) == [{"step": 1}, {"step": 2}]
    path.write_text('{"step": 1}\n{"step": 2}')
    assert list(read_lines(path)) == [{"step": 1}]


def test_a_damaged_file_is_named_with_its_line(tmp_path):
    (tmp_path / "events.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(
        ToolkitError, match=r"events\.jsonl:2: invalid JSON: Unterminated string starting at: column 2\."
    ):
        list(read_lines(tmp_path / "events.jsonl"))
    (tmp_path / "exit.json").write_text("{")
    with pytest.raises(ToolkitError, match=r"exit\.json: invalid JSON"):
        read_json(tmp_path / "exit.json")


def test_tail_reads_the_end_of_a_long_file_only(tmp_path):
    path = tmp_path / "rank-0.log"
    path.write_text("".join(f"line {number}\n" for number in range(100_000)))
    assert tail_text(path, 2) == ["line 99998", "line 99999"]
    assert len(tail_text(path, 10**6, limit_bytes=1000)) < 100
    assert tail_text(tmp_path / "missing", 3) == []


def test_a_denied_access_keeps_the_systems_reason_and_names_the_folder_to_open(tmp_path):
    error = not_permitted(PermissionError(1, "Operation not permitted", str(tmp_path / "absent" / "file")))
    assert (error.message, error.where) == ("Operation not permitted", str(tmp_path / "absent" / "file"))
    assert error.fix == f"`chmod u+rwX {tmp_path}`"
