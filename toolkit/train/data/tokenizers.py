"""Tokenizers: bytes as tokens, or a function of the user."""

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import ToolkitError

__all__ = ["BYTES"]

BYTES = "bytes"
# Returns the tokens of a string.
Tokenizer = Callable[[str], Sequence[int]]


def load_tokenizer(name: str) -> Tokenizer | None:
    """Import the function `module:name`, also from the current folder; return None for "bytes".

    Raises:
        ToolkitError: the module or name does not exist, or is not callable.
    """
    if name == BYTES:
        return None
    module_name, _, attribute = name.partition(":")
    where = f"tokenizer {name}"
    if not module_name or not attribute:
        raise ToolkitError(
            'expected "bytes" or "module:name"', where=where, fix='pass "bytes" or a name such as "my_tokens:encode"'
        )
    if "" not in sys.path and os.getcwd() not in sys.path:  # noqa: PTH109 - as sys.path has it
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:  # an import runs user code, which may raise any exception
        raise ToolkitError(
            f"cannot load the tokenizer: {type(error).__name__}: {error}",
            where=where,
            fix="pass MODULE:FUNCTION with a module that is installed or in the current folder",
        ) from error
    if not callable(found):
        raise ToolkitError(
            "expected a function", where=where, fix="pass a function that accepts a string and returns its tokens"
        )
    tokenizer: Tokenizer = found
    return tokenizer


def tokens_of(data: bytes, tokenizer: Tokenizer | None, dtype: str, where: str) -> NDArray[Any]:
    """Return the tokens of a piece of text, which must be UTF-8 unless its bytes are the tokens.

    Raises:
        ToolkitError: it is not UTF-8, the tokenizer fails, or a token does not fit `dtype`.
    """
    if tokenizer is None:
        return np.frombuffer(data, np.uint8).astype(np.dtype(dtype).newbyteorder("<"))
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ToolkitError(
            f"not UTF-8: {error.reason} at byte {error.start} of this piece",
            where=where,
            fix="convert the file (iconv -t utf-8), or use --tokenizer bytes",
        ) from error
    try:
        tokens = np.asarray(tokenizer(text))
    except Exception as error:  # user code may raise any exception
        raise ToolkitError(
            f"the tokenizer failed: {type(error).__name__}: {error}", where=where, fix="fix the tokenizer or the file"
        ) from error
    if tokens.size == 0:
        return np.empty(0, np.dtype(dtype).newbyteorder("<"))
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ToolkitError(
            f"expected a flat list of integers from the tokenizer, got {tokens.dtype} of shape {tokens.shape}",
            where=where,
            fix="return a flat list of integers",
        )
    most = np.iinfo(dtype).max
    if (least := int(tokens.min())) < 0 or int(tokens.max()) > most:
        wrong = least if least < 0 else int(tokens.max())
        fix = "pack with --dtype uint32" if 0 <= wrong < 2**32 else "return tokens from 0 to 4294967295"
        raise ToolkitError(f"the token {wrong} does not fit in {dtype}", where=where, fix=fix)
    return tokens.astype(np.dtype(dtype).newbyteorder("<"))
