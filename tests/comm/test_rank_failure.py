"""A rank's failure keeps its error class on the other ranks, and all ranks choose the same one."""

from __future__ import annotations

import errno

import pytest

from toolkit.checkpoint.errors import CorruptCheckpointError
from toolkit.comm.rank_failure import RankFailure
from toolkit.errors import NotFoundError, OwnFailureError, ToolkitError


@pytest.mark.parametrize(
    ("error", "arrives_as"),
    [
        (CorruptCheckpointError("a", where="b", fix="c"), CorruptCheckpointError),
        (OwnFailureError("a", where="b", fix="c"), OwnFailureError),
        (NotFoundError("a", where="b", fix="c"), ToolkitError),
    ],
)
def test_an_error_of_the_toolkit_keeps_its_kind_and_its_words(
    error: ToolkitError, arrives_as: type[ToolkitError]
) -> None:
    received = RankFailure.from_json(RankFailure(3, error).to_json())
    assert received.rank == 3 and type(received.error) is arrives_as and str(received.error) == str(error)


def test_other_errors_arrive_as_the_systems_or_as_a_message() -> None:
    received = RankFailure.from_json(RankFailure(1, OSError(errno.ENOSPC, "full", "file")).to_json())
    assert isinstance(received.error, OSError) and received.error.errno == errno.ENOSPC
    assert received.error.filename == "file"
    assert str(RankFailure.from_json(RankFailure(1, KeyError("k")).to_json()).error) == "KeyError: 'k'"


def test_the_lowest_rank_wins_unless_a_checkpoint_is_damaged() -> None:
    failures = [RankFailure(2, OwnFailureError("two")), RankFailure(1, ValueError("one"))]
    assert RankFailure.worst(failures).rank == 1
    assert RankFailure.worst([*failures, RankFailure(7, CorruptCheckpointError("seven"))]).rank == 7
