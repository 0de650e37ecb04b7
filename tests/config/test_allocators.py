"""Settings of allocators: those of one that the ranks do not load are refused."""

from __future__ import annotations

import pytest

from toolkit.config.env import EnvTable, check_allocator
from toolkit.errors import ToolkitError

JEMALLOC = {"LD_PRELOAD": "/usr/lib/x86_64-linux-gnu/libjemalloc.so.2"}


@pytest.mark.parametrize(
    ("table", "site", "named"),
    [
        ({"vars": {"MALLOC_CONF": "narenas:1"}}, {}, "MALLOC_CONF configures jemalloc"),
        ({"vars": {"MALLOC_CONF": "narenas:1", "LD_PRELOAD": "libtcmalloc.so"}}, {}, "MALLOC_CONF configures jemalloc"),
        ({"malloc": "trimmed"}, JEMALLOC, "replaces its allocator by jemalloc"),
    ],
)
def test_settings_of_another_allocator_are_refused(table, site, named):
    with pytest.raises(ToolkitError, match=named):
        check_allocator(EnvTable(**table), site)


@pytest.mark.parametrize(
    ("table", "site"),
    [
        ({"vars": {"MALLOC_CONF": "narenas:1"}}, JEMALLOC),
        ({"vars": {"MALLOC_CONF": "narenas:1"}, "setup": ["export LD_PRELOAD=$JEMALLOC"]}, {}),
        ({"malloc": "trimmed", "expandable_segments": True}, {}),
    ],
)
def test_settings_of_the_allocator_in_use_are_accepted(table, site):
    check_allocator(EnvTable(**table), site)
