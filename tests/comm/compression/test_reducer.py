"""Compressed means on real ranks: equal bits, the stated bytes, and error feedback that conserves every gradient."""

from __future__ import annotations

import compression_cases as cases
import pytest
import torch
from compression_cases import table
from sampling import sampled

from toolkit.comm.compression.algorithms import BUILD
from toolkit.comm.compression.exchange import sent_bytes
from toolkit.config.gradient_compression import ALGORITHMS

ELEMENTS = 48 * 40 + 37 * 41 + 5 * 6 * 7 * 8
FIXED = [name for name in ALGORITHMS if name != "auto"]
WITH_FEEDBACK = [name for name, facts in ALGORITHMS.items() if facts.feedback]
OPTIONAL_FEEDBACK = [name for name, facts in ALGORITHMS.items() if facts.feedback is False]
# The error of one mean relative to the mean, without feedback: at most.
ERRORS = {"bf16": 3e-3, "fp16": 4e-4, "int8": 0.011, "int4": 0.2, "qsgd": 0.9, "terngrad": 1.6, "natural": 0.5}


@pytest.mark.parametrize(("algorithm", "size"), [*((name, 2) for name in FIXED), ("int8", 4), ("top_k", 4)])
def test_ranks_get_the_same_bits_and_send_the_stated_bytes(ranks, algorithm, size):
    found = ranks(size).run(cases.average, table(algorithm))
    assert len({bits for bits, _, _ in found}) == 1
    assert found[0][1] <= ERRORS.get(algorithm, 30)
    if algorithm in BUILD and not BUILD[algorithm](table(algorithm)).is_linear:
        compressor = BUILD[algorithm](table(algorithm))
        wanted = sent_bytes(ELEMENTS, compressor, size)
        for _, _, sent in found:
            assert 0 < sent <= wanted if algorithm in ("threshold", "gaussian_k") else sent == wanted


@pytest.mark.parametrize(
    ("algorithm", "size"),
    [*((name, 2) for name in [*WITH_FEEDBACK, *OPTIONAL_FEEDBACK]), ("ef_sign", 4), ("powersgd", 4)],
)
def test_results_and_residual_have_the_sum_of_the_gradients(ranks, algorithm, size):
    """Over changed buckets, a skipped step and an infinity."""
    found = ranks(size).run(cases.conserve, table(algorithm, error_feedback="on", density=0.1), 8)
    for differences, bits in found:
        assert bits == found[0][1], "equal bits at every step"
        assert differences and max(differences) < 3e-5


@pytest.mark.parametrize("algorithm", ["int8", "ef_sign", "one_bit"])
def test_segments_change_no_bit(ranks, algorithm):
    """Messages of 128 numbers of each rank, so that a part has several of them."""
    settings = table(algorithm, error_feedback="on")
    for differences, bits in (found := ranks(2).run(cases.conserve, settings, 8, 256)):
        assert bits == found[0][1]
        assert differences and max(differences) < 3e-5
    assert found == ranks(2).run(cases.conserve, settings, 8)


@pytest.mark.parametrize("algorithm", ["int8", "ef_sign", "top_k", "threshold"])
def test_nodes_conserve_the_sum(ranks, algorithm):
    """Two nodes of two ranks, of which each exchanges one half of the node's mean."""
    settings = table(algorithm, error_feedback="on", density=0.1)
    for differences, bits in (found := ranks(4).run(cases.conserve, settings, 8, 0, True)):
        assert bits == found[0][1]
        assert differences and max(differences) < 3e-5


