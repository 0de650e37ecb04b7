"""The error of a failed collective: what it says without other ranks, and that ranks can send it to each other."""

import pickle

from toolkit.comm.failures import CollectiveError, Ticket, Witness


def test_a_single_rank_that_times_out_blames_nobody():
    error = Witness([0], "rank 0", None).explained(Ticket("all_reduce", 1), 2.0)
    assert (error.present, error.missing) == ((), ())
    assert error.message == "all_reduce number 1 did not finish in 2.0 s"


def test_an_error_keeps_its_facts_on_the_way_to_another_rank():
    given = {"where": "rank 1", "fix": "f", "collective": "barrier", "sequence": 3, "present": (0,), "missing": (1, 2)}
    error = pickle.loads(pickle.dumps(CollectiveError("m", **given)))
    assert (error.message, {name: getattr(error, name) for name in given}) == ("m", given)
