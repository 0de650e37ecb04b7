"""Which file has the lines of a rank."""

import pytest

from toolkit.rundir.claims import claim_attempt
from toolkit.rundir.files import write_json
from toolkit.rundir.rank_logs import find_log, labelled_rank, line_of, log_of, tail_of


@pytest.fixture
def attempt(run_directory):
    return claim_attempt(run_directory)


@pytest.mark.parametrize(("ranks", "name"), [(1, "rank-3.log"), (64, "rank-3.log"), (65, "node-n7.log")])
def test_above_64_ranks_a_node_has_one_log(attempt, ranks, name):
    assert log_of(attempt, 3, ranks=ranks, host="n7").name == name


def test_a_rank_is_found_in_its_nodes_log(attempt):
    assert find_log(attempt, 3) == attempt.log_file(3)
    attempt.node_log("n7").write_text("[3] a\n[13] b\n[3] c\n[3]no\nplain\n")
    write_json(attempt.rank_file(3), {"rank": 3, "host": "n7", "pid": 1})
    assert find_log(attempt, 3) == attempt.node_log("n7")
    assert tail_of(attempt, 3, 9) == ["a", "c"]
    assert tail_of(attempt, 3, 1) == ["c"]
    assert tail_of(attempt, 4, 1) == []
    assert [labelled_rank(line) for line in ("[13] b", "[3]no", "plain")] == [13, None, None]


def test_a_rank_with_a_log_of_its_own_may_print_anything(attempt):
    attempt.log_file(3).write_text("[4] mine\n")
    assert tail_of(attempt, 3, 1) == ["[4] mine"]


def test_of_slurms_log_the_supervisors_words_are_no_ranks(tmp_path):
    lines = ["toolkit: run x", "[1] a", "[11] b"]
    log = tmp_path / "slurm-7_3.out"
    assert [line_of(log, line, rank=None) for line in lines] == [None, "[1] a", "[11] b"]
    assert [line_of(log, line, rank=1) for line in lines] == [None, "a", None]
