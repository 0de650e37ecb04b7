"""A request: what the user typed, and the job that it resolves to."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from toolkit.config.document import Flag
from toolkit.config.request import JobRequest, resolve, with_rank_flags
from toolkit.errors import ToolkitError


@pytest.fixture
def job(tmp_path: Path) -> str:
    path = tmp_path / "work.toml"
    path.write_text("[job]\nentry = ['true']\nnodes = 2\n")
    return str(path)


def test_ranks_fill_the_nodes_of_the_file_or_of_a_flag(job: str) -> None:
    request = JobRequest(job, ranks=6)
    assert resolve(request, None, environ={}).job.ranks_per_node == 3
    more = request.with_flags({"job.nodes": Flag("3", "-N")})
    assert (more.typed("job.nodes"), more.typed("job.time"), request.flags) == ("3", None, {})
    assert resolve(more, None, environ={}).job.ranks_per_node == 2
    spread = with_rank_flags(request, {})
    assert spread.ranks is None and with_rank_flags(spread, {}) is spread
    with pytest.raises(ToolkitError, match="-n 5: 5 ranks are not divisible by 2 nodes"):
        resolve(JobRequest(job, ranks=5), None, environ={})


def test_settings_count_before_the_ranks_are_spread(job: str) -> None:
    request = JobRequest(job, settings=("job.nodes=4",), ranks=4, argv=("--fast",))
    resolved = resolve(request, None, environ={})
    assert (resolved.job.nodes, resolved.job.ranks_per_node, resolved.argv) == (4, 1, ["--fast"])


def test_a_request_is_frozen(job: str) -> None:
    with pytest.raises(FrozenInstanceError):
        JobRequest(job).job = "other"  # type: ignore[misc]
