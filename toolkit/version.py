"""The version of toolkit, in a module without imports, so that no part of the package imports its public API."""

__all__ = ["VERSION"]

VERSION = "0.1.0"
