"""What the ranks of a job get from work that all of them do: results of their node, or one failure on all."""

from __future__ import annotations

import pytest
from rank_pool import RankPool

from toolkit.comm.agreement import Ranks
from toolkit.comm.rank_failure import RankFailure
from toolkit.errors import ToolkitError


def answer(state, failing):
    def work():
        if state.world.rank in failing:
            raise ToolkitError(f"no {state.world.rank}")
        return 10 * state.world.rank

    try:
        return Ranks(state.world).together_on_node(work)
    except RankFailure as failure:
        return [failure.rank, failure.error.message]


@pytest.mark.parametrize(
    ("layout", "answers"), [((1,), [[0]]), ((3,), [[0, 10, 20]] * 3), ((2, 1), [[0, 10], [0, 10], [20]])]
)
def test_ranks_of_a_node_get_their_results_and_all_ranks_the_first_failure(layout, answers):
    pool = RankPool(layout)
    try:
        assert pool.run(answer, ()) == answers
        assert pool.run(answer, (1, 2)) == (answers if len(answers) == 1 else [[1, "no 1"]] * 3)
    finally:
        pool.close()
