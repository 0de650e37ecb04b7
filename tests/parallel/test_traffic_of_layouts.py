"""The bytes that ranks send in a step are those that `topo groups` expects of the layout."""

from __future__ import annotations

import json
from typing import Any

import parity
import pytest
from launch import launch
from parity import Layout
from sampling import sampled

from toolkit.comm.sent_bytes import SentBytes
from toolkit.topology.model_traffic import Transformer, model_traffic, step_of
from toolkit.topology.traffic import edge_bytes
from toolkit.train.loop.step import OptimizerStep

SHAPE = {"layers": 4, "width": 128, "heads": 4, "context": 64}
BATCH, MICRO_BATCH, COUNTED_STEP = 8, 2, 3
RING = {"context": "ring"}
# Small sums, such as that of the loss; tensor parallel embeddings and losses; parts of a model of experts that
# `Transformer` does not describe.
CLOSE, TP, EXPERTS = 0.01, 0.2, 0.12


def count_a_step(world: Any, config: Any) -> None:
    take, steps, model = OptimizerStep.take, [], {}

    def counted(self: OptimizerStep, *given: Any, **named: Any) -> Any:
        steps.append(None)
        if len(steps) != COUNTED_STEP:
            return take(self, *given, **named)
        model["parameters"] = self.model.parameters
        with SentBytes() as sent:
            result = take(self, *given, **named)
        model["sent"] = sent.total
        return result

    OptimizerStep.take = counted  # type: ignore[method-assign]
    parity.train(world, config)
    (world.run_dir / f"sent-{world.rank}.json").write_text(json.dumps(model))


@pytest.mark.parametrize(
    ("ranks", "parallel", "tolerance"),
    sampled(
        [
            (2, {}, CLOSE),
            (2, {"shard": 2, "zero": 1}, CLOSE),
            (2, {"shard": 2, "zero": 2}, CLOSE),
            (2, {"shard": 2}, CLOSE),
            (4, {"shard": 2}, CLOSE),
            (2, {"cp": 2, "context": "heads"}, CLOSE),
            (4, {"cp": 4} | RING, CLOSE),
            (4, {"cp": 2, "shard": 2} | RING, CLOSE),
            (2, {"tp": 2}, TP),
            (2, {"shard": 2, "ep": 2}, EXPERTS),
            (4, {"shard": 4, "ep": 2}, EXPERTS),
        ],
        lambda case: case[1] == {"shard": 2, "zero": 2} or case[1].get("cp") == 4,
    ),
)
def test_a_rank_sends_what_the_model_expects(tmp_path, ranks, parallel, tolerance):
    sizes = {name: parallel.get(name, 1) for name in ("pp", "shard", "cp", "tp", "ep")}
    sizes["replicate"] = ranks // (sizes["shard"] * sizes["cp"] * sizes["tp"])
    has_experts = sizes["ep"] > 1
    layout = Layout(
        "counted", ranks, parallel, SHAPE | ({"expert_hidden": 128} if has_experts else {}), has_experts=has_experts
    )
    config = parity.job_of(layout, steps=COUNTED_STEP, batch=BATCH, micro_batch=MICRO_BATCH)
    launch(count_a_step, ranks, tmp_path, config)
    counted = [json.loads((tmp_path / f"sent-{rank}.json").read_text()) for rank in range(ranks)]
    model = Transformer(
        counted[0]["parameters"], SHAPE["layers"], SHAPE["width"], SHAPE["context"],
        experts=parity.EXPERTS["experts"] if has_experts else 0, bytes_per_element=4,
    )  # fmt: skip
    step = step_of(BATCH, MICRO_BATCH, sizes)
    traffic = model_traffic(model, step, sizes, parallel.get("zero", 3), parallel.get("context", "ring"))
    expected = sum(edge_bytes(one, sizes[name]) for name, one in traffic.items())
    assert [one["sent"] for one in counted] == pytest.approx([expected] * ranks, rel=tolerance)
