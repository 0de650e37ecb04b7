"""Measure what small micro-batches cost: CPU time per sample, forward and backward, by the number of samples in a pass.

    OMP_NUM_THREADS=1 python benchmarks/pass_size.py [--rounds 9]

Uses the model of `jobs/train_lm.py` in three sizes; a sample is 128 tokens. Each round runs all sizes of a pass. The
advice of `toolkit bench step` about small micro-batches is based on these results. Prints one JSON object: for each
model, the median time per sample by the samples in a pass, relative to the largest pass.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from toolkit.jobs import train_lm

SHAPES = ((32, 1), (64, 2), (128, 2))  # width, layers
SAMPLES = (1, 2, 4, 8)
TOKENS = 128


def seconds_of_a_sample(model: torch.nn.Module, samples: int) -> float:
    text = torch.randint(0, train_lm.BYTES, (samples, TOKENS))
    began = time.thread_time()
    train_lm.loss_of(model(text), text).backward()
    return (time.thread_time() - began) / samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="number of rounds, at least 5")
    options = parser.parse_args()
    torch.set_num_threads(1)
    models = {}
    for width, layers in SHAPES:
        model = train_lm.GPT(train_lm.Arguments(layers=layers, width=width, heads=4, context=TOKENS))
        rounds = [
            {samples: seconds_of_a_sample(model, samples) for samples in SAMPLES} for _ in range(options.rounds + 1)
        ][1:]
        times = {samples: statistics.median(one[samples] for one in rounds) for samples in SAMPLES}
        models[f"width {width}, layers {layers}"] = {
            str(samples * TOKENS): round(seconds / times[SAMPLES[-1]], 2) for samples, seconds in times.items()
        }
    result = {
        "rounds": options.rounds,
        "torch": str(torch.__version__),
        "times_of_a_sample_by_tokens_of_a_pass": models,
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
