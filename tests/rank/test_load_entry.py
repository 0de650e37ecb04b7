"""Finding what `job.entry` names, and errors that say what to mend."""

import sys

import pytest

from toolkit.errors import ToolkitError
from toolkit.rank.entry import load_function


@pytest.fixture(autouse=True)
def clean_imports():
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def test_a_file_beside_the_job_file_is_loaded_with_its_neighbours(tmp_path):
    (tmp_path / "neighbour.py").write_text("ANSWER = 42\n")
    (tmp_path / "sample_train.py").write_text(
        "from neighbour import ANSWER\ndef main(world, config):\n    return ANSWER\n"
    )
    assert load_function("sample_train.py:main", tmp_path)(None, None) == 42


def test_a_module_beside_the_job_file_or_installed_is_imported(tmp_path):
    (tmp_path / "sample_package").mkdir()
    (tmp_path / "sample_package" / "train.py").write_text("def main(world, config):\n    return 43\n")
    assert load_function("sample_package.train:main", tmp_path)(None, None) == 43
    assert load_function("json:dumps", tmp_path)([1]) == "[1]"


@pytest.mark.parametrize(
    ("entry", "message", "fix"),
    [
        ("nowhere.py:main", "file not found", "all nodes share"),
        ("nowhere_package.train:main", "module 'nowhere_package' not found", "install this module"),
        ("sample_package.nowhere:main", "module 'sample_package.nowhere' not found", "install this module"),
        ("sample_train.py:nothing", "no function 'nothing'", "define it"),
        ("sample_train.py:NUMBER", "no function 'NUMBER'", "define it"),
    ],
)
def test_an_entry_that_is_not_there_names_the_fix(tmp_path, entry, message, fix):
    (tmp_path / "sample_train.py").write_text("NUMBER = 1\n")
    (tmp_path / "sample_package").mkdir()
    with pytest.raises(ToolkitError, match=message) as error:
        load_function(entry, tmp_path)
    assert fix in error.value.fix


@pytest.mark.parametrize("entry", ["sample_train.py:main", "sample_train:main"])
def test_what_the_users_file_cannot_import_stays_the_users_error(tmp_path, entry):
    (tmp_path / "sample_train.py").write_text("import not_installed_here\n")
    with pytest.raises(ModuleNotFoundError, match="not_installed_here"):
        load_function(entry, tmp_path)
