"""The version of toolkit. This module has no imports, so that other modules need not import the public API for it."""

__all__ = ["VERSION"]

VERSION = "0.1.0"
