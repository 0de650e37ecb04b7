"""Outputs of nccl-tests and their damages; texts written here after their formats."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.errors import ToolkitError
from toolkit.topology.parsers.nccl_tests import answer_nccl_tests, parse_nccl_tests

RUN = """\
# nccl-tests version 2.17.6 nccl-headers=22605 nccl-library=22605
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 1 minBytes 1048576 maxBytes 4194304 step: 2(factor) warmup iters: 1 iters: 20 agg iters: 1 validation: 1 graph: 0
#
# Using devices
#  Rank  0 Group  0 Pid    100 on       n1 device  0 [0000:0f:00] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid    101 on       n1 device  1 [0000:15:00] NVIDIA H100 80GB HBM3
#  Rank  2 Group  0 Pid    200 on       n2 device  0 [0000:0f:00] NVIDIA H100 80GB HBM3
#  Rank  3 Group  0 Pid    201 on       n2 device  1 [0000:15:00] NVIDIA H100 80GB HBM3
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
     1048576        262144     float     sum      -1    100.0   10.49   15.73      0    100.0   10.49   15.73      0
     2097152        524288     float     sum      -1    100.0   20.97   31.46      0    100.0   20.97   31.46      0
     4194304       1048576     float     sum      -1    100.0   41.94   62.91      0    200.0   20.97   31.46      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 31.4583
#
# Collective test concluded: all_reduce_perf
"""
UNNAMED = "".join(line for line in RUN.splitlines(keepends=True) if "Collective" not in line)


def test_a_run():
    assert answer_nccl_tests(RUN) == (
        {
            "collective": "all_reduce_perf", "nranks": 4, "nodes": 2, "result_rows": 3, "first_size": 1048576,
            "last_size": 4194304, "avg_busbw_GBs": 31.4583, "out_of_bounds": "0 OK",
            "last_row": {
                "oop_time_us": 100.0, "oop_algbw": 41.94, "oop_busbw": 62.91, "oop_wrong": "0",
                "ip_time_us": 200.0, "ip_algbw": 20.97, "ip_busbw": 31.46, "ip_wrong": "0",
            },
            "busbw_over_algbw_expected": 1.5, "busbw_over_algbw_seen": 1.5,
        },
        (),
    )  # fmt: skip
    for prefix in ("n1: ", "2024-05-06T07:08:09 "):
        assert answer_nccl_tests("".join(f"{prefix}{line}\r\n" for line in RUN.splitlines())) == answer_nccl_tests(RUN)


def run_of(operation, root, part, factor, wrong="0"):
    """Four ranks, rows of another collective than all_reduce; `part` of the elements are one rank's."""
    text = UNNAMED
    for size in (1048576, 2097152, 4194304):
        text = text.replace(f" {size // 4:13d} ", f" {size // 4 // part:13d} ")
    text = text.replace("  sum      -1", f"  {operation}      {root}")
    for bandwidth, bus in (("10.49", "15.73"), ("20.97", "31.46"), ("41.94", "62.91")):
        text = text.replace(f"{bandwidth}   {bus}", f"{bandwidth}   {float(bandwidth) * factor:.2f}")
    lines = [line[:-1] + wrong if line.startswith("  ") else line for line in text.splitlines()]
    return "".join(f"{line}\n" for line in lines if "Avg" not in line)


@pytest.mark.parametrize(
    ("collective", "text"),
    [
        ("all_reduce_perf", UNNAMED),
        ("all_gather_perf", run_of("none", -1, 4, 0.75)),
        ("alltoall_perf", run_of("none", -1, 4, 0.75, wrong="N/A")),
        ("reduce_scatter_perf", run_of("sum", -1, 4, 0.75)),
        ("broadcast_perf", run_of("none", 0, 1, 1)),
        ("reduce_perf", run_of("sum", 0, 1, 1)),
        (None, run_of("sum", -1, 1, 1, wrong="N/A")),
    ],
)
def test_a_collective_is_told_where_no_line_names_it(collective, text):
    facts, warnings = answer_nccl_tests(text)
    assert (facts["collective"], facts["nranks"], facts["result_rows"]) == (collective, 4, 3)
    assert not [warning for warning in warnings if "average" not in warning]