@pytest.mark.parametrize("algorithm", ["bf16", "int8", "int4", "sign", "qsgd", "terngrad"])
def test_nodes_send_each_number_once(ranks, algorithm):
    """Each rank sends messages about one half of the numbers to one rank of the other node."""
    found = ranks(4).run(cases.average_in_nodes, table(algorithm))
    assert len({bits for bits, _, _ in found}) == 1
    assert found[0][1] <= ERRORS.get(algorithm, 30)
    compressor = BUILD[algorithm](table(algorithm))
    half = -(-ELEMENTS // (2 * 64)) * 64
    assert {sent for _, _, sent in found} == {int(sent_bytes(half, compressor, 2))}


def test_without_feedback_the_sum_is_not_conserved(ranks):
    (differences, _), _ = ranks(2).run(cases.conserve, table("ef_sign", error_feedback="off"), 8)
    assert min(differences) > 0.1


def test_a_bf16_residual_conserves_the_sum_to_its_precision(ranks):
    (differences, _), _ = ranks(2).run(cases.conserve, table("ef_sign", residual_type="bf16"), 8)
    assert 1e-5 < max(differences) < 0.02


def test_a_residual_that_decays_is_smaller(ranks):
    (differences, _), _ = ranks(2).run(cases.conserve, table("top_k", density=0.05, residual_decay=0.5), 8)
    assert min(differences) > 0.05


@pytest.mark.parametrize(
    "algorithm",
    sampled(
        ["int4", "qsgd", "terngrad", "natural", "random_k", "bernoulli"], lambda case: case[0] in ("int4", "random_k")
    ),
)
def test_the_mean_of_unbiased_results_is_exact(ranks, algorithm):
    keys = {"rounding": "stochastic"} if algorithm == "int4" else {}
    keys |= {"error_feedback": "off", "density": 0.1} if algorithm in ("random_k", "bernoulli") else {}
    steps = 300
    for ratio in ranks(2).run(cases.unbiased_mean, table(algorithm, **keys), steps):
        assert ratio == pytest.approx(1 / steps, rel=0.3)


@pytest.mark.parametrize(
    ("algorithm", "keys", "limit"),
    sampled(
        [("top_k", {"density": 1 / 8}, 2), ("ef21", {"density": 1 / 8}, 0.2), ("ef_sign", {}, 2), ("one_bit", {}, 2),
         ("int4", {"error_feedback": "on"}, 0.3)],
        lambda case: case[0] in ("top_k", "ef21"),
    ),
)  # fmt: skip
def test_feedback_reaches_a_minimum_that_no_rank_has_alone(ranks, algorithm, keys, limit):
    near = ranks(2).run(cases.descend, table(algorithm, **keys), 800, 0.01)
    assert near[0] == near[1] < limit
    if ALGORITHMS[algorithm].feedback is not None:
        far = ranks(2).run(cases.descend, table(algorithm, **keys | {"error_feedback": "off"}), 200, 0.01)
        assert far[0] > (2.5 if algorithm == "one_bit" else 8)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("saved", ["mean", "exact"])
def test_a_resume_repeats_every_bit(ranks, algorithm, saved):
    keys = {"momentum": 0.9} if algorithm in ("top_k", "ef21") else {}
    for after, resumed, notice in ranks(2).run(cases.resume, table(algorithm, residual_saved=saved, **keys), 3):
        keeps = bool(ALGORITHMS[algorithm].feedback) or algorithm == "ef21"
        # Equal means are not what each rank had, unless it keeps nothing.
        assert (after == resumed) == (saved == "exact" or not keeps)
        assert notice == ""


@pytest.mark.parametrize("algorithm", ["ef_sign", "top_k", "random_k", "powersgd"])
def test_other_numbers_of_ranks_conserve_the_sum(ranks, algorithm):
    settings = table(algorithm, density=0.1, residual_saved="exact")
    (saved, left), *_ = ranks(4).run(cases.save_residual, settings)
    for size in (2, 3):
        for difference, notice in ranks(size).run(cases.continue_from, settings, saved, left, 4):
            assert difference < 1e-5
            assert notice == "each rank continues with the mean residual of 4 ranks"


def test_only_algorithms_that_delay_gradients_warn_of_short_runs():
    parameters = {"one": torch.zeros(64, 64)}
    for algorithm, is_late in (("int8", False), ("top_k", True)):
        compression = cases.GradientCompression(table(algorithm, error_feedback="on"), parameters)
        assert any("steps pass until" in one for one in compression.warnings("sgd", 1)) == is_late


def test_settings_that_compress_nothing_are_reported():
    def warnings(steps: int, **settings) -> list[str]:
        return cases.GradientCompression(table("int8", **settings), {"one": torch.zeros(64, 64)}).warnings(
            "adamw", steps
        )

    assert warnings(11, dense_steps=10, min_elements=4096) == []
    assert warnings(10, dense_steps=10) == ["nothing is compressed, because dense_steps = 10 covers the whole run"]
    assert warnings(0) == [], "not even of a run without steps"
    assert warnings(1, min_elements=4097) == ["no parameter is large enough to be compressed (min_elements = 4097)"]


def test_a_checkpoint_without_residuals_is_reported(ranks):
    assert ranks(1).run(without_tensors, table("top_k")) == [
        "gradient compression starts without residual, which the checkpoint lacks"
    ]


def without_tensors(state, settings):
    compression = cases.compression_of(state.communicator.peers, settings)
    room = compression.kept.room()
    return compression.kept.take(room, [f"mean.residual.{name}" for name in room["mean"]["residual"]], 2)


def test_measures_have_the_seconds_and_what_was_lost(ranks):
    for first, last, plain in ranks(2).run(measured_steps, table("int4")):
        assert set(first) == {
            f"compression_{part}" for part in ("encode_s", "wire_s", "decode_s", "exchange_s", "bytes_per_s")
        }
        assert 0 < first["compression_encode_s"] + first["compression_decode_s"] < first["compression_exchange_s"]
        assert 0 < first["compression_wire_s"] < first["compression_exchange_s"]
        assert 0.05 < last["compression_error"] < 0.2, "of the 10th step"
        assert plain == 0, "steps that do not measure the error have the same bits"


def measured_steps(state, settings):
    peers = state.communicator.peers
    compression, found, bits = cases.compression_of(peers, settings), [], set()
    for _ in range(10):
        gradients = cases.gradients(peers.place, 0)
        compression.reduce(cases.NAMES, list(gradients.values()), peers)
        found.append(compression.measures())
        bits.add(cases.digest(list(gradients.values())))
    return found[0], found[-1], len(bits) - 1


def test_the_first_steps_are_dense(ranks):
    first, _ = ranks(2).run(dense_steps, table("int4", dense_steps=2))
    assert [error < 1e-6 for error in first] == [True, True, False]


def dense_steps(state, settings):
    peers = state.communicator.peers
    compression, errors = cases.compression_of(peers, settings), []
    for step in range(3):
        found = cases.gradients(peers.place, step)
        wanted = cases.mean_over(peers, found)
        compression.reduce(cases.NAMES, list(found.values()), peers)
        errors.append(max(float((found[one] - wanted[one]).norm() / wanted[one].norm()) for one in cases.NAMES))
    return errors


def test_residuals_are_without_the_scale_of_the_loss(ranks):
    for plain, scaled in ranks(2).run(with_scales, table("ef_sign")):
        assert plain == scaled


def with_scales(state, settings):
    """Digests of results with a constant scale, and with one that changes and is divided out again."""
    peers, found = state.communicator.peers, []
    for scales in ([1.0] * 4, [1024.0, 512.0, 512.0, 2048.0]):
        compression, bits = cases.compression_of(peers, settings), []
        for step, scale in enumerate(scales):
            compression.scale = lambda scale=scale: scale
            gradients = {name: one * scale for name, one in cases.gradients(peers.place, step).items()}
            compression.reduce(cases.NAMES, list(gradients.values()), peers)
            bits.append(cases.digest([gradients[name] / scale for name in compression.compressed]))
        found.append(bits)
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_power_sgd_finds_the_best_matrix_of_its_rank(ranks, size):
    for error, best in ranks(size).run(cases.approximate, 4, 30, "full"):
        assert error <= 1.01 * best if size > 1 else error == 0


@pytest.mark.parametrize(("kind", "limit"), [("low", 1e-5), ("zero", 0.0)])
def test_power_sgd_is_exact_for_matrices_of_lower_rank(ranks, kind, limit):
    """Also where a rank of 4 finds only three directions, or none."""
    for error, _ in ranks(2).run(cases.approximate, 4, 3, kind):
        assert error <= limit


def test_power_sgd_starts_again_after_zeros(ranks):
    assert max(ranks(2).run(zeros_then_numbers)) < 1e-5


def zeros_then_numbers(state):
    peers = state.communicator.peers
    compression = cases.compression_of(peers, table("powersgd", error_feedback="off"))
    errors = []
    for size in (0.0, 1.0):
        left, right = (torch_of(shape) for shape in ((48, 1), (1, 40)))
        wanted = size * left @ right
        wanted[:20] = 0  # the directions that QR returns for zeros
        found = wanted.clone()
        compression.reduce(["first.weight"], [found], peers)
        errors.append(float((found - wanted).norm() / (wanted.norm() + 1e-30)))
    return errors[-1]


@pytest.mark.parametrize(
    ("dtype", "is_transposed", "keys", "limit"),
    [
        (torch.float32, True, {}, 1e-5),
        (torch.bfloat16, False, {"residual_type": "bf16"}, 5e-3),
        (torch.float32, False, {"residual_type": "bf16", "residual_decay": 0.5}, 1e-5),
    ],
)
def test_power_sgd_reduces_gradients_of_any_type_and_strides(ranks, dtype, is_transposed, keys, limit):
    assert max(ranks(2).run(power_sgd_of, dtype, is_transposed, keys)) < limit


def power_sgd_of(state, dtype, is_transposed, keys):
    """The error of a matrix of rank 1, after one of full rank that leaves a residual, which cannot vanish."""
    peers = state.communicator.peers
    compression = cases.GradientCompression(table("powersgd", **keys), {"one": torch.zeros(48, 40)})
    compression.kept.peers = peers
    compression.scale = lambda: 1024.0
    decay, left = compression.settings.residual_decay, torch.zeros(48, 40)
    for step in range(3):
        drawn = torch.Generator().manual_seed(step)
        wanted = torch.randn(48, 40, generator=drawn).to(dtype)
        found = 1024 * (wanted.T.contiguous().T if is_transposed else wanted.clone())
        compression.reduce(["one"], [found], peers)
        found /= 1024
        left = decay * left + wanted.float() - found.float()
    compression.kept.settle()
    kept = compression.kept.read("residual", ["one"]).view(48, 40)
    # Equal gradients on all ranks: what was not sent is the residual.
    rounding = 2**-8 if keys else 0
    return max(0.0, float((left - kept).norm() / left.norm()) - rounding)


def torch_of(shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0]))


