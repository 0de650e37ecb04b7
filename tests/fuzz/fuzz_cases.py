"""How many cases a fuzz test runs: its share of TOOLKIT_FUZZ_CASES, which counts the cases of all of them together.

The shares of all fuzz tests add up to one or more, so that `TOOLKIT_FUZZ_CASES=20000 pytest tests/fuzz` runs at
least 20,000 cases. Without the variable it is a sample.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import TypeVar

from hypothesis import HealthCheck, settings

TOTAL = int(os.environ.get("TOOLKIT_FUZZ_CASES", "1000"))
Test = TypeVar("Test", bound=Callable[..., object])


def fuzz(share: float) -> Callable[[Test], Test]:
    """Decorate a hypothesis test: it runs `share` of all cases, however long one takes."""
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    fixtures = [HealthCheck.function_scoped_fixture]
    return settings(max_examples=math.ceil(TOTAL * share), deadline=None, suppress_health_check=[*slow, *fixtures])
