"""Secret values in what a run records: each is replaced, also one that contains another."""

from __future__ import annotations

import pytest

from toolkit.rundir.states import Cause
from toolkit.supervise.failures import AttemptEnd
from toolkit.supervise.secrets import hide, without_secrets

TOKEN = "hunter2-token"
URL = f"https://api.example.org/?key={TOKEN}"


@pytest.mark.parametrize("values", [(TOKEN, URL), (URL, TOKEN)])
def test_a_secret_that_contains_another_leaves_none_of_its_own_text(values):
    assert hide(f"GET {URL} failed; token {TOKEN}", values) == "GET *** failed; token ***"


def test_the_record_of_an_end_quotes_no_secret():
    end = AttemptEnd(
        Cause.CRASHED, f"401 for {URL}", 1, last_lines=[f"curl {URL}"], evidence=[("errors/rank-00000.json", TOKEN)]
    )
    hidden = without_secrets(end, [TOKEN, URL])
    assert (hidden.reason, hidden.last_lines) == ("401 for ***", ["curl ***"])
    assert hidden.evidence == [("errors/rank-00000.json", "***")]
