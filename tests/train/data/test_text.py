import sysconfig
from pathlib import Path

import numpy as np
import pytest

from toolkit.errors import ToolkitError
from toolkit.train.data.text import Windows, named_files, read_bytes, standard_library_sources


def test_the_default_text_is_the_standard_library_without_what_was_installed():
    files = standard_library_sources()
    root = Path(sysconfig.get_path("stdlib"))
    names = [path.relative_to(root).as_posix() for path in files]
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    assert not [name for name in names if name.startswith("site-packages/")]
    assert files == standard_library_sources()


def test_reading_stops_at_the_cap(tmp_path):
    for name, content in {"b.txt": b"world", "a.txt": b"hello "}.items():
        (tmp_path / name).write_bytes(content)
    files = named_files(["*.txt"], tmp_path)
    assert [path.name for path in files] == ["a.txt", "b.txt"]
    assert read_bytes(files, max_bytes=100) == b"hello world"
    assert read_bytes(files, max_bytes=8) == b"hello wo"


def test_a_file_named_twice_is_read_once_and_absolute_patterns_are_taken_as_they_are(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "one.txt").write_bytes(b"1")
    pattern = str(tmp_path / "deep" / "*.txt")
    assert named_files(["**/*.txt", pattern], tmp_path) == [tmp_path / "deep" / "one.txt"]


def test_a_pattern_without_files_is_refused_by_name(tmp_path):
    with pytest.raises(ToolkitError, match=r"no file matches 'missing/\*\.txt'"):
        named_files(["missing/*.txt"], tmp_path)


def test_targets_are_the_following_bytes_and_windows_join_without_gap():
    windows = Windows(bytes(range(13)), context=4)
    assert windows.count == 3
    inputs, targets = windows.finished(windows.take(np.array([2, 0, 1])))
    assert inputs.tolist() == [[8, 9, 10, 11], [0, 1, 2, 3], [4, 5, 6, 7]]
    assert targets.tolist() == [[9, 10, 11, 12], [1, 2, 3, 4], [5, 6, 7, 8]]


def test_text_that_holds_no_window_is_refused():
    assert Windows(b"12345", context=4).count == 1
    with pytest.raises(ToolkitError, match=r"expected at least one window of 4 bytes, got 4 bytes of text"):
        Windows(b"1234", context=4)
