"""A job whose ranks share sequences validates as one process does, and resumes with another number of these ranks."""

from __future__ import annotations

import parity
import pytest
from parity import Layout
from sampling import sampled

from toolkit.metrics.validation import read_validations

RING = {"context": "ring"}


@pytest.mark.parametrize(
    "parallel",
    sampled([{"cp": 2, **RING}, {"cp": 2, "pp": 2, **RING}, {"cp": 2, "shard": 2}], lambda one: len(one) == 2),
)
def test_a_job_validates_on_parts_of_sequences(tmp_path, parallel):
    found = {}
    ranks = parallel["cp"] * parallel.get("pp", 1) * parallel.get("shard", 1)
    for name, layout in (("one", {}), ("parts", parallel)):
        held_out = Layout(name, ranks if layout else 1, layout, {"held_out": 0.001})
        folder = parity.run(held_out, tmp_path / name, steps=2, validate_every=1)
        found[name] = list(read_validations(folder / "metrics" / "validation.jsonl"))
    assert len(found["one"]) == 2
    for one, parts in zip(found["one"], found["parts"], strict=True):
        assert parts.samples == one.samples
        assert parts.means["loss"] == pytest.approx(one.means["loss"], rel=2e-6)


@pytest.mark.parametrize(
    ("first", "then"),
    sampled(
        [
            ({"cp": 2, **RING}, {"shard": 2}),
            ({"cp": 2, "shard": 2}, {"cp": 4, **RING}),
            ({"tp": 2}, {"cp": 2, "tp": 2}),
        ],
        lambda case: "shard" in case[1],
    ),
)
def test_a_run_resumes_with_sequences_split_in_another_way(tmp_path, first, then):
    def layout(parallel: dict[str, object]) -> Layout:
        sizes = [size for size in parallel.values() if isinstance(size, int)]
        return Layout("parts", sizes[0] * (sizes[1] if len(sizes) > 1 else 1), parallel)

    settings = parity.VARIANTS["plain"] | {"steps": parity.SAMPLED_STEPS}
    parity.run_in_two(layout(first), layout(then), tmp_path / "run", parity.SAMPLED_CUT, **settings)
    parity.run(Layout("one", 1), tmp_path / "one", **settings)
    found = parity.difference(tmp_path / "run", tmp_path / "one", parity.SAMPLED_STEPS)
    assert found.largest <= parity.BOUND, found
