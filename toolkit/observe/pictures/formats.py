"""The formats of picture files, and a check before anything is measured or laid out for one."""

import importlib
from pathlib import Path

from toolkit.errors import ToolkitError

__all__ = ["check_picture"]

SUFFIXES = (".svg", ".png", ".pdf")


def check_picture(path: Path) -> None:
    """Check that toolkit can write a picture to this path.

    Raises:
        ToolkitError: the suffix is not supported, the path is a folder, its folder is missing, or so is matplotlib.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ToolkitError(
            f"unsupported image format: {path.suffix or 'no suffix'}",
            where=str(path),
            fix=f"use one of the suffixes {', '.join(SUFFIXES)}",
        )
    if path.is_dir():
        raise ToolkitError(
            "expected a file, got a folder", where=str(path), fix=f"name a file in it: {path / f'picture{path.suffix}'}"
        )
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ToolkitError("its folder does not exist", where=str(path), fix=f"mkdir -p {folder}, or name another")
    try:
        for module in ("matplotlib", "matplotlib.figure"):
            importlib.import_module(module)
    except ImportError as error:
        raise ToolkitError("matplotlib is not installed", where="-o", fix="pip install 'toolkit[plot]'") from error
