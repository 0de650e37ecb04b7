"""A folder of site files that stands before the shipped ones."""

import pytest


@pytest.fixture
def sites(tmp_path, monkeypatch):
    """Write site files by name; returns the environment that finds them."""
    folder = tmp_path / "sites"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))

    def write(**files: str) -> dict[str, str]:
        for name, text in files.items():
            (folder / f"{name}.toml").write_text(f'name = "{name}"\n{text}')
        return {"TOOLKIT_SITES": str(folder), "PATH": str(tmp_path / "bin"), "HOME": str(tmp_path / "home")}

    return write
