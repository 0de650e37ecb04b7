"""Every compressor against its closed forms: bounds of the error, exact means, bytes, zeros, and numbers that are not finite."""

from __future__ import annotations

import math

import pytest
import torch

from toolkit.comm.compression import quantise, signs, sparse
from toolkit.comm.compression.algorithms import BUILD
from toolkit.comm.compression.compressor import pack, unpack
from toolkit.config.gradient_compression import ALGORITHMS, GradientCompressionTable

N = 4096
DRAWS = 4000


def build(algorithm: str, **keys):
    return BUILD[algorithm](GradientCompressionTable(algorithm=algorithm, **keys))


def through(compressor, values, seed=3):
    """What the receiver of one message of `values` gets."""
    row = values[None]
    return compressor.decode(compressor.encode(row, seed), len(values), seed)[0]


def normal(n=N, seed=0):
    """Numbers of several magnitudes, as the gradients of several layers."""
    drawn = torch.randn(n, generator=torch.Generator().manual_seed(seed))
    return drawn * torch.logspace(-3, 1, n)


def kept_share(compressor, values, seed=3):
    return 1 - float(
        (through(compressor, values, seed) - values).double().square().sum() / values.double().square().sum()
    )


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_packed_integers_come_back(bits):
    codes = torch.randint(0, 1 << bits, (3, 64), dtype=torch.uint8)
    assert pack(codes, bits).shape == (3, 64 * bits // 8)
    assert torch.equal(unpack(pack(codes, bits), bits), codes)


@pytest.mark.parametrize("algorithm", [name for name in BUILD if build(name).exchange != "sum"])
def test_messages_have_the_stated_bytes(algorithm):
    compressor = build(algorithm)
    assert compressor.block == 1 or N % compressor.block == 0
    rows = torch.stack([normal(seed=seed) for seed in range(1 if compressor.exchange == "gather" else 3)])
    messages = compressor.encode(rows, 0)
    assert messages.dtype == torch.uint8
    if algorithm in ("threshold", "gaussian_k"):
        assert 0 < messages.shape[1] <= compressor.wire_bytes(N)
    else:
        assert messages.shape[1] == compressor.wire_bytes(N)
    for number, row in enumerate(rows):  # each row has its own message
        if not compressor.is_unbiased:
            assert torch.equal(compressor.decode(messages, N, 0)[number], through(compressor, row, 0))


@pytest.mark.parametrize(
    ("algorithm", "share"),
    [("bf16", 0.5), ("fp16", 0.5), ("int8", 0.25 + 1 / 256), ("int4", 0.125 + 1 / 256), ("qsgd", 0.125 + 1 / 256),
     ("terngrad", 1 / 16 + 1 / 256), ("natural", 9 / 32), ("sign", 1 / 16), ("ef_sign", 1 / 32 + 1 / 256),
     ("one_bit", 1 / 32 + 2 / 256), ("top_k", 0.02), ("random_k", 0.01), ("bernoulli", 0.01), ("ef21", 0.02)],
)  # fmt: skip
def test_bytes_are_those_of_the_formula(algorithm, share):
    n = 256 * 100
    assert build(algorithm).wire_bytes(n) == pytest.approx(4 * n * share, rel=1e-3)


@pytest.mark.parametrize("algorithm", [name for name in BUILD if build(name).exchange == "sum"])
def test_sums_of_messages_are_messages_of_sums(algorithm):
    compressor = build(algorithm, error_feedback="off")
    x, y = normal(seed=1), normal(seed=2)
    messages = compressor.encode(torch.stack([x, y]), 5)
    if algorithm != "bernoulli":
        assert 4 * messages.shape[1] == compressor.wire_bytes(N)
    together = compressor.decode((2 * messages[0] - 3 * messages[1])[None], N, 5)[0]
    torch.testing.assert_close(together, through(compressor, 2 * x - 3 * y, 5), rtol=1e-4, atol=1e-4)


UNBIASED = {
    "int8": {"rounding": "stochastic"},
    "int4": {"rounding": "stochastic"},
    "qsgd": {"block": 128},
    "terngrad": {"block": 128},
    "natural": {},
    "random_k": {"density": 1 / 16, "error_feedback": "off"},
    "bernoulli": {"density": 1 / 16, "error_feedback": "off"},
}


@pytest.mark.parametrize(("algorithm", "keys"), UNBIASED.items())
def test_the_mean_of_many_draws_is_exact(algorithm, keys):
    compressor, n = build(algorithm, **keys), 512
    assert compressor.is_unbiased
    x = torch.randn(n, generator=torch.Generator().manual_seed(1))
    total, squares, above, below = (torch.zeros(n, dtype=torch.float64) for _ in range(4))
    rows = 1 if compressor.is_linear else 200  # rows of a linear one share their random numbers
    for seed in range(DRAWS // rows):
        messages = compressor.encode(x.expand(rows, -1), seed)
        error = (compressor.decode(messages, n, seed) - x).double()
        total += error.sum(0)
        squares += error.square().sum(0)
        above += (error > 0).sum(0)
        below += (error < 0).sum(0)
    often = torch.minimum(above, below) >= 20  # of rarer errors, 4000 draws give no mean
    assert often.sum() > n // 2
    z = total[often] / squares[often].sqrt()
    assert 0.75 < float(z.square().mean()) < 1.25
    omega = float(squares.sum() / DRAWS / x.double().square().sum())
    low, high = variance_bounds(algorithm, keys, x.double())
    assert low <= omega <= high


def variance_bounds(algorithm, keys, x):
    """The bounds of E|C(x) - x|^2 / |x|^2; the same number twice where the closed form is exact."""
    block = keys.get("block", 256)
    blocks = x.view(-1, block)
    largest, square = blocks.abs().amax(1), x.square().sum()
    if algorithm in ("random_k", "bernoulli"):
        exact = 16 - 1
    elif algorithm == "terngrad":
        exact = float((largest * blocks.abs().sum(1)).sum() / square) - 1
    elif algorithm == "natural":
        return 0.02, 1 / 8
    elif algorithm == "qsgd":
        return 0.3, min(block / 7**2, math.sqrt(block) / 7)
    else:
        levels = 127 if algorithm == "int8" else 7
        bound = float((block * (largest / levels).square() / 4).sum() / square)
        return 0.5 * bound, bound
    return 0.97 * exact, 1.03 * exact


CONTRACTIONS = {
    "bf16": {}, "fp16": {}, "int8": {}, "int4": {}, "ef_sign": {}, "one_bit": {}, "natural": {},
    "top_k": {"density": 1 / 16}, "random_k": {"density": 1 / 16}, "bernoulli": {"density": 1 / 16}, "ef21": {},
}  # fmt: skip


@pytest.mark.parametrize(("algorithm", "keys"), CONTRACTIONS.items())
def test_errors_are_smaller_than_the_gradient_by_the_stated_factor(algorithm, keys):
    compressor = build(algorithm, **keys)
    for values in (torch.randn(N, generator=torch.Generator().manual_seed(4)), normal()):
        stated = compressor.contraction(values[None])
        kept = sum(kept_share(compressor, values, seed) for seed in range(60)) / 60
        slack = 0.35 * stated if algorithm in ("random_k", "bernoulli") else 1e-6
        assert 0 < stated <= kept + slack
        if algorithm == "ef_sign":
            assert kept == pytest.approx(stated, abs=1e-5)
        if algorithm in ("bf16", "fp16", "int8"):
            assert stated > 0.99


def test_two_values_lose_less_than_one():
    skewed = torch.randn(N, generator=torch.Generator().manual_seed(4)).exp() - 1
    assert kept_share(build("one_bit"), skewed) > kept_share(build("ef_sign"), skewed) + 0.05


def test_rounded_numbers_are_within_half_a_step():
    values = normal()
    for levels in (127, 7):
        steps = values.view(-1, 256).abs().amax(1, keepdim=True) / levels
        error = (through(quantise.quantiser(levels, 256, is_stochastic=False), values) - values).view(-1, 256)
        assert (error.abs() <= steps * (0.5 + 1e-5)).all()


def test_an_outlier_coarsens_only_its_block():
    values = torch.ones(1024)
    values[0] = 1e6
    assert torch.equal(through(build("int8"), values)[256:], values[256:])


def test_the_scale_of_qsgd_is_the_norm_and_that_of_terngrad_the_largest():
    values = torch.tensor([3.0, -4.0] + [0.0] * 6)
    found = {float(one) for seed in range(50) for one in through(build("qsgd", block=8, levels=1), values, seed)}
    assert {round(one, 4) for one in found} == {-5.0, 0.0, 5.0}
    found = {float(one) for seed in range(50) for one in through(build("terngrad", block=8), values, seed)}
    assert found <= {-4.0, 0.0, 4.0}


def test_natural_gives_the_two_nearest_powers_of_two():
    values = torch.tensor([3.0, -0.7, 1.0, 2.0**-126 * 0.75, 3.4e38, 0.0, -5.0, 6e-45])
    results = torch.stack([through(quantise.natural(), values, seed) for seed in range(200)])
    assert [set(column.tolist()) for column in results.T[:3]] == [{2.0, 4.0}, {-0.5, -1.0}, {1.0}]
    assert set(results[:, 3].tolist()) == {0.0, 2.0**-126}
    assert set(results[:, 4].tolist()) == {2.0**127}, "not infinity"
    assert set(results[:, 5].tolist()) == {0.0}
    assert float(results[:, 3].mean()) == pytest.approx(2.0**-126 * 0.75, rel=0.15)


def test_top_k_selects_the_largest_also_with_an_estimated_threshold():
    for n in (1000, 1 << 18):
        values = normal(n)[torch.randperm(n, generator=torch.Generator().manual_seed(1))]
        k = sparse.count_of(0.01, n)
        wanted = torch.zeros(n)
        places = values.abs().topk(k).indices
        wanted[places] = values[places]
        assert torch.equal(through(build("top_k"), values), wanted)
    misleading = torch.rand(1 << 18, generator=torch.Generator().manual_seed(1)) * 1e-3
    misleading[::16] += 1  # all that the sample has
    k = sparse.count_of(0.1, len(misleading))
    assert through(build("top_k", density=0.1), misleading).sum() == pytest.approx(
        float(misleading.topk(k).values.sum())
    )
    ones = torch.ones(1 << 17)
    assert int((through(build("top_k"), ones) != 0).sum()) == sparse.count_of(0.01, len(ones)), "ties"


def test_thresholds():
    values = torch.tensor([0.5, -2.0, 1.0, 0.0, 3.0, -0.1, 0.2, 0.9])
    assert through(build("threshold", threshold=1.0, density=1.0), values).tolist() == [0, -2, 1, 0, 3, 0, 0, 0]
    assert through(build("threshold", threshold=1.0, density=0.25), values).tolist() == [0, -2, 0, 0, 3, 0, 0, 0]
    assert not through(build("threshold", threshold=9.0, density=1.0), values).any(), "no number"


@pytest.mark.parametrize("tails", ["normal", "heavy", "none"])
def test_gaussian_k_sends_about_k(tails):
    """Also for numbers that a normal fit alone misses: it selects too many of heavy tails, and none without tails."""
    drawn = torch.randn(100_000, generator=torch.Generator().manual_seed(2))
    values = {"normal": drawn, "heavy": drawn**3, "none": torch.rand(100_000) - 0.5}[tails]
    found = through(build("gaussian_k"), values)
    count = int((found != 0).sum())
    assert 600 <= count <= 1334
    assert found.abs().sort(descending=True).values[count - 1] == values.abs().sort(descending=True).values[count - 1]


def test_random_k_selects_one_number_in_each_stride_and_ranks_alike():
    compressor = build("random_k", density=0.1)
    values = torch.arange(1.0, 101.0)
    found = through(compressor, values, seed=1)
    assert ((found != 0).view(10, 10).sum(1) == 1).all()
    assert torch.equal(found[found != 0], values[found != 0]), "not scaled with error feedback"
    assert torch.equal(found, through(compressor, values, seed=1))
    assert not torch.equal(found, through(compressor, values, seed=2))


DENSE = {
    "top_k": {"density": 1.0}, "threshold": {"threshold": 1e-30, "density": 1.0}, "gaussian_k": {"density": 1.0},
    "random_k": {"density": 1.0}, "bernoulli": {"density": 1.0}, "ef21": {"density": 1.0},
}  # fmt: skip


@pytest.mark.parametrize(("algorithm", "keys"), DENSE.items())
def test_at_density_one_nothing_is_lost(algorithm, keys):
    for feedback in ("auto", "off") if ALGORITHMS[algorithm].feedback else ("auto",):
        assert torch.equal(through(build(algorithm, error_feedback=feedback, **keys), normal()), normal())


def test_many_levels_lose_nothing_and_16_bits_the_stated_share():
    values = normal()
    assert kept_share(build("int8"), values) > 0.9998
    for algorithm, relative in (("bf16", 2**-8), ("fp16", 2**-11)):
        error = (through(build(algorithm), values) - values).abs()
        normal_range = values.abs() > 1e-4
        assert (error <= relative * values.abs())[normal_range].all()
        assert float((error / values.abs())[normal_range].max()) > relative / 2


@pytest.mark.parametrize("algorithm", BUILD)
def test_zeros_stay_zero(algorithm):
    values = torch.zeros(2048)
    assert not through(build(algorithm), values).any()
    values[256:512] = torch.randn(256)
    if algorithm not in ("top_k", "threshold", "gaussian_k", "ef21"):
        assert not through(build(algorithm), values)[512:].any()


@pytest.mark.parametrize("algorithm", BUILD)
@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1e30])
def test_small_and_large_numbers_stay_finite(algorithm, scale):
    values = torch.randn(2048, generator=torch.Generator().manual_seed(5)) * scale
    found = through(build(algorithm), values)
    if algorithm == "fp16" and scale == 1e30:
        assert found.isinf().all(), "above 65504"
    else:
        assert found.isfinite().all()


@pytest.mark.parametrize("algorithm", BUILD)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_arrive(algorithm, value):
    """All of a gradient is NaN when a part of it is not finite; a single infinity arrives where it is sent."""
    assert (
        not through(build(algorithm), torch.full((2048,), math.nan)).isfinite().any()
        or build(algorithm).exchange != "two_phase"
    )
    assert not through(build(algorithm), torch.full((2048,), math.nan)).isfinite().all()
    if algorithm not in ("sign", "random_k", "bernoulli"):
        values = torch.randn(2048, generator=torch.Generator().manual_seed(5))
        values[7] = value
        assert not through(build(algorithm), values).isfinite().all()


def test_a_majority_of_signs_keeps_zeros_and_ties():
    sign = signs.majority_sign()
    assert through(sign, torch.tensor([2.0, -0.5, 0.0, -0.0])).tolist() == [1, -1, 0, 0]


def test_random_numbers_leave_the_global_stream_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    for algorithm in BUILD:
        through(build(algorithm), normal())
    assert torch.equal(torch.get_rng_state(), before)
