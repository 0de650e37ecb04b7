"""Checks the path of an image file before toolkit spends time on its content."""

import importlib
from pathlib import Path

from toolkit.errors import ToolkitError

__all__ = ["check_picture"]

SUFFIXES = (".svg", ".png", ".pdf")


def check_picture(path: Path) -> None:
    """Check that toolkit can write an image to this path.

    Raises:
        ToolkitError: the suffix is not supported, the path is a folder, or its folder or matplotlib is missing.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ToolkitError(
            f"unsupported image format: {path.suffix or 'no suffix'}",
            where=str(path),
            fix=f"use one of the suffixes {', '.join(SUFFIXES)}",
        )
    if path.is_dir():
        raise ToolkitError(
            "expected a file, got a folder", where=str(path), fix=f"pass {path / f'picture{path.suffix}'}, for example"
        )
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ToolkitError("folder not found", where=str(path), fix=f"run mkdir -p {folder}, or choose another folder")
    try:
        for module in ("matplotlib", "matplotlib.figure"):
            importlib.import_module(module)
    except ImportError as error:
        raise ToolkitError("matplotlib is not installed", where="-o", fix="run pip install 'toolkit[plot]'") from error
