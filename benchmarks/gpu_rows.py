"""The rows of `gpu_check.py`. `python gpu_rows.py ROW DEVICE FOLDER` prints the result of one as a JSON object.

Rows run the real program: a job file whose entry is a function below, started by `toolkit run`. To add a row, add a
function that returns its values, or raises `FailedRowError`, and its line in `ROWS`.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

Values = dict[str, Any]
GIB = 1 << 30
# About 151 million parameters, 16,384 tokens per step; small enough for 24 GB, large enough to keep an H100 busy.
ON_GPU = {"layers": 12, "width": 1024, "heads": 16, "context": 1024}
ON_CPU = {"layers": 2, "width": 64, "heads": 4, "context": 64}
PASSED = ("LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_DEVICE_ORDER", "CC", "TRITON_CACHE_DIR", "TRITON_LIBCUDA_PATH")


class FailedRowError(Exception):
    """A row whose result is not as expected; the message states both."""


def expect(is_met: bool, expected: str, got: object) -> None:
    """Fail the row unless a condition is met."""
    if not is_met:
        raise FailedRowError(f"expected {expected}, got {got}")


@dataclass(frozen=True)
class Place:
    """Where a row runs."""

    device: str
    folder: Path

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    def toolkit(self, *argv: str, variables: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run toolkit; its stderr is in the row's output."""
        command = [sys.executable, "-c", "from toolkit.cli.main import main; main()", *argv]
        chosen = {**os.environ, **(variables or {})}
        done = subprocess.run(command, cwd=self.folder, env=chosen, capture_output=True, text=True)
        sys.stderr.write(
            f"$ toolkit {' '.join(argv)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}exit code {done.returncode}\n"
        )
        return done

    def run(self, entry: str, *, variables: Mapping[str, str] | None = None, code: int = 0, **settings: Any) -> Path:
        """Run a job with one rank whose entry is a function of this file; return its run directory."""
        shutil.copy(__file__, self.folder)
        known = [name for name in PASSED if name in os.environ]
        job = f'[job]\nname = "{entry}"\nentry = "{Path(__file__).name}:{entry}"\nranks_per_node = 1\n'
        job += f"[env]\npass = {json.dumps(known)}\n[restart]\ncrashes = 0\nstall_s = 100\n"
        (self.folder / "job.toml").write_text(job)
        # In --set, "__" is the dot between a table and its key.
        chosen = [f"--set={name.replace('__', '.')}={json.dumps(value)}" for name, value in settings.items()]
        done = self.toolkit("run", "job.toml", "--site", "local", "--runs", "runs", *chosen, variables=variables)
        run = max((self.folder / "runs" / entry).glob("2*"))
        if (done.returncode == 0) != (code == 0):
            reason = self.toolkit("explain", str(run)).stdout.strip().splitlines()
            raise FailedRowError(
                f"expected exit code {code} of {entry}, got {done.returncode}: {' | '.join(reason[:4])}"
            )
        return run

    def train(self, entry: str = "train", *, steps: int = 12, **settings: Any) -> Path:
        """Run `train_lm` on the model of this device."""
        args = {
            f"args__{name}": value for name, value in {**(ON_GPU if self.on_gpu else ON_CPU), "dropout": 0.0}.items()
        }
        usual = {"train__batch": 16, "train__lr": 3e-4, "train__warmup_steps": 5, "checkpoint__every_steps": 1000}
        run = self.run(entry, **{**args, **usual, "train__steps": steps, **settings})
        values = result_of(run)
        expect(values["device"] == self.device, f"ranks on {self.device}", values["device"])
        return run


def result_of(run: Path) -> Values:
    """Return what the entry of a run returned."""
    values: Values = json.loads((run / "result.json").read_text())["value"]
    return values


