"""`make test` runs samples of what `make evidence` runs whole: marks for the rest, and what a shared run must prepare."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], is_sample: Callable[[Any], bool]) -> list[Any]:
    """Cases as parameters of a test, which a tuple holds all of; those that are no sample are left to `make evidence`."""
    return [
        pytest.param(*case, marks=() if is_sample(case) else pytest.mark.evidence)
        for case in (one if isinstance(one, tuple) else (one,) for one in cases)
    ]


def selected(request: pytest.FixtureRequest, test: str) -> list[dict[str, Any]]:
    """The parameters of a test of this module with which this call of pytest runs it."""
    return [
        item.callspec.params
        for item in request.session.items
        if getattr(item, "originalname", "") == test and item.path == request.path
    ]
