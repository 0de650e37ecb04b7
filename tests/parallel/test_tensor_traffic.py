"""What tensor parallel ranks send: no logits, and with pieces of the sequence no stream is summed on every rank."""

from __future__ import annotations

import pytest
import torch
from launch import launch
from tensor_cases import MODEL, job, laid, micro_batches
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

LAYERS = MODEL["layers"]
LOSS = 3  # all-reduces of (batch x context) numbers: the largest logit, the sum of exponentials, the one that was right


def count(world, config, wanted: dict[str, int]) -> None:
    from toolkit.jobs import train_lm

    model = laid(world, config)
    batches = micro_batches(model, config, 0)[:1]  # the mode's own hooks take one
    losses: list[Tensor] = []

    def pass_once() -> None:
        model.module.zero_grad(set_to_none=True)
        model.run(batches, train_lm.loss_of, losses.append, torch.autocast("cpu", enabled=False))

    for _ in range(2):  # in which gradients are compared
        pass_once()
    with CommDebugMode() as sent:
        pass_once()
    names = {"all_reduce": 0, "all_gather_into_tensor": 0, "reduce_scatter_tensor": 0, "allreduce_": 0}
    found = {
        str(kind).split(".")[-1].rstrip(")>'"): number for kind, number in sent.get_comm_counts().items() if number
    }
    assert names | found == names | wanted, found
    assert not isinstance(losses[0], DTensor) and losses[0].shape == ()
    inputs, targets = batches[0]
    assert isinstance(model.module(inputs), DTensor)
    with torch.no_grad():
        logits = model.module.eval()(inputs)
    assert not isinstance(logits, DTensor) and logits.shape == (*inputs.shape, 256)
    torch.testing.assert_close(train_lm.loss_of(logits, targets), losses[-1])


@pytest.mark.parametrize(
    ("sequence", "wanted"),
    [
        # What two embeddings give, and two rows a block; the gradients of what goes into two columns, and into the head.
        (False, {"all_reduce": 2 + 2 * LAYERS + 2 * LAYERS + 1 + LOSS}),
        # The same sums, scattered, and as many gathers the other way; the gradients of norms in one message.
        (
            True,
            {
                "reduce_scatter_tensor": 2 + 2 * LAYERS + 2 * LAYERS + 1,
                "all_gather_into_tensor": 2 + 2 * LAYERS + 2 * LAYERS + 1,
                "all_reduce": LOSS,
                "allreduce_": 1,
            },
        ),
    ],
)
def test_ranks_send_what_megatron_does_and_no_logits(tmp_path, sequence, wanted):
    launch(count, 2, tmp_path, job({"tp": 2, "sequence": sequence}), wanted)
