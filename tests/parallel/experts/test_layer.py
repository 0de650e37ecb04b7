"""The layer with experts in one process, compared with a loop over tokens."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from toolkit.errors import ToolkitError
from toolkit.parallel.experts.balance import Balance
from toolkit.parallel.experts.layer import Experts, MoE
from toolkit.parallel.experts.router import Routing

WIDTH, HIDDEN, EXPERTS = 16, 24, 4


def layer_of(balance: Balance | None = None, shared: nn.Module | None = None, **routing) -> MoE:
    torch.manual_seed(0)
    return MoE(WIDTH, HIDDEN, Routing(EXPERTS, **routing), balance or Balance(0.0, 0.0), shared)


def looped(layer: MoE, stream: torch.Tensor) -> torch.Tensor:
    tokens = stream.flatten(0, 1)
    routed, experts = layer.router(tokens), layer.experts
    mixed = torch.zeros_like(tokens)
    for token, expert, weight in zip(routed.tokens, routed.experts, routed.weights, strict=True):
        hidden = nn.functional.silu(experts.gate[expert] @ tokens[token]) * (experts.up[expert] @ tokens[token])
        mixed = mixed.index_add(0, token[None], (weight * (experts.down[expert] @ hidden))[None])
    if routed.passed is not None:
        mixed = mixed + tokens * routed.passed[:, None]
    if layer.shared is not None:
        mixed = mixed + layer.shared(tokens)
    return mixed.view(stream.shape)


@pytest.mark.parametrize(
    "routing",
    [{}, {"top": 1}, {"capacity": 0.5}, {"capacity": 0.5, "overflow": "pass"}, {"capacity": 1.0, "overflow": "next"},
     {"chosen_by": "experts"}],
)  # fmt: skip
def test_outputs_and_gradients_are_those_of_a_loop(routing):
    layer = layer_of(shared=nn.Linear(WIDTH, WIDTH), **routing)
    stream = torch.randn(2, 9, WIDTH)
    found, wanted = [], []
    for compute, results in ((layer, found), (lambda given: looped(layer, given), wanted)):
        layer.zero_grad()
        given = stream.clone().requires_grad_()
        outputs = compute(given)
        outputs.square().sum().backward()
        results += [outputs, given.grad, *(parameter.grad.clone() for parameter in layer.parameters())]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_counts_of_a_loop_without_a_step_do_not_pile_up():
    layer = layer_of()
    for _ in range(3):
        layer(torch.randn(2, 5, WIDTH)).square().sum().backward()
    assert layer.balance.heard()[2:].sum() == 2 * 5 * 2, "those of the last pass"


@pytest.mark.parametrize("shape", [(10, WIDTH), (2, 2, 5, WIDTH)])
def test_other_shapes_are_refused(shape):
    with pytest.raises(ToolkitError, match=r"expected tokens of shape \(batch, tokens, width\), got "):
        layer_of()(torch.randn(shape))


def test_no_tokens_have_no_outputs():
    assert layer_of()(torch.randn(2, 0, WIDTH)).shape == (2, 0, WIDTH)


def test_experts_without_tokens_get_gradients_of_zero():
    layer = layer_of(top=1)
    layer.router.bias[2] = 10.0
    layer(torch.randn(2, 5, WIDTH)).square().sum().backward()
    gradient = layer.experts.gate.grad
    assert [bool(of_expert.any()) for of_expert in gradient] == [False, False, True, False]


def test_the_losses_are_means_over_tokens():
    """Switch Transformers, equation 4, and ST-MoE, equation 5, by autograd on their definitions."""
    layer = layer_of(Balance(loss=0.3, z_loss=0.2))
    layer.balance.shares.copy_(torch.tensor([0.4, 0.3, 0.2, 0.1]))
    stream = torch.randn(3, 5, WIDTH)
    layer.balance.begin(samples=6, scale=2.0, passes=1)
    (0.0 * layer(stream)).sum().backward()
    found = layer.router.gate.weight.grad.clone()
    layer.zero_grad()
    logits = layer.router.gate(stream.flatten(0, 1))
    balance = 0.3 * EXPERTS * (layer.balance.shares * logits.softmax(1).sum(0) / (6 * 5)).sum()
    z_loss = 0.2 * logits.logsumexp(1).square().sum() / (6 * 5)
    (2.0 * (balance + z_loss)).backward()
    torch.testing.assert_close(found, layer.router.gate.weight.grad)
    assert float(layer.balance.heard()[1]) == pytest.approx(float((balance + z_loss).detach()))


def test_tokens_are_counted_once_and_only_in_training():
    layer = layer_of()
    layer.balance.begin(samples=4, scale=1.0, passes=2)
    for _ in range(2):
        stream = torch.randn(2, 5, WIDTH, requires_grad=True)
        torch.utils.checkpoint.checkpoint(layer, stream, use_reentrant=False).sum().backward()
    assert layer.balance.heard()[2:].sum() == 2 * 10 * 2
    layer.eval()(torch.randn(2, 5, WIDTH))
    assert layer.balance.heard()[2:].sum() == 2 * 10 * 2


def test_shapes_alone_cost_the_active_parameters():
    from torch.utils.flop_counter import FlopCounterMode

    counts = []
    for device in ("meta", "cpu"):
        layer = layer_of().to(device)
        with FlopCounterMode(display=False) as counter:
            layer(torch.randn(2, 8, WIDTH, device=device))
        counts.append(counter.get_total_flops())
    gate, experts = 2 * 16 * WIDTH * EXPERTS, 2 * 16 * 2 * 3 * WIDTH * HIDDEN
    assert counts[0] == gate + experts


def test_precision_of_autocast():
    layer = layer_of()
    with torch.autocast("cpu", torch.bfloat16):
        outputs = layer(torch.randn(2, 5, WIDTH))
    assert outputs.dtype == torch.bfloat16


@pytest.mark.parametrize(("width", "hidden", "fix"), [(18, 24, "24"), (16, 30, "32")])
def test_widths_that_the_product_cannot_read_are_refused(width, hidden, fix):
    with pytest.raises(ToolkitError, match=f"divisible by 8, got .*Fix: use {fix}"):
        Experts(2, width, hidden)
