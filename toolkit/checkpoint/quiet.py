"""No garbage collection while a save or a load keeps all ranks waiting."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Plans and manifests are thousands of small objects; each few thousand would have Python look through all of torch's.

    A collection that is due comes afterwards. Where it is switched off already it stays so.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
