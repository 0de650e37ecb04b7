"""Paths of nested states that have no end are refused on the way back, too."""

from __future__ import annotations

import pytest

from toolkit.checkpoint.convert.nesting import nested
from toolkit.errors import ToolkitError


def test_a_path_without_end_is_refused_by_its_first_parts() -> None:
    assert nested({("a",) * 100: 1})
    with pytest.raises(
        ToolkitError, match=r"^a\.a\.a: contains a reference to itself, or is nested more than 100 levels deep"
    ):
        nested({("a",) * 5000: 1})
