"""Compare saving and loading with toolkit ("ours"), DCP's own format, torch.save and safetensors, for the same state.

Prints one JSON object: medians in seconds until the last rank has finished, and ratios (ours / theirs; below 1 is
faster). All methods sync their files to disk, rounds are interleaved, Python's garbage collector is off, and every
loaded state is compared bit by bit with the saved one. docs/checkpoints.md, "Speed", describes the methods.

    python benchmarks/checkpoint_speed.py [--cases 1x256 2x256 4x256] [--shapes large many]
        [--folders tmpfs disk] [--disk DIR] [--rounds 5] [--plan 1024] [--markdown]
    python benchmarks/checkpoint_speed.py --write-docs    # write evidence/checkpoint_speed.json to the docs as tables
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp
from checkpoint_speed_planning import planning
from checkpoint_speed_ranks import Case, one_rank
from checkpoint_speed_tables import ratios, tables

ROOT = Path(__file__).resolve().parents[1]
EVIDENCE = ROOT / "evidence" / "checkpoint_speed.json"
DOCS = ROOT / "docs" / "checkpoints.md"
BEGIN, END = "<!-- begin: benchmarks/checkpoint_speed.py --write-docs -->", "<!-- end -->"


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all requested cases. Files are removed even after an error."""
    began = time.monotonic()
    bases = {"tmpfs": Path("/dev/shm"), "disk": options.disk}
    machine = {
        "cores": os.cpu_count(), "load_average": os.getloadavg()[0], "python": platform.python_version(),
        "torch": version("torch"), "safetensors": version("safetensors"),
    }  # fmt: skip
    results: list[dict[str, Any]] = []
    with ExitStack() as made:
        folders = {}
        for kind in options.folders:
            folders[kind] = Path(made.enter_context(tempfile.TemporaryDirectory(prefix="speed-", dir=bases[kind])))
        store = Path(made.enter_context(tempfile.TemporaryDirectory(prefix="speed-")))
        for number, (ranks, megabytes) in enumerate(options.cases):
            case = Case(ranks, megabytes, tuple(options.shapes), folders, options.rounds)
            print(f"{ranks} ranks, {megabytes} MB, after {time.monotonic() - began:.0f} s", file=sys.stderr)
            run_ranks(case, store / f"store-{number}")
            results += json.loads((store / "results.json").read_text())
        for result in results:
            result["ratio"] = ratios(result)
        planned = planning(options.plan, folders[options.folders[-1]], options.rounds) if options.plan else None
    return {
        "machine": machine,
        "rounds": options.rounds,
        "cold": "pages of the files dropped with posix_fadvise",
        "cases": results,
        "planning": planned,
        "seconds": round(time.monotonic() - began),
    }


def run_ranks(case: Case, store: Path) -> None:
    """Run the ranks, and kill the remaining ones at the end: they would write to folders that are being removed."""
    context = mp.spawn(one_rank, (case, store), nprocs=case.ranks, join=False)
    try:
        while not context.join():
            pass
    finally:
        for process in context.processes:
            process.kill()
            process.join()


def case_of(text: str) -> tuple[int, int]:
    """Parse a case such as "2x256": the number of ranks, and the MB that they save together."""
    ranks, _, megabytes = text.partition("x")
    return int(ranks), int(megabytes)


def write_docs() -> None:
    """Replace the tables between the markers in the docs."""
    text = DOCS.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCS.write_text(f"{before}{BEGIN}\n{tables(json.loads(EVIDENCE.read_text())['result'])}\n{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases = ["1x256", "2x256", "4x256"]
    parser.add_argument("--cases", nargs="+", type=case_of, default=list(map(case_of, cases)), metavar="RANKSxMB")
    parser.add_argument("--shapes", nargs="+", choices=("large", "many"), default=["large", "many"])
    parser.add_argument("--folders", nargs="+", choices=("tmpfs", "disk"), default=["tmpfs", "disk"])
    parser.add_argument("--disk", type=Path, default=Path.home(), help="folder on a disk (default: the home folder)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plan", type=int, default=0, help="also simulate the planning of a save on N ranks")
    parser.add_argument("--markdown", action="store_true", help="print tables instead of JSON")
    parser.add_argument("--write-docs", action="store_true", help="write recorded results to the docs; measure nothing")
    options = parser.parse_args()
    if options.write_docs:
        write_docs()
        return
    for number in (signal.SIGTERM, signal.SIGINT):  # so that the folders are removed, without a traceback
        signal.signal(number, lambda got, _: sys.exit(128 + got))
    result = measure(options)
    print(tables(result) if options.markdown else json.dumps(result))


if __name__ == "__main__":
    main()