def test_momentum_correction_sends_what_a_dense_momentum_would(ranks):
    """At density 1 nothing remains, so that it is plain SGD; else all of it is sent in the end."""
    for dense, sparse in ranks(2).run(momentum_sums, "top_k", (1.0, 1 / 128)):
        assert dense == pytest.approx(1, abs=1e-5)
        assert sparse == pytest.approx(1 / (1 - 0.5), rel=0.1)


def test_ef21_with_momentum_follows_the_moving_average(ranks):
    for (total,) in ranks(2).run(momentum_sums, "ef21", (1.0,)):
        assert total == pytest.approx(1, abs=1e-5)


def momentum_sums(state, algorithm, densities):
    """The sums of results for a gradient of ones in the first step only, relative to it."""
    peers, sums = state.communicator.peers, []
    for density in densities:
        settings = table(algorithm, density=density, momentum=0.5)
        compression = cases.GradientCompression(settings, {"one": torch.zeros(128)})
        total = torch.zeros(128)
        for step in range(300):
            gradient = torch.ones(128) if step == 0 else torch.zeros(128)
            compression.reduce(["one"], [gradient], peers)
            total += gradient
        sums.append(float(total.mean()))
    return sums


@pytest.mark.parametrize("algorithm", ["ef_sign", "top_k", "powersgd"])
@pytest.mark.parametrize("bucket_mb", [0.02, 25.0])
def test_the_hook_of_ddp_conserves_the_sum_over_rebuilt_buckets(ranks, algorithm, bucket_mb):
    found = ranks(2).run(cases.train_with_ddp, table(algorithm, density=0.05), bucket_mb)
    assert found[0]["bits"] == found[1]["bits"]
    assert max(one["largest"] for one in found) < 1e-5
    assert found[0]["line"].startswith(f"gradient reduction: {algorithm}, with error feedback: ")
    assert found[0]["line"].endswith("; 6 of 12 parameters compressed")


