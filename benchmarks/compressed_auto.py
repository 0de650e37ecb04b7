"""`gradient_compression.algorithm = "auto"` beside DDP while a link goes from unlimited to 50 Mbit/s and back.

    toolkit devcluster --name links up --nodes 4
    python benchmarks/compressed_auto.py links [--rates none,50mbit,none --steps 60,60,90]

Four nodes of the dev cluster with one rank each train the GPT of compressed_links.py twice, one step of each after the other.
Prints the seconds of steps on each link, and the choices with the step before which they were made.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parent))

from compressed_links import MODEL, SAMPLES, Trained, take  # noqa: E402

import toolkit  # noqa: E402
from toolkit.train.data.text import Windows, read_bytes, standard_library_sources  # noqa: E402
from toolkit.world.facts import World  # noqa: E402

JOB = """[job]
entry = "{script}:measure"
[args]
folder = "{folder}"
steps = {steps}
"""


def measure(world: World, config: Any) -> list[dict[str, Any]]:
    """Run on each rank; rank 0 returns the seconds of the steps on each link, and the choices."""
    torch.set_num_threads(1)
    folder = Path(config.args["folder"])
    data = Windows(read_bytes(standard_library_sources(), max_bytes=2_000_000), MODEL.context)
    drawn = torch.Generator().manual_seed(100 + world.rank)
    trained = {name: Trained(world, name) for name in ("none", "auto")}
    found = []
    for number, steps in enumerate(config.args["steps"]):
        while not (folder / f"link-{number}").exists():
            time.sleep(0.1)
        printed = io.StringIO()
        with contextlib.redirect_stderr(printed):
            for _ in range(steps):
                batch = take(data, drawn, SAMPLES)
                for one in trained.values():
                    dist.barrier()
                    one.step(*batch)
        if world.rank == 0:
            (folder / f"measured-{number}").touch()
        seconds = {name: one.seconds[-steps:] for name, one in trained.items()}
        found.append({"load": os.getloadavg()[0], "seconds": seconds, "choices": printed.getvalue().splitlines()})
    return found


def shape(cluster: str, rate: str) -> None:
    command = [Path(sys.executable).with_name("toolkit"), "devcluster", "--name", cluster, "shape", "all", rate]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def report(rate: str, found: dict[str, Any]) -> None:
    print(f"\nlink {rate}, load {found['load']:.1f}")
    dense = statistics.median(found["seconds"]["none"])
    for name, seconds in found["seconds"].items():
        middle = statistics.median(seconds)
        print(
            f"  {name:<5} minimum {min(seconds):.3f}, median {middle:.3f} s, {middle / dense:.2f} of dense; after 20 steps "
            f"{statistics.median(seconds[20:]) / statistics.median(found['seconds']['none'][20:]):.2f}; all steps "
            f"{sum(seconds) / sum(found['seconds']['none']):.2f}"
        )
    for line in found["choices"]:
        print(f"  {line}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cluster")
    parser.add_argument("--rates", default="none,50mbit,none")
    parser.add_argument(
        "--steps", default="60,60,90", help="of each rate; decisions come before steps 19, 60, 110, ..."
    )
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    given = parser.parse_args()
    rates, steps = given.rates.split(","), [int(one) for one in given.steps.split(",")]
    folder = given.runs.resolve() / f"auto-{os.getpid()}"
    folder.mkdir(parents=True)
    job = folder / "compressed_auto.toml"
    job.write_text(JOB.format(script=HERE, folder=folder, steps=steps))
    shape(given.cluster, rates[0])
    run = toolkit.submit(job, nodes=4, ranks_per_node=1, time="0:20:00", runs=given.runs)
    for number, rate in enumerate(rates):
        shape(given.cluster, rate)
        (folder / f"link-{number}").touch()
        while not (folder / f"measured-{number}").exists() and not run.done():
            time.sleep(0.1)
    run.wait()
    for rate, found in zip(rates, run.result(), strict=True):
        report(rate, found)


if __name__ == "__main__":
    main()
