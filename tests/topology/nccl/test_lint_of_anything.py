"""Whatever is set, the check answers; and what the shipped sites set is not wrong."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.topology.nccl import environment
from toolkit.topology.nccl.finding import Given
from toolkit.topology.nccl.lint import Here, lint
from toolkit.topology.nccl.variables import variables

SITES = sorted((Path(__file__).parents[3] / "site_configs").glob("*.toml"))
VALUES = st.one_of(
    st.text(max_size=30), st.integers().map(str), st.text(alphabet="=^,:;|.0123456789mlx_PHBring \x00\n", max_size=30)
)


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(st.one_of(st.sampled_from(sorted(variables())), st.text(max_size=12).map("NCCL_".__add__)), VALUES),
    st.sampled_from([None, (2, 4, 8), (2, 21, 5), (2, 32, 3), (3, 1)]),
    st.booleans(),
)
def test_every_value_has_an_answer(values, version, sure):
    here = Here(("lo", "eth0"), ("mlx5_0", "mlx5_1"), sure)
    for found in lint([Given(name, value, "x") for name, value in values.items()], version, here):
        assert found.why and found.fix and found.source and found.level in ("wrong", "note")
        assert all(line.isprintable() for line in found.lines())


@pytest.mark.parametrize("site", SITES, ids=lambda path: path.stem)
def test_what_shipped_sites_set_is_not_wrong(site):
    table = tomllib.loads(site.read_text(encoding="utf-8"))
    givens = environment.of_job({"network": table.get("network"), "env": table.get("env")}, site.name)
    assert [found for found in lint(givens, None) if found.level == "wrong"] == []
