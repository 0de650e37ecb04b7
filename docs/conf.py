"""Sphinx configuration of the documentation site: `make docs` builds it into build/docs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import toolkit

project = "toolkit"
release = version = toolkit.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_click"]
exclude_patterns = ["samples", "schemas"]
root_doc = "index"
html_theme = "furo"
html_title = f"toolkit {release}"
html_copy_source = False

# Headings are link targets down to the fourth level, named as GitHub names them.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "deflist"]

# Docstrings use Google's sections, and single backquotes for code.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "description"


def _escape_help(app: object, ctx: object, lines: list[str]) -> None:
    """Escape the characters of click's plain help texts that reStructuredText would interpret."""
    lines[:] = [line if line.lstrip().startswith("..") else re.sub(r"([*|])", r"\\\1", line) for line in lines]


def setup(app: Sphinx) -> None:
    for part in ("description", "usage", "options", "arguments", "epilog"):
        app.connect(f"sphinx-click-process-{part}", _escape_help)
