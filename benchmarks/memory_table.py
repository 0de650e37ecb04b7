"""Compare the predicted peak memory of layouts with the measured one: one run of `toolkit bench memory` per cell.

    python benchmarks/memory_table.py --runs DIR [--model wide] [--cell "zero 3"]

Two models, each with at least 500 MB of parameters, gradients and AdamW state. The exit code is 1 if a cell is more
than 5 % off, or failed. State is per model; ranks of a cell share it as their layout does.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

MOST = 0.05
MODELS = {  # 34 and 33 million parameters
    "wide": {"layers": 4, "width": 832, "heads": 16, "context": 128},
    "deep": {"layers": 10, "width": 512, "heads": 8, "context": 256},
}
CELLS = {
    "one process": (1, {}),
    "DDP 2": (2, {"parallel.replicate": 2}),
    "zero 1": (2, {"parallel.shard": 2, "parallel.zero": 1}),
    "zero 2": (2, {"parallel.shard": 2, "parallel.zero": 2}),
    "zero 3": (2, {"parallel.shard": 2, "parallel.zero": 3}),
    "tp 2": (2, {"parallel.tp": 2}),
    "pp 2": (2, {"parallel.pp": 2, "parallel.balance": "parameters"}),
    "recompute": (1, {"train.recompute": "every"}),
    "offload, host": (1, {"train.offload": "optimizer"}),
    "offload, file": (1, {"train.offload": "optimizer", "train.offload_to": "{runs}"}),
}  # fmt: skip
COMMON = {"train.batch": 4, "train.micro_batch": 1, "args.dropout": 0.0, "args.max_bytes": 100000}


def measured(model: str, cell: str, runs: Path, smaller: int) -> dict[str, object] | None:
    ranks, settings = CELLS[cell]
    shape = MODELS[model] | {"width": MODELS[model]["width"] // smaller}
    values = COMMON | {f"args.{name}": value for name, value in shape.items()} | settings
    chosen = [f"--set={name}={str(value).format(runs=runs)}" for name, value in values.items()]
    command = [
        str(Path(sys.executable).with_name("toolkit")),
        "bench",
        "memory",
        "train_lm",
        "--site=local",
        f"-n{ranks}",
        f"--runs={runs}",
        "--json",
        *chosen,
    ]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        sys.stderr.write(found.stderr[-2000:])
        return None
    report: dict[str, object] = json.loads(found.stdout)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, required=True, help="folder for the runs, not on a tmpfs")
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--cell", choices=CELLS, action="append")
    parser.add_argument("--smaller", type=int, default=1, help="divide the width, for a trial")
    options = parser.parse_args()
    options.runs.mkdir(parents=True, exist_ok=True)
    print(
        f"{'model':6}{'cell':16}{'rank':>5}{'phase':>11}{'predicted MiB':>15}{'measured MiB':>14}{'error':>9}",
        flush=True,
    )
    is_good = True
    for model in options.model or MODELS:
        for cell in options.cell or CELLS:
            report = measured(model, cell, options.runs.resolve(), options.smaller)
            is_good &= report is not None
            for rank in report["ranks"] if report else ():  # type: ignore[attr-defined]
                peak, phases = rank["peak"], rank["phases"]
                top = max(phases, key=lambda name: phases[name]["measured"])
                if peak["predicted"] is None:
                    print(f"{model:6}{cell:16}{rank['rank']:5} not predicted: {rank['why_not']}", flush=True)
                    is_good = False
                    continue
                error = peak["predicted"] / peak["measured"] - 1
                is_good &= abs(error) <= MOST
                sizes = f"{peak['predicted'] / 2**20:15,.1f}{peak['measured'] / 2**20:14,.1f}"
                print(f"{model:6}{cell:16}{rank['rank']:5}{top:>11}{sizes}{100 * error:+8.1f} %", flush=True)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
