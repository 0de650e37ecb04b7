"""Keys of [train] that need one another are refused with the key to set."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from toolkit.config.train import TrainTable


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"lr_scaling": "linear"}, "set train.lr_reference_batch"),
        ({"recompute": "budget"}, "set train.activation_budget_gb"),
        ({"recompute": "large"}, "set train.recompute_above_mb"),
        ({"early_stop_patience": 3}, "set train.validate_every"),
        ({"betas": [0.9]}, "set betas = [0.9, 0.95]"),
        ({"betas": [0.9, 1.0]}, "set betas = [0.9, 0.95]"),
    ],
)
def test_a_key_that_says_nothing_alone_names_the_one_it_needs(given, said):
    with pytest.raises(ValidationError) as refused:
        TrainTable(**given)
    (error,) = refused.value.errors()
    assert error["ctx"]["fix"] == said
    assert error["loc"] == (next(iter(given)),)


def test_together_they_are_taken():
    table = TrainTable(
        lr_scaling="square_root", lr_reference_batch=32, recompute="budget", activation_budget_gb=4.0,
        validate_every=100, early_stop_patience=3, betas=[0.9, 0.999], precision="fp16", optimizer="muon",
    )  # fmt: skip
    assert (table.betas, table.guard, table.schedule) == ([0.9, 0.999], "off", "cosine")
    assert TrainTable().betas == [0.9, 0.95]
