"""A rank that runs out of memory: its error names what filled it, and the smaller micro-batch keeps the global batch."""

from __future__ import annotations

import re
import resource
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from launch import job, said_by
from tiny_training import note, train

from toolkit.config.train import ParallelTable, TrainTable, no_micro_batches
from toolkit.train.memory.out_of_memory import halved_micro_batch, memory_parts
from toolkit.train.memory.streamed_optimizer import StreamedOptimizer
from toolkit.train.memory.tier import FileTier


@given(st.integers(1, 512), st.integers(0, 512), st.integers(0, 3), st.sampled_from([1, 2, 4]))
def test_a_smaller_micro_batch_divides_the_samples_of_a_rank(share, micro_batch, halvings, stages):
    train_table, parallel = TrainTable(batch=share, micro_batch=micro_batch), ParallelTable(pp=stages)
    size = halved_micro_batch(train_table, parallel, share, halvings)
    assert share % size == 0 and size <= max(1, (micro_batch or share) >> halvings)
    assert size == 1 or not no_micro_batches(parallel, share // size)


def with_little_memory(world, config) -> None:
    lines = Path("/proc/self/status").read_text().splitlines()
    used = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData"))
    wide = torch.zeros(4, 8)

    def take_samples(samples):
        resource.setrlimit(resource.RLIMIT_DATA, (used + (200 << 20), resource.RLIM_INFINITY))
        inputs = wide.repeat(2_000_000, 1)  # 256 MB
        return inputs, inputs[:, :1]

    try:
        train(world, config, take_samples)
    except RuntimeError as error:
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        note(world, error=str(error))


def test_the_error_of_a_real_allocation_names_the_parts(tiny_training):
    tiny_training.launch(with_little_memory, 1, job(steps=2, batch=4, warmup_steps=0))
    said = tiny_training.findings(0)["error"]
    assert re.search(r"can't allocate memory: .*\(memory of this rank: parameters 612 B, gradients", said), said


def test_the_parts_are_the_bytes_of_the_tensors():
    model = torch.nn.Linear(1000, 100, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 1000)).sum().backward()
    optimizer.step()
    parts = memory_parts(model, optimizer)
    assert parts["parameters"] == parts["gradients"] == 400_000
    assert parts["optimizer state"] == 800_000 + 4  # the step counter is one float
    assert parts["activations, libraries and the rest"] > 100_000_000, "torch itself"


def test_state_in_a_file_uses_no_memory(tmp_path):
    model, tier = torch.nn.Linear(1000, 100, bias=False), FileTier(tmp_path)
    optimizer = StreamedOptimizer(torch.optim.AdamW(model.parameters()), tier)
    model(torch.randn(2, 1000)).sum().backward()
    optimizer.step()
    assert memory_parts(model, optimizer, tier)["optimizer state"] == 4, "the step counter stays in memory"


def test_the_trainer_says_the_size_of_an_attempt_after_halvings(tmp_path, tiny_training):
    tiny_training.launch(after_two_halvings, 1, job(steps=1, batch=8, micro_batch=8, warmup_steps=0))
    assert "micro-batch: 2 after 2 halvings, because a rank ran out of memory" in said_by(tmp_path, 0)
    assert tiny_training.findings(0) == {"micro_batch": 2, "batch": 8}


def test_no_attempt_repeats_the_smallest_size(tmp_path, tiny_training):
    with pytest.raises(AssertionError):
        tiny_training.launch(after_two_halvings, 1, job(steps=1, batch=8, micro_batch=2, warmup_steps=0))
    assert "a rank ran out of memory with a micro-batch of 1, and no smaller one is possible" in said_by(tmp_path, 0)


def after_two_halvings(world, config) -> None:
    from dataclasses import replace

    trainer = train(replace(world, halvings=2), config)
    note(world, micro_batch=trainer._config.train.micro_batch, batch=trainer._config.train.batch)
