"""DeepSpeed's checkpoints of another number of ranks; without DeepSpeed itself."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from toolkit.errors import ToolkitError
from toolkit.integrations import deepspeed


def test_another_number_of_ranks_is_refused_with_the_command_that_converts(tmp_path) -> None:
    saved = tmp_path / "global_step120"
    saved.mkdir()
    for rank in (0, 1):
        (saved / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    (tmp_path / "latest").write_text("global_step120")
    with pytest.raises(ToolkitError, match="a checkpoint of 1 data-parallel ranks, got one of 2") as refused:
        deepspeed.ToolkitLoop(SimpleNamespace(dp_world_size=1, global_steps=0), tmp_path).load()
    assert f"deepspeed.checkpoint.ds_to_universal --inject_missing_state --input_folder {saved} " in refused.value.fix


def test_a_step_ends_when_the_optimizer_has_stepped_and_the_last_saves_remain(tmp_path) -> None:
    engine = SimpleNamespace(global_steps=0, global_rank=0)
    engine.save_checkpoint = lambda folder, tag: saved.append(tag) or (tmp_path / tag).mkdir()
    saved: list[str] = []
    (tmp_path / "global_step1_universal").mkdir()
    loop = deepspeed.ToolkitLoop(engine, tmp_path, every=2, keep=1)
    for micro_step in range(12):
        engine.global_steps = (micro_step + 1) // 2
        assert not loop.step()
    assert saved == ["global_step2", "global_step4", "global_step6"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step1_universal", "global_step6"]