def lines_of(path: Path) -> list[Values]:
    """Return the records of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps_of(run: Path) -> list[Values]:
    """Return the records of training steps; fail the row if a loss is not finite or the loss did not fall."""
    records = lines_of(run / "metrics" / "train.jsonl")
    losses = [record["loss"] for record in records]
    expect(None not in losses and losses[-1] < losses[0], "finite and falling losses", losses)
    return records


def smi(*names: str) -> list[list[str]]:
    """Return these values of each GPU as nvidia-smi reports them."""
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    return [[value.strip() for value in line.split(",")] for line in lines]


# Rows: they run in the process that gpu_check starts.


def nccl_row(place: Place) -> Values:
    values = result_of(place.run("collectives"))
    backend = "nccl" if place.on_gpu else "gloo"
    expect(values["device"] == place.device and values["backend"] == backend, f"{backend} on {place.device}", values)
    expect(not values["wrong"], "correct results of every collective", values["wrong"])
    return values | {"note": "world size 1: this starts the backend, but transfers nothing between GPUs"}


def binding_row(place: Place) -> Values:
    ((uuid,), *_) = smi("uuid")
    run = place.run("bound_rank", variables={"CUDA_VISIBLE_DEVICES": uuid})
    values = result_of(run)
    expect(values["torch"] == values["nvml"] == uuid, f"the GPU {uuid} in torch and NVML", values)
    log = (run / "attempts" / "000" / "logs" / "rank-0.log").read_text(errors="replace").splitlines()
    bound = [line for line in log if "bound to CPUs" in line or "left on CPUs" in line]
    expect(len(bound) == 1, "one log line about the CPUs of the rank", bound)
    return values | {"cpus": bound[0]}


def nvml_row(place: Place) -> Values:
    import torch

    from toolkit.supervise.usage import nvidia_gpus
    from toolkit.topology.sources.nvml import ask_nvml, pci_address

    claims = ask_nvml().claims
    reported = smi("index", "name", "uuid", "pci.bus_id", "memory.total")
    for index, name, uuid, bus, total_mib in reported:
        ours = [claims.get(("GPU", int(index), fact)) for fact in ("name", "uuid", "bus")]
        expect(
            ours == [name, uuid, pci_address(bus)], f"the facts of nvidia-smi, {[name, uuid, pci_address(bus)]}", ours
        )
        total = claims.get(("GPU", int(index), "memory_bytes"))
        expect(isinstance(total, int) and abs(total / 2**20 - int(total_mib)) <= 1, f"{total_mib} MiB", total)
    expect(claims.get(("gpu_count",)) == len(reported), f"{len(reported)} GPUs", claims.get(("gpu_count",)))
    kept = torch.ones(GIB, dtype=torch.uint8, device=place.device)
    used = nvidia_gpus(None)
    expect(used is not None, "usage of GPUs from NVML", used)
    sampled = {one.uuid: one.memory_peak_bytes for one in used.sample()}  # type: ignore[union-attr]
    for uuid, used_mib in smi("uuid", "memory.used"):
        # NVML's first function also counts the memory that the driver reserves, nvidia-smi does not.
        expect(abs(sampled[uuid] / 2**20 - int(used_mib)) < 1500, f"about {used_mib} MiB in use", sampled)
    expect(max(sampled.values()) >= kept.nbytes, "at least 1 GiB in use", sampled)
    return {"gpus": len(reported), "name": reported[0][1], "used_mib": max(sampled.values()) >> 20}


def topo_row(place: Place) -> Values:
    shown = place.toolkit("topo", "show", "--json")
    expect(shown.returncode == 0, "exit code 0 of topo show", shown.stderr[-300:])
    found = json.loads(shown.stdout)
    (hardware,) = found["hardware"].values()
    uuids = [one["value"] for one in found["nodes"][0]["gpu_uuids"]]
    expected = [uuid for (uuid,) in smi("uuid")] if place.on_gpu else []
    expect(uuids == expected, f"GPUs {expected}", uuids)
    count = hardware["gpu_count"]["value"] or 0
    expect(count == len(expected), f"{len(expected)} GPUs", hardware["gpu_count"])
    expect(not found["conflicts"] and not found["contradictions"], "sources that agree", found["conflicts"])
    expect(place.toolkit("topo", "show").returncode == 0, "exit code 0", "another one")
    return {"gpus": count, "sources": sorted(set(_sources(hardware)))}


def _sources(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["source"]] if value.get("confidence") not in (None, "unknown") else []
        return own + [one for part in value.values() for one in _sources(part)]
    return [one for part in value for one in _sources(part)] if isinstance(value, list) else []


def train_row(place: Place) -> Values:
    run = place.train("train_and_compare", steps=40, train__precision="bf16", train__deterministic=False)
    records, values = steps_of(run), result_of(run)
    seconds = statistics.median(record["seconds"] for record in records[20:])
    mfu = [record["mfu"] for record in records[20:] if record["mfu"] is not None]
    if place.on_gpu:
        (usage,) = (run / "attempts" / "000" / "usage").glob("*.json")
        expect(bool(json.loads(usage.read_text())["gpus"]), "the GPU in the usage of the node", "none")
    ratio = round(seconds / values["plain_s"], 3)
    return {
        "tokens_per_s": round(records[-1]["tokens"] / len(records) / seconds), "step_s": round(seconds, 5),
        "mfu": round(statistics.median(mfu), 4) if mfu else None, "peak_gib": values["peak_gib"],
        "plain_step_s": round(values["plain_s"], 5), "plain_peak_gib": values["plain_peak_gib"], "ratio": ratio,
    }  # fmt: skip


def compile_row(place: Place) -> Values:
    run = place.train(steps=24, train__compile=True, train__deterministic=False)
    records = steps_of(run)
    seconds = statistics.median(record["seconds"] for record in records[12:])
    tokens = records[-1]["tokens"] / len(records)
    return {
        "first_step_s": records[0]["seconds"],
        "tokens_per_s": round(tokens / seconds),
        "peak_gib": result_of(run)["peak_gib"],
    }


def recompute_row(place: Place) -> Values:
    runs = {kind: place.train(train__recompute=kind) for kind in ("none", "every", "selective")}
    peaks = {kind: result_of(run)["peak_gib"] for kind, run in runs.items()}
    last = {kind: steps_of(run)[-1]["loss"] for kind, run in runs.items()}
    expect(max(last.values()) - min(last.values()) < 1e-2, "equal losses", last)
    if place.on_gpu:
        expect(peaks["every"] < peaks["selective"] < peaks["none"], "less memory with recomputation", peaks)
    return {"peak_gib": peaks, "last_loss": last}


def fsdp2_row(place: Place) -> Values:
    args = ON_GPU if place.on_gpu else ON_CPU
    values = result_of(place.run("sharded", **{f"args__{name}": value for name, value in args.items()}))
    expect(values["is_sharded"] and values["is_restored"], "DTensors, restored from a checkpoint bit by bit", values)
    expect(values["difference"] < 1e-3, "the losses of an unsharded model", values)
    return values | {"note": "world size 1: no parameter is gathered from another GPU"}


def checkpoint_row(place: Place) -> Values:
    run = place.train(steps=24, checkpoint__every_steps=6, checkpoint__background=True)
    saves = lines_of(run / "metrics" / "checkpoints.jsonl")
    expect([save["step"] for save in saves if not save["error"]] == [6, 12, 18, 24], "saves at 6, 12, 18 and 24", saves)
    before = {record["step"]: record["loss_hex"] for record in steps_of(run)}
    resumed = place.toolkit("resume", str(run), "--here", "--from", "12")
    expect(resumed.returncode == 0, "exit code 0 of resume", resumed.stderr[-300:])
    after = [record for record in steps_of(run) if record["attempt"] == 1]
    expect([record["step"] for record in after] == list(range(13, 25)), "steps 13 to 24 again", after)
    differing = [record["step"] for record in after if record["loss_hex"] != before[record["step"]]]
    expect(not differing, "the losses of the first attempt, bit by bit", f"other ones at steps {differing}")
    size = saves[1]["bytes"]
    stall = statistics.median(
        save["waited_s"] for save in saves[1:3]
    )  # the first save also allocates the host's memory
    return {
        "bytes": size, "first_stall_s": round(saves[0]["waited_s"], 3), "stall_s": round(stall, 4),
        "stall_gb_per_s": round(size / stall / 1e9, 2), "committed_s": round(saves[1]["committed_s"], 3),
    }  # fmt: skip


def scaler_row(place: Place) -> Values:
    values = result_of(place.run("overflowing"))
    expect(0 < values["skipped"] < values["steps"], "some skipped steps, and then some that are not", values)
    expect(values["scale"] < values["first_scale"] and values["is_finite"], "a lower scale and finite weights", values)
    records = steps_of(place.train(train__precision="fp16"))
    return values | {"last_loss": records[-1]["loss"]}


def oom_row(place: Place) -> Values:
    sizes = {f"args__{name}": value for name, value in {**ON_GPU, "context": 4096}.items()}
    run = place.run("train", code=1, **sizes, train__batch=256, train__micro_batch=256)
    explained = json.loads(place.toolkit("explain", str(run), "--json").stdout)
    expect(explained["symptom"] == "gpu_out_of_memory", "the symptom gpu_out_of_memory", explained["symptom"])
    expect(bool(explained["actions"]), "an action", explained["actions"])
    return {"explained": explained["why"], "action": explained["actions"][0]}


@dataclass(frozen=True)
class Row:
    """A row of the check, and the seconds after which it has failed."""

    name: str
    check: Callable[[Place], Values]
    limit_s: float
    needs_gpu: bool = False


ROWS = (
    Row("nvml", nvml_row, 40, needs_gpu=True),
    Row("topo", topo_row, 40),
    Row("nccl", nccl_row, 90),
    Row("binding", binding_row, 60, needs_gpu=True),
    Row("train_lm", train_row, 90),
    Row("oom", oom_row, 60, needs_gpu=True),
    Row("fsdp2", fsdp2_row, 60),
    Row("scaler", scaler_row, 90),
    Row("checkpoint", checkpoint_row, 120),
    Row("recompute", recompute_row, 120),
    Row("compile", compile_row, 120),
)


# Entries: they run in the ranks that toolkit starts, and return what the rows check.


def collectives(world: Any, config: Any) -> Values:
    """Call each collective of the communicator and of torch on this device."""
    import torch
    import torch.distributed as dist

    from toolkit.comm.communicator import Communicator

    numbers = torch.arange(1000.0, device=world.device)
    with Communicator(world) as communicator:
        results = {
            "all_reduce": communicator.all_reduce(numbers.clone()),
            "all_gather": communicator.all_gather(numbers),
            "reduce_scatter": communicator.reduce_scatter(numbers.clone()),
            "broadcast": communicator.broadcast(numbers.clone(), root=0),
            "all_to_all": communicator.all_to_all(numbers),
        }
        communicator.barrier()
    summed = numbers.clone()
    dist.all_reduce(summed)
    results["torch"] = summed
    wrong = [name for name, found in results.items() if not torch.equal(found.flatten(), numbers)]
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device(world.device)).name()
    version = ".".join(map(str, torch.cuda.nccl.version())) if numbers.is_cuda else ""
    return {
        "device": world.device,
        "backend": backend,
        "wrong": wrong,
        "nccl": version,
        "torch": str(torch.__version__),
    }


def bound_rank(world: Any, config: Any) -> Values:
    """Return the UUID of this rank's GPU as torch and as NVML report it."""
    import torch

    from toolkit.world.physical_gpu import gpu_of_device, gpus_of_process

    gpu = gpu_of_device(world.device, gpus_of_process(os.environ))
    uuid = f"GPU-{torch.cuda.get_device_properties(world.device).uuid}"
    return {"device": world.device, "torch": uuid, "nvml": gpu.uuid if gpu else None}


