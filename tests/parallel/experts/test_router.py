"""The choice of experts, compared with loops over tokens."""

from __future__ import annotations

import pytest
import torch

from toolkit.errors import ToolkitError
from toolkit.parallel.experts.router import Router, Routing

TOKENS, WIDTH, EXPERTS = 40, 16, 8


def routed(**given):
    torch.manual_seed(3)
    router = Router(WIDTH, Routing(EXPERTS, **given))
    return router, router(torch.randn(TOKENS, WIDTH))


def by_token(found) -> dict[int, list[tuple[int, float]]]:
    chosen: dict[int, list[tuple[int, float]]] = {token: [] for token in range(TOKENS)}
    for token, expert, weight in zip(
        found.tokens.tolist(), found.experts.tolist(), found.weights.tolist(), strict=True
    ):
        chosen[token].append((expert, weight))
    return chosen


def scores_of(found, score: str) -> torch.Tensor:
    return found.logits.softmax(1) if score == "softmax" else found.logits.sigmoid()


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("top", [1, 2, 8])
def test_a_token_uses_its_best_experts(score, top):
    _, found = routed(top=top, score=score)
    scores = scores_of(found, score)
    for token, chosen in by_token(found).items():
        best = scores[token].topk(top)
        assert [expert for expert, _ in chosen] == best.indices.tolist()
        weights = best.values / best.values.sum() if top > 1 else best.values
        assert [weight for _, weight in chosen] == pytest.approx(weights.tolist())


def test_weights_may_be_scores():
    _, found = routed(is_normalised=False)
    assert torch.equal(found.weights, scores_of(found, "softmax")[found.tokens, found.experts])


def test_the_bias_changes_the_choice_and_not_the_weights():
    router, _ = routed(top=1, is_normalised=False)
    router.bias[5] = 10.0
    tokens = torch.randn(TOKENS, WIDTH)
    found = router(tokens)
    assert found.experts.tolist() == [5] * TOKENS
    assert torch.equal(found.weights, found.logits.softmax(1)[:, 5])


def test_equal_scores_choose_the_first_experts():
    router, _ = routed(top=3)
    torch.nn.init.zeros_(router.gate.weight)
    assert router(torch.randn(2, WIDTH)).experts.tolist() == [0, 1, 2, 0, 1, 2]


def test_a_token_stays_in_its_best_groups():
    _, found = routed(top=2, groups=4, top_groups=1)
    scores = scores_of(found, "softmax")
    for token, chosen in by_token(found).items():
        of_groups = scores[token].view(4, 2).sum(1)
        assert {expert // 2 for expert, _ in chosen} == {int(of_groups.argmax())}


def test_a_full_expert_takes_first_choices_before_second_ones():
    router, found = routed(top=2, capacity=0.5)
    capacity = router.capacity_of(TOKENS)
    assert capacity == 5
    best = scores_of(found, "softmax").topk(2).indices
    left, kept = [capacity] * EXPERTS, set()
    for choice in range(2):
        for token in range(TOKENS):
            expert = int(best[token, choice])
            if left[expert]:
                left[expert] -= 1
                kept.add((token, expert))
    assert set(zip(found.tokens.tolist(), found.experts.tolist(), strict=True)) == kept
    assert int(found.dropped) == 2 * TOKENS - len(kept)
    assert found.chosen.sum() == 2 * TOKENS, "the load counts what tokens wanted"


def test_next_gives_every_token_its_experts_while_there_is_room():
    router, found = routed(top=2, capacity=1.0, overflow="next")
    assert int(found.dropped) == 0
    assert torch.bincount(found.experts).max() <= router.capacity_of(TOKENS)
    for chosen in by_token(found).values():
        assert len({expert for expert, _ in chosen}) == 2


@pytest.mark.parametrize("is_normalised", [True, False])
def test_gradients_of_the_gate_do_not_depend_on_overflow_that_does_not_happen(is_normalised):
    gradients = []
    for overflow in ("drop", "next"):
        router, found = routed(top=2, capacity=EXPERTS, overflow=overflow, is_normalised=is_normalised)
        (found.weights * torch.arange(len(found.weights))).sum().backward()
        gradients.append(router.gate.weight.grad)
    torch.testing.assert_close(*gradients)
    assert gradients[0].abs().max() > 1e-3


def test_a_single_expert_trains_the_gate():
    router, found = routed(top=1)
    found.weights.square().sum().backward()
    assert router.gate.weight.grad.abs().max() > 1e-3


def test_next_stays_in_the_groups_of_a_token():
    _, found = routed(top=2, capacity=1.0, overflow="next", groups=4, top_groups=1)
    size = EXPERTS // 4
    for chosen in by_token(found).values():
        assert len({expert // size for expert, _ in chosen}) == 1


@pytest.mark.parametrize(
    "routing", [{"score": "Softmax"}, {"chosen_by": "token"}, {"overflow": "skip"}, {"jitter": 3.0}]
)
def test_unknown_choices_are_refused(routing):
    with pytest.raises(ToolkitError, match="expected "):
        Routing(EXPERTS, **routing)


def test_pass_keeps_the_weight_of_a_full_expert_for_the_token():
    _, found = routed(top=2, capacity=0.5, overflow="pass")
    used = torch.zeros(TOKENS).index_add_(0, found.tokens, found.weights)
    assert torch.allclose(used + found.passed, torch.ones(TOKENS))
    assert found.passed.count_nonzero() > 0


def test_experts_choose_equal_numbers_of_tokens():
    _, found = routed(top=2, chosen_by="experts")
    assert torch.bincount(found.experts).tolist() == [TOKENS * 2 // EXPERTS] * EXPERTS
    scores = scores_of(found, "softmax")
    for expert in range(EXPERTS):
        wanted = scores[:, expert].topk(10).indices
        assert {*found.tokens[found.experts == expert].tolist()} == {*wanted.tolist()}


def test_jitter_is_of_training_only():
    router, found = routed(jitter=0.3)
    torch.manual_seed(3)
    again = Router(WIDTH, Routing(EXPERTS, jitter=0.3)).eval()
    assert not torch.equal(found.logits, again(torch.randn(TOKENS, WIDTH)).logits)
    router.eval()
    tokens = torch.randn(4, WIDTH)
    assert torch.equal(router(tokens).logits, router(tokens).logits)


def test_the_gate_stays_in_fp32():
    router, _ = routed()
    with torch.autocast("cpu", torch.bfloat16):
        assert router(torch.randn(4, WIDTH, dtype=torch.bfloat16)).logits.dtype == torch.float32


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"top": 9}, "expected 1 to 8 experts per token, got 9"),
        ({"groups": 3}, "expected a number of groups that divides 8 experts, got 3"),
        ({"groups": 4, "top_groups": 5}, "expected 1 to 4 groups per token, got 5"),
        ({"groups": 8, "top_groups": 1}, "expected at least 2 experts"),
        ({"capacity": -1.0}, "expected a capacity of 0 or more, got -1"),
        ({"capacity": float("nan")}, "expected a capacity of 0 or more, got nan"),
        ({"overflow": "next"}, 'overflow = "next" has no effect without a capacity'),
        ({"chosen_by": "experts", "groups": 2}, "groups, capacity and overflow have no effect"),
    ],
)
def test_impossible_choices_are_refused(given, message):
    with pytest.raises(ToolkitError, match=message):
        Routing(8, **given)