@pytest.mark.parametrize("algorithm", ["ef_sign", "powersgd"])
def test_the_hook_of_ddp_compresses_between_nodes(ranks, algorithm):
    """PowerSGD adds its messages over all ranks."""
    found = ranks(4).run(cases.train_with_ddp, table(algorithm), 0.02, True)
    assert len({tuple(one["bits"]) for one in found}) == 1
    assert max(one["largest"] for one in found) < 1e-5
    assert ("between nodes" in found[0]["line"]) == (algorithm == "ef_sign")


def test_shards_without_a_row_have_nothing_to_reduce(ranks):
    assert ranks(2).run(cases.empty_parts, ["int8", "int4", "top_k", "ef21", "random_k"]) == [True, True]


@pytest.mark.parametrize("algorithm", FIXED)
def test_a_communicator_reduces_tensors(ranks, algorithm):
    found = ranks(2).run(cases.all_reduce, "avg", algorithm, (60, 50), "float32")
    assert found[0][0] == found[1][0]
    assert found[0][1] <= 3 * ERRORS.get(algorithm, 4)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_communicator_sums_other_floats(ranks, dtype):
    found = ranks(2).run(cases.all_reduce, "sum", "int8", (3000,), dtype)
    assert found[0][0] == found[1][0]
    assert 1e-4 < found[0][1] < 0.02


