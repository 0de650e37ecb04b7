"""Measure the seconds to read batches with toolkit's loader, against torch's DataLoader on the same samples.

    python benchmarks/data_loading.py [--batches 400] [--batch 32] [--context 1024] [--workers 0 1 2]

Samples are windows of a token file that both map into memory. torch's dataset returns one window per call, as users
usually write it, with a DistributedSampler and the default collation; toolkit reads a whole batch. A second comparison
uses the same map dataset for both. Runs alternate. Prints one JSON object; `ratio` is ours / torch of the medians of
5 runs each, and below 1 if toolkit is faster.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from toolkit.train.data import Loader, LoaderSettings, MapSource, TokenSource
from toolkit.train.data.preprocess import pack
from toolkit.train.data.token_file import map_tokens

RUNS = 5
TARGET = 1.05
PREFETCH = 2


class WindowsByHand(Dataset[Any]):
    """The dataset that a user would write without toolkit."""

    def __init__(self, path: Path, context: int) -> None:
        self.tokens = map_tokens(path)
        self.context = context

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = position * self.context
        window = torch.from_numpy(self.tokens[start : start + self.context + 1].astype(np.int64))
        return window[:-1], window[1:]


def torchs(dataset: Dataset[Any], options: argparse.Namespace, workers: int) -> float:
    sampler = DistributedSampler(dataset, num_replicas=1, rank=0, seed=0)
    loader = DataLoader(
        dataset,
        batch_size=options.batch,
        sampler=sampler,
        num_workers=workers,
        prefetch_factor=PREFETCH if workers else None,
        drop_last=True,
    )
    batches = iter(loader)
    return seconds_of(lambda: next(batches), options.batches)


def ours(source: Any, options: argparse.Namespace, workers: int) -> float:
    settings = LoaderSettings(workers, PREFETCH)
    with Loader(source, batch=options.batch, seed=0, settings=settings) as loader:
        batches = loader.batches()
        return seconds_of(lambda: next(batches), options.batches)


def seconds_of(read: Callable[[], Any], batches: int) -> float:
    """Return the seconds for `batches` batches, after a warm-up in which all workers start."""
    for _ in range(10):
        inputs, targets = read()
    assert inputs.dtype == targets.dtype == torch.int64
    began = time.perf_counter()
    for _ in range(batches):
        read()
    return time.perf_counter() - began


def compared(dataset: Dataset[Any], source: Any, options: argparse.Namespace, workers: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {"ours": [], "torch": []}
    for _ in range(RUNS):
        seconds["torch"].append(torchs(dataset, options, workers))
        seconds["ours"].append(ours(source, options, workers))
    medians = {name: statistics.median(of) / options.batches * 1000 for name, of in seconds.items()}
    return {
        "workers": workers,
        "ratio": round(medians["ours"] / medians["torch"], 4),
        "ours_ms_per_batch": round(medians["ours"], 4),
        "torch_ms_per_batch": round(medians["torch"], 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=400)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        text, tokens = Path(name) / "text", Path(name) / "text.tokens"
        # One epoch contains exactly the batches that are read, so that both read every window once.
        windows = (options.batches + 20 + PREFETCH * max(options.workers)) * options.batch
        text.write_bytes(np.random.default_rng(0).bytes(windows * options.context + 1))
        pack([text], tokens)
        dataset = WindowsByHand(tokens, options.context)
        result = {
            "batch": options.batch,
            "context": options.context,
            "batches": options.batches,
            "runs": RUNS,
            "tokens": [compared(dataset, TokenSource([tokens], options.context), options, w) for w in options.workers],
            "map": [compared(dataset, MapSource(dataset), options, w) for w in options.workers],
        }
    result |= {
        "target": TARGET,
        "met": all(one["ratio"] <= TARGET for kind in ("tokens", "map") for one in result[kind]),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
