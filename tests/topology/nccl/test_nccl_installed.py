"""NCCL's version is found without torch in this process."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from types import SimpleNamespace

import pytest

from toolkit.topology.nccl import installed


@pytest.fixture
def nothing_installed(monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(installed.importlib.metadata, "version", version)
    monkeypatch.setattr(installed.importlib.util, "find_spec", lambda name: None)


def test_nothing(nothing_installed, tmp_path):
    assert installed.find_nccl({}, [str(tmp_path)]) == (None, "no NCCL found on this machine")


def test_a_librarys_file_name(nothing_installed, tmp_path):
    (tmp_path / "libnccl.so.2").touch()
    (tmp_path / "libnccl.so.2.21.5").touch()
    assert installed.find_nccl({"LD_LIBRARY_PATH": f":{tmp_path}"}, []) == (
        (2, 21, 5),
        str(tmp_path / "libnccl.so.2.21.5"),
    )


def test_what_is_preloaded_counts_before_the_package(nothing_installed, tmp_path, monkeypatch):
    (tmp_path / "libnccl.so.2.19.3").touch()
    (tmp_path / "libnccl.so").symlink_to("libnccl.so.2.19.3")
    monkeypatch.setattr(installed.importlib.metadata, "version", lambda name: "2.27.7")
    assert installed.find_nccl({})[1] == "package nvidia-nccl-cu13"
    assert installed.find_nccl({"LD_PRELOAD": f"{tmp_path}/libnccl.so"})[0] == (2, 19, 3)


def test_torch_is_asked_in_a_process_of_its_own(nothing_installed, tmp_path, monkeypatch):
    """A torch that has CUDA; a small module stands for it."""
    (tmp_path / "torch" / "lib").mkdir(parents=True)
    (tmp_path / "torch" / "lib" / "libtorch_cuda.so").touch()
    (tmp_path / "torch" / "__init__.py").write_text("class cuda:\n class nccl:\n  version = lambda: (2, 26, 2)\n")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "torch")])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    before = "torch" in sys.modules
    assert installed.find_nccl({}, []) == ((2, 26, 2), "torch.cuda.nccl.version()")
    assert ("torch" in sys.modules) == before
    (tmp_path / "torch" / "__init__.py").write_text("import time; time.sleep(60)")
    assert installed.find_nccl({}, [], timeout_s=0.2)[0] is None


def test_a_torch_for_processors_is_not_imported(nothing_installed, tmp_path, monkeypatch):
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(installed.subprocess, "run", lambda *a, **k: pytest.fail("torch was asked"))
    assert installed.find_nccl({}, [])[0] is None