def train(world: Any, config: Any) -> Values:
    """Train as `train_lm` does; return the peak of allocated GPU memory."""
    import torch

    from toolkit.jobs import train_lm

    train_lm.main(world, config)
    peak = torch.cuda.max_memory_allocated() if world.device != "cpu" else 0
    return {"device": world.device, "peak_gib": round(peak / GIB, 3)}


def train_and_compare(world: Any, config: Any) -> Values:
    """Train, and then train the same model in a loop that uses torch only."""
    import torch

    values = train(world, config)
    gc.collect()
    if world.device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    values["plain_s"] = statistics.median(plain_steps(world.device, config)[config.train.steps // 2 :])
    peak = torch.cuda.max_memory_allocated() if world.device != "cpu" else 0
    return values | {"plain_peak_gib": round(peak / GIB, 3)}


def plain_steps(device: str, config: Any) -> list[float]:
    """Return the seconds of each step of a loop as a user would write it: autocast, AdamW, clipping, a logged loss."""
    import torch

    from toolkit.jobs import train_lm
    from toolkit.train.arguments import read_arguments
    from toolkit.train.data.text import read_bytes, standard_library_sources

    args = read_arguments(train_lm.Arguments, config.args)
    text = torch.frombuffer(
        bytearray(read_bytes(standard_library_sources(), max_bytes=args.max_bytes)), dtype=torch.uint8
    )
    model = train_lm.GPT(args).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.train.lr, betas=(0.9, 0.95), weight_decay=0.1)
    taken = []
    for _ in range(config.train.steps):
        began = time.perf_counter()
        starts = torch.randint(len(text) - args.context - 1, (config.train.batch, 1))
        rows = text[starts + torch.arange(args.context + 1)].long().to(device)
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
            loss = train_lm.loss_of(model(rows[:, :-1]), rows[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        taken.append(time.perf_counter() - began)
    return taken


def sharded(world: Any, config: Any) -> Values:
    """Train a few steps with FSDP2 and without, and restore the sharded parameters from a checkpoint."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    from toolkit.checkpoint import Checkpointer
    from toolkit.jobs import train_lm
    from toolkit.parallel.materialise import materialise, parameters_on_meta
    from toolkit.parallel.sharded import shard
    from toolkit.train.arguments import read_arguments

    args = read_arguments(train_lm.Arguments, {**config.args, "dropout": 0.0})
    kind = torch.device(world.device).type
    settings = SimpleNamespace(gather_type="as_is", reduce_type="as_is", zero=3, wrap="blocks")
    rows = torch.randint(256, (4, args.context + 1), device=world.device)
    losses: dict[bool, list[float]] = {}
    for is_sharded in (False, True):
        with parameters_on_meta(0):
            model = train_lm.GPT(args)
        if is_sharded:
            shard(model, train_lm.OUTLINE, init_device_mesh(kind, (1,), mesh_dim_names=("shard",)), settings)  # type: ignore[arg-type]
        materialise(model, train_lm.initialise, 0, world.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses[is_sharded] = []
        for _ in range(5):
            with torch.autocast(kind, dtype=torch.bfloat16):
                loss = train_lm.loss_of(model(rows[:, :-1]), rows[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[is_sharded].append(loss.item())
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    before = {name: tensor.to_local().clone() for name, tensor in tensors.items()}
    checkpoints = Checkpointer(world.run_dir / "checkpoints", world)
    checkpoints.save(5, tensors, {})
    for tensor in tensors.values():
        tensor.to_local().zero_()
    checkpoints.load(tensors)
    pairs = zip(losses[False], losses[True], strict=True)
    return {
        "device": world.device, "is_sharded": all(isinstance(tensor, DTensor) for tensor in tensors.values()),
        "is_restored": all(torch.equal(tensor.to_local(), before[name]) for name, tensor in tensors.items()),
        "difference": max(abs(one - other) / one for one, other in pairs), "losses": losses[True],
    }  # fmt: skip


def overflowing(world: Any, config: Any) -> Values:
    """Train with a loss scale that is too large at first."""
    import torch

    from toolkit.train.optim.precision import agree_found_inf, autocast, gradient_scaler

    torch.manual_seed(0)
    model = torch.nn.Linear(256, 256).to(world.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first_scale, steps, skipped = 2.0**40, 60, 0
    scaler = gradient_scaler(world.device, "fp16", first_scale)
    sample = torch.randn(64, 256, device=world.device)
    for _ in range(steps):
        before = model.weight.detach().clone()
        with autocast(world.device, "fp16"):
            loss = model(sample).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        agree_found_inf(scaler, optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        skipped += torch.equal(model.weight, before)
    is_finite = bool(torch.isfinite(model.weight).all())
    return {
        "steps": steps,
        "skipped": skipped,
        "first_scale": first_scale,
        "scale": scaler.get_scale(),
        "is_finite": is_finite,
    }


def main() -> None:
    name, device, folder = sys.argv[1:]
    row = next(row for row in ROWS if row.name == name)
    try:
        result = {"passed": True, **row.check(Place(device, Path(folder)))}
    except FailedRowError as failure:
        result = {"passed": False, "why": str(failure)}
    print(json.dumps({"row": name, "device": device} | result))


if __name__ == "__main__":
    main()
