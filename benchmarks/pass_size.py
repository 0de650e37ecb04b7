"""What small passes cost: processor time of a sample, forward and backward, by the samples of a pass.

    OMP_NUM_THREADS=1 python benchmarks/pass_size.py [--rounds 9]

The model of `jobs/train_lm.py` in three sizes; a sample is 128 tokens. All sizes of a pass come by turns, round after round.
The rule of `toolkit bench step` about small passes rests on this. Prints one JSON object: for each model the median time of
a sample by the samples of its pass, as a multiple of that of the largest pass.
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
    parser.add_argument("--rounds", type=int, default=9, help="5 or more")
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
