"""Load a model of Hugging Face into shards over ranks; compare with `from_pretrained` in one process.

    python benchmarks/hf_loading.py FOLDER [--rounds 5] [--ranks 4] [--width 2048] [--layers 8]

Writes a Llama of about 2 GB in float32 to FOLDER/model, in several files, unless it exists. Each round starts the ranks
(gloo on CPUs, parallel.shard = RANKS, zero = 3), then one process with `from_pretrained`, so that load of other programs
affects both. The files are in the page cache. Times include opening the folder and one read of each page of weights, because
`from_pretrained` only maps the files; imports are excluded. Memory is the growth of VmHWM in this time, of the rank with
the largest one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from toolkit.config.document import Flag
from toolkit.config.request import resolve_job
from toolkit.config.shipped import shipped_jobs
from toolkit.jobs.finetune_lora import tiny_model
from toolkit.parallel.distribute import Design, distribute
from toolkit.parallel.mesh import make_mesh
from toolkit.topology.gather import gather_topology
from toolkit.train.huggingface.models import library, open_folder
from toolkit.world.facts import World

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def write_model(folder: Path, width: int, layers: int) -> None:
    config = library().LlamaConfig(
        vocab_size=16_000, hidden_size=width, intermediate_size=width * 11 // 4, num_hidden_layers=layers,
        num_attention_heads=16, num_key_value_heads=16, tie_word_embeddings=False,
    )  # fmt: skip
    model = library().AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder, max_shard_size="400MB")
    tiny_model().tokenizer.save_pretrained(folder)


def of_status(name: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10


class Measured:
    """The seconds within this context, and the growth of VmHWM."""

    def __enter__(self) -> Measured:
        CLEAR.write_text("5")  # sets VmHWM to VmRSS
        self.bytes, self.seconds = -of_status("VmRSS"), -time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter()
        self.bytes += of_status("VmHWM")


def never(name: str, tensor: torch.Tensor) -> None:
    raise AssertionError(f"{name} is not read from the folder")


def load_sharded(folder: Path, rank: int, ranks: int, store: str) -> dict[str, Any]:
    """Load this rank's shards, and check one of them."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    world = World(rank, rank, ranks, ranks, 0, 1, "here", "cpu", "local", "benchmark", attempt=0)
    flags = {"parallel.shard": Flag(ranks, "benchmark"), "job.ranks_per_node": Flag(ranks, "benchmark")}
    config = resolve_job(shipped_jobs()["finetune_lora"], site=None, environ={}, flags=flags)
    topology = gather_topology(world)
    mesh = make_mesh(world, config, topology)
    import_model_code()
    dist.barrier()
    with Measured() as measured:
        model = open_folder(folder)
        design = Design(model.build, never, model.outline, read=model.read)
        loaded = distribute(design, world, mesh, config, topology)
        parts = [getattr(one, "_local_tensor", one).detach() for one in loaded.module.parameters()]
        touch(parts)
        dist.barrier()
    checksum = total(parts)
    dist.all_reduce(checksum)
    own = sum(one.numel() * 4 for one in parts)
    return {"seconds": measured.seconds, "bytes": measured.bytes, "own": own, "sum": float(checksum)}


def touch(parts: Iterable[torch.Tensor]) -> None:
    """Read a number of each page, and with it the pages of files that are only mapped so far."""
    for one in parts:
        one.reshape(-1)[::1024].sum()


def total(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.stack([one.sum(dtype=torch.float64) for one in parts]).sum()


def import_model_code() -> None:
    """Import what both methods need, which transformers does on first use."""
    library().AutoModelForCausalLM.from_config(tiny_model().config)


def load_whole(folder: Path) -> dict[str, Any]:
    import_model_code()
    with Measured() as measured:
        model = library().AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
        opened_s = measured.seconds + time.perf_counter()
        touch(one.detach() for one in model.parameters())
    checksum = float(total(one.detach() for one in model.parameters()))
    own = sum(one.numel() * 4 for one in model.parameters())
    return {"seconds": measured.seconds, "bytes": measured.bytes, "own": own, "sum": checksum, "opened_s": opened_s}


def results_of(folder: Path, ranks: int) -> list[dict[str, Any]]:
    """Start ranks, or one process with `from_pretrained` for 0."""
    environ = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        command = [sys.executable, __file__, str(folder), "--store", f"{place}/store", "--ranks", str(ranks)]
        started = [
            subprocess.Popen([*command, "--rank", str(rank)], env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            for rank in range(max(1, ranks))
        ]  # fmt: skip
        printed = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        sys.exit(f"a process failed: exit codes {[process.returncode for process in started]}")
    return [json.loads(one.splitlines()[-1]) for one in printed]


def shown(name: str, rounds: list[tuple[float, int]], own: int) -> str:
    seconds, peaks = [one for one, _ in rounds], [peak for _, peak in rounds]
    return (
        f"{name}: share {own / 1e6:.0f} MB, peak growth min {min(peaks) / 1e6:.0f}, median "
        f"{statistics.median(peaks) / 1e6:.0f} MB ({statistics.median(peaks) / own:.2f} of the share); "
        f"time min {min(seconds):.2f}, median {statistics.median(seconds):.2f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    for name, default in (("rounds", 5), ("ranks", 4), ("width", 2048), ("layers", 8), ("rank", -1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--store", default="")
    options = parser.parse_args()
    if options.rank >= 0:
        folder, ranks = options.folder, options.ranks
        print(json.dumps(load_sharded(folder, options.rank, ranks, options.store) if ranks else load_whole(folder)))
        return
    folder = options.folder.resolve() / "model"
    if not (folder / "config.json").exists():
        write_model(folder, options.width, options.layers)
    files = list(folder.glob("*.safetensors"))
    print(f"{sum(file.stat().st_size for file in files) / 1e9:.2f} GB in {len(files)} files", flush=True)
    sharded: list[tuple[float, int]] = []
    whole: list[tuple[float, int]] = []
    for number in range(options.rounds + 1):  # the first round only fills the page cache
        of_ranks, (of_one,) = results_of(folder, options.ranks), results_of(folder, 0)
        assert abs(of_ranks[0]["sum"] - of_one["sum"]) < 1e-6 * abs(of_one["sum"]) + 1e-3, (of_ranks[0], of_one)
        if number:
            sharded.append((max(one["seconds"] for one in of_ranks), max(one["bytes"] for one in of_ranks)))
            whole.append((of_one["seconds"], of_one["bytes"]))
            opened = f"{whole[-1][0]:.2f} s (files mapped after {of_one['opened_s']:.2f} s)"
            print(f"round {number}: {sharded[-1][0]:.2f} s, from_pretrained {opened}", flush=True)
    print(shown(f"{options.ranks} ranks", sharded, max(one["own"] for one in of_ranks)))
    print(shown("from_pretrained, one process", whole, of_one["own"]))


if __name__ == "__main__":
    main()