def test_a_communicator_accepts_a_table(ranks):
    (_, coarse), _ = ranks(2).run(
        cases.all_reduce, "avg", table("int4", error_feedback="off", block=2048), (4096,), "float32"
    )
    (_, fine), _ = ranks(2).run(
        cases.all_reduce, "avg", table("int4", error_feedback="off", block=8), (4096,), "float32"
    )
    assert fine < 0.7 * coarse


def test_one_rank_keeps_its_tensor(ranks):
    assert ranks(1).run(cases.all_reduce, "avg", "top_k", (100,), "float32")[0][1] == 0


@pytest.mark.parametrize(
    ("op", "compression", "message"),
    [
        ("max", "int8", "expected a sum or an average of floats to compress, got 'max'"),
        ("sum", "zip", "unknown compression 'zip'"),
    ],
)
def test_other_reductions_are_refused(ranks, op, compression, message):
    for is_well, answer in ranks(2).outcomes(cases.all_reduce, op, compression, (10,), "float32"):
        assert not is_well and message in answer


def test_ef21_reaches_the_mean_again_on_another_number_of_ranks(ranks):
    """The mean of the ranks' shifts is the mean shift, so that messages of all differences give the exact mean."""
    settings = table("ef21", density=0.1, residual_saved="exact", momentum=0.5)
    (saved, _), *_ = ranks(4).run(cases.save_residual, settings)
    assert not torch.equal(saved["mean"]["momentum"]["third"], saved["mean"]["shift"]["third"])
    for error in ranks(2).run(cases.shifted_mean, saved):
        assert error < 1e-5


def test_sparse_gradients_are_refused(ranks):
    for is_well, answer in ranks(2).outcomes(cases.reduce_sparse):
        assert not is_well and "requires dense gradients, but that of third is sparse" in answer


def test_a_step_whose_dense_values_are_not_finite_keeps_nothing(ranks):
    assert ranks(2).run(cases.keep_after_nan_bias) == [True, True]


def test_ranks_round_at_random_independently(ranks):
    """Else the errors of equal gradients would not average out."""
    first, second = ranks(2).run(own_residual, table("int4", rounding="stochastic", error_feedback="on"))
    assert first != second


def own_residual(state, settings):
    """A digest of what the first message of this rank lost of a gradient that all ranks have."""
    compression = cases.compression_of(state.communicator.peers, settings)
    compression.reduce(cases.NAMES, list(cases.gradients(0, 0).values()), state.communicator.peers)
    compression.kept.settle()
    return cases.digest([compression.kept.read("residual", ["third"])])
