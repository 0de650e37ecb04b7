"""Compute the communication of each mesh dimension in a training step from the shape of a transformer.

In the formulas, L is the number of layers per pipeline stage, b the samples and t the tokens per sample on a rank in one
micro-batch, m the micro-batches per step, h the hidden size, e the bytes per element, and P the parameters of a rank
after pp and tp. They give bytes per rank; `traffic.edge_bytes` computes how many of them cross a link.

tp         4 L m all-reduces of b t h e: two forward and two backward in each layer.
           M. Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3.
cp         a ring of n ranks sends keys and values n - 1 times forward and backward, and their gradients n times: of
           (4 + 2 n / (n - 1)) L m b t' k e, (n - 1) / n leave a rank, with the t' tokens of the whole sample and key width
           k. H. Liu et al., "Ring Attention", arXiv:2310.01889. Exchanged heads: 4 L m b t (h + k) e, of queries, keys,
           values and outputs, forward and backward. S. Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509.
ep         4 L m all-to-alls: each token is sent to its experts and returned, forward and backward.
           D. Lepikhin et al., "GShard", arXiv:2006.16668, section 3.2.
shard      ZeRO stage 3 gathers parameters twice and reduce-scatters gradients once per micro-batch, 3 m P e; stage 2 gathers
           once per step, (1 + m) P e; stage 1 also scatters once, 2 P e, as in an all-reduce. A pipeline scatters once per
           step. S. Rajbhandari et al., "ZeRO", arXiv:1910.02054, section 7. The experts of a rank are exchanged with the
           shard cp / ep ranks that have the same ones.
replicate  an all-reduce of the gradients of a rank after sharding, P e / (shard cp); without shard, cp takes part in it.
pp         2 m times b t h e: activations forward, their gradients backward. Y. Huang et al., "GPipe", arXiv:1811.06965.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from toolkit.errors import ToolkitError
from toolkit.topology.traffic import Traffic

__all__ = ["Step", "Transformer", "model_traffic", "step_of"]


@dataclass(frozen=True)
class Transformer:
    """The shape of a transformer model.

    Attributes:
        context: tokens per sample.
        key_width: total width of the keys of a token, less than `width` if heads share keys; 0 means `width`.
        experts: number of experts per layer, 0 for a dense model.
    """

    parameters: float
    layers: int
    width: int
    context: int
    key_width: int = 0
    experts: int = 0
    experts_per_token: int = 2
    bytes_per_element: int = 2

    @property
    def attention_parameters(self) -> float:
        """Parameters of queries, keys, values and the output projection, which expert parallelism does not split."""
        return self.layers * 2.0 * self.width * (self.width + (self.key_width or self.width))


@dataclass(frozen=True)
class Step:
    """How an optimizer step is split: samples per micro-batch on one rank, and number of micro-batches."""

    micro_batch: int
    micro_batches: int


def step_of(batch: int, micro_batch: int, sizes: Mapping[str, int]) -> Step:
    """Return the split of a global `batch` over replicate x shard ranks; `micro_batch` 0 means one micro-batch."""
    share = max(1, batch // (sizes.get("replicate", 1) * sizes.get("shard", 1)))
    samples = min(micro_batch or share, share)
    return Step(samples, ceil(share / samples))


def model_traffic(
    model: Transformer, step: Step, sizes: Mapping[str, int], zero: int = 3, context: str = "ring"
) -> dict[str, Traffic]:
    """Return the traffic of each dimension, including `ep` if the model has experts.

    Args:
        sizes: size of each dimension, by default 1.
        zero: the ZeRO stage of `shard`, 0 to 3.
        context: how attention works over `cp`, "ring" or "heads".

    Raises:
        ToolkitError: `ep` > 1 for a dense model, or the experts are not divisible by `ep`.
    """
    pp, shard, cp, tp, ep = (sizes.get(name, 1) for name in ("pp", "shard", "cp", "tp", "ep"))
    _check_experts(model, ep)
    layers, times = ceil(model.layers / pp), step.micro_batches
    tokens = step.micro_batch * model.context / cp
    activations = float(tokens * model.width * model.bytes_per_element)
    key_width = model.key_width or model.width
    keys = tokens * cp * key_width / tp * model.bytes_per_element
    kept = min(model.attention_parameters, model.parameters) if model.experts else model.parameters
    of_a_parameter = model.bytes_per_element / (pp * tp)
    dense, experts = kept * of_a_parameter, (model.parameters - kept) / ep * of_a_parameter
    # As if all of shard x cp exchanged them, with the bytes of those that do.
    copies = max(1, shard * cp // ep)
    exchanged = dense + (experts * (1 - 1 / copies) / (1 - 1 / (shard * cp)) if copies > 1 else 0.0)
    rounds = _rounds(zero, times, is_pipeline=pp > 1)
    if context == "heads":
        sequences = 4 * tokens * (model.width + key_width) / tp * model.bytes_per_element
    else:
        sequences = (4 + 2 * (cp / (cp - 1) if cp > 1 else 2)) * keys
    traffic = {
        "tp": Traffic("all-reduce", 4 * layers * times * activations, 4 * layers * times, "arXiv:1909.08053"),
        # The parameter exchange over shard x cp consists of a part over shard and a part over cp.
        "cp": Traffic(
            "gather-scatter",
            layers * times * sequences + (rounds if shard > 1 else 2) * exchanged / shard,
            (2 * times + rounds) * layers,
            "arXiv:2310.01889",
        ),
        "shard": Traffic("gather-scatter", rounds * exchanged, rounds * layers, "arXiv:1910.02054"),
        "replicate": Traffic("all-reduce", dense / (shard * cp) + experts / copies, layers, "arXiv:1910.02054"),
        "pp": Traffic("send", 2 * times * activations, 2 * times, "arXiv:1811.06965"),
    }
    if model.experts:
        calls = 4 * layers * times
        traffic["ep"] = Traffic("all-to-all", calls * activations * model.experts_per_token, calls, "arXiv:2006.16668")
    return traffic


def _rounds(zero: int, micro_batches: int, *, is_pipeline: bool) -> int:
    """Return how often all parameters or gradients are gathered or scattered in a step."""
    scattered = 1 if is_pipeline or zero < 2 else micro_batches
    return (2 * micro_batches if zero == 3 else 1) + scattered


def _check_experts(model: Transformer, ep: int) -> None:
    if ep > 1 and not model.experts:
        raise ToolkitError(
            f"ep = {ep} requires a model with experts, but this model has none",
            where="parallel.ep",
            fix="set ep = 1, or pass the number of experts per layer",
        )
    if model.experts and not 1 <= model.experts_per_token <= model.experts:
        raise ToolkitError(
            f"expected 1 to {model.experts} experts per token, got {model.experts_per_token}",
            where="experts-per-token",
            fix=f"use 1 to {model.experts}",
        )
    if model.experts % ep:
        raise ToolkitError(
            f"{model.experts} experts per layer are not divisible by ep = {ep}",
            where="parallel.ep",
            fix=f"set ep to a divisor of {model.experts}",
        )