def test_rows_alone_tell_the_number_of_ranks_by_their_ratio():
    rows = "".join(line for line in RUN.splitlines(keepends=True) if not line.startswith("#"))
    facts, warnings = answer_nccl_tests(rows)
    assert (facts["collective"], facts["nranks"], facts["nodes"]) == ("all_reduce_perf", 4, None)
    assert any("no line lists the ranks" in warning for warning in warnings)


def test_wrong_values_are_kept_as_printed():
    facts, warnings = parse_nccl_tests(RUN.replace("31.46      0\n#", "31.46      7\n#").replace("0 OK", "7 FAILED"))
    assert facts.out_of_bounds == "7 FAILED" and facts.rows[-1].in_place.wrong == "7" and not warnings


@pytest.mark.parametrize(
    ("old", "new", "said", "key"),
    [
        ("41.94   62.91", "41.9   62.91", "line 16: not 13 cells of results that agree", "last_row"),
        ("41.94   62.91", "41.94   52.91", "line 16: bandwidths whose ratio is not 1.5", "last_row"),
        ("41.94   62.91", "41.94", "line 16: not 13 cells", "last_size"),
        (" 4194304       1048576", " 4194304       104857", "line 16: bandwidths whose ratio is not 1.50000, or another count", "last_row"),
        ("     2097152        524288     float     sum      -1    100.0   20.97   31.46      0    100.0   20.97   31.46      0\n",
         "", "line 15: rows of other sizes than the settings say", None),
        ("Pid    101", "Pd    101", "line 7: not a line of nccl-tests", "nranks"),
        ("n2 device  1", "n2 device  0", "line 9: device 0 of 'n2' has another rank", "nranks"),
        ("#  Rank  3 Group  0 Pid    201 on       n2 device  1 [0000:15:00] NVIDIA H100 80GB HBM3\n", "",
         "the bandwidths are of another number of ranks", "nranks"),
        ("Rank  1 Group", "Rank  2 Group", "line 7: rank 2 where 1 belongs", "nranks"),
        (": 31.4583", ": 31.9583", "line 18: the average is 31.9583, that of the rows 31.4", None),
        ("# Out of bounds values : 0 OK\n", "", "no line of the values out of bounds", "out_of_bounds"),
        ("bounds values : 0 OK", "bounds values :", "line 17: not a line of nccl-tests", "out_of_bounds"),
        ("root     time   algbw   busbw #wrong     time", "root     algbw   busbw #wrong     time", "line 12: not the titles", None),
        ("# Collective test concluded: all_reduce_perf\n", "", "not said to start and to be concluded", None),
        ("concluded: all_reduce_perf\n", "concluded: all_red", "line 20: has no line end", None),
    ],
)  # fmt: skip
def test_damage_is_named_and_its_facts_are_unknown(old, new, said, key):
    assert old in RUN
    facts, warnings = answer_nccl_tests(RUN.replace(old, new, 1))
    assert any(said in warning for warning in warnings), warnings
    assert key is None or facts[key] is None


@pytest.mark.parametrize("text", ["", "Hello\n", "# a comment\n"])
def test_what_is_no_run_is_refused(text):
    with pytest.raises(ToolkitError, match="nothing that nccl-tests prints"):
        answer_nccl_tests(text)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2300), st.integers(0, 60), st.text(max_size=5))
def test_no_damage_raises_anything_else(start, length, between):
    try:
        _, warnings = answer_nccl_tests(RUN[:start] + between + RUN[start + length :])
    except ToolkitError:
        return
    assert all(warning.startswith("line ") for warning in warnings)
