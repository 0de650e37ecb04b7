"""The rows of `gpu_check.py`. `python gpu_rows.py ROW DEVICE FOLDER` prints the result of one as a JSON object.

Most rows run the real program: a job whose entry is a function of `gpu_ranks.py`, started by `toolkit run`. To add a
row, add a function that returns its values, or raises `FailedRowError`, and its line in `ROWS`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Values = dict[str, Any]
GIB = 1 << 30
# Unlike the site "local", it does not start ranks with an mpirun that may be installed.
SITE = 'name = "here"\n[scheduler]\nkind = "local"\n[launcher]\nkind = "local"\n'
RANKS = Path(__file__).with_name("gpu_ranks.py")
# About 151 million parameters, 16,384 tokens per step; small enough for 24 GB, large enough to keep an H100 busy.
ON_GPU = {"layers": 12, "width": 1024, "heads": 16, "context": 1024}
ON_CPU = {"layers": 2, "width": 64, "heads": 4, "context": 64}
PASSED = ("LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_DEVICE_ORDER", "CC", "TRITON_CACHE_DIR", "TRITON_LIBCUDA_PATH")


class SkippedRowError(Exception):
    """What a row needs and this machine lacks."""


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
        sys.stderr.write(f"$ toolkit {' '.join(argv)}\n")
        done = subprocess.run(command, cwd=self.folder, env=chosen, capture_output=True, text=True)
        sys.stderr.write(f"{done.stdout[-2000:]}{done.stderr[-2000:]}exit code {done.returncode}\n")
        return done

    def run(
        self, entry: str, settings: Mapping[str, Any] | None = None, *, variables: Mapping[str, str] | None = None, code: int = 0
    ) -> Path:  # fmt: skip
        """Run a job with one rank whose entry is a function of `gpu_ranks.py`; return its run directory."""
        shutil.copy(RANKS, self.folder)
        known = [name for name in PASSED if name in os.environ]
        job = f'[job]\nname = "{entry}"\nentry = "{RANKS.name}:{entry}"\nranks_per_node = 1\n'
        job += f"[env]\npass = {json.dumps(known)}\n[restart]\ncrashes = 0\nstall_s = 100\n"
        (self.folder / "job.toml").write_text(job)
        (self.folder / "here.toml").write_text(SITE)
        chosen = [f"--set={key}={json.dumps(value)}" for key, value in (settings or {}).items()]
        done = self.toolkit("run", "job.toml", "--site", "./here.toml", "--runs", "runs", *chosen, variables=variables)
        run = max((self.folder / "runs" / entry).glob("2*"), default=None)
        if run is None:
            raise FailedRowError(f"expected a run of {entry}, got {done.stderr[-300:]}")
        if (done.returncode == 0) != (code == 0):
            reason = " | ".join(self.toolkit("explain", str(run)).stdout.strip().splitlines()[:4])
            raise FailedRowError(f"expected exit code {code} of {entry}, got {done.returncode}: {reason}")
        return run

    def train(self, settings: Mapping[str, Any] | None = None, *, entry: str = "train") -> Path:
        """Run `train_lm` on the model of this device."""
        usual = {"train.steps": 12, "train.batch": 16, "train.warmup_steps": 5, "checkpoint.every_steps": 1000}
        run = self.run(entry, {**model_of(self.device), "args.dropout": 0.0, **usual, **(settings or {})})
        values = result_of(run)
        expect(values["device"] == self.device, f"ranks on {self.device}", values["device"])
        return run


def model_of(device: str) -> Values:
    """Return the keys that set the size of the model for a device."""
    return {f"args.{name}": value for name, value in (ON_CPU if device == "cpu" else ON_GPU).items()}


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


def nccl_row(place: Place) -> Values:
    values = result_of(place.run("collectives"))
    backend = "cuda:nccl" if place.on_gpu else "cpu:gloo"
    expect(values["device"] == place.device and backend in values["backend"], f"{backend} on {place.device}", values)
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

    from toolkit.supervise.gpus import nvidia_gpus
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
    if any(mode == "Enabled" for (mode,) in smi("mig.mode.current")):
        raise SkippedRowError("a partitioned GPU (MIG) reports no utilization; its facts agree with nvidia-smi")
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
    run = place.train(
        {"train.steps": 40, "train.precision": "bf16", "train.deterministic": False}, entry="train_and_compare"
    )
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
    if not any(map(shutil.which, (os.environ.get("CC", "gcc"), "gcc", "clang"))):
        raise SkippedRowError("torch.compile needs a C compiler: gcc and clang are not on PATH")
    run = place.train({"train.steps": 24, "train.compile": True, "train.deterministic": False})
    records = steps_of(run)
    seconds = statistics.median(record["seconds"] for record in records[12:])
    tokens = records[-1]["tokens"] / len(records)
    return {
        "first_step_s": records[0]["seconds"],
        "tokens_per_s": round(tokens / seconds),
        "peak_gib": result_of(run)["peak_gib"],
    }


def recompute_row(place: Place) -> Values:
    runs = {kind: place.train({"train.recompute": kind}) for kind in ("none", "every", "selective")}
    peaks = {kind: result_of(run)["peak_gib"] for kind, run in runs.items()}
    last = {kind: steps_of(run)[-1]["loss"] for kind, run in runs.items()}
    expect(max(last.values()) - min(last.values()) < 1e-2, "equal losses", last)
    if place.on_gpu:
        expect(peaks["every"] < peaks["selective"] < peaks["none"], "less memory with recomputation", peaks)
    return {"peak_gib": peaks, "last_loss": last}


def fsdp2_row(place: Place) -> Values:
    values = result_of(place.run("sharded", model_of(place.device)))
    expect(values["is_sharded"] and values["is_restored"], "DTensors, restored from a checkpoint bit by bit", values)
    expect(values["difference"] < 1e-3, "the losses of an unsharded model", values)
    return values | {"note": "world size 1: no parameter is gathered from another GPU"}


def checkpoint_row(place: Place) -> Values:
    run = place.train({"train.steps": 24, "checkpoint.every_steps": 6, "checkpoint.background": True})
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
    # The first save also allocates the host's memory.
    stall = statistics.median(save["waited_s"] for save in saves[1:3])
    return {
        "bytes": size, "first_stall_s": round(saves[0]["waited_s"], 3), "stall_s": round(stall, 4),
        "stall_gb_per_s": round(size / stall / 1e9, 2), "committed_s": round(saves[1]["committed_s"], 3),
    }  # fmt: skip


def observe_row(place: Place) -> Values:
    from toolkit.metrics import windows
    from toolkit.metrics.samples import GpuSample, MemorySample
    from toolkit.observe.readings import RunReadings
    from toolkit.rundir.layout import RunDirectory

    run = place.train({"train.steps": 900, "train.precision": "bf16", "train.deterministic": False})
    steps_of(run)
    readings = RunReadings(RunDirectory(run))
    readings.update()
    expect(not readings.problems and 0 in readings.windows, "windows of rank 0", readings.problems)
    window = windows.merge(readings.windows[0])
    parts = {name: window.mean(name) for name in (windows.DATA, windows.FORWARD, windows.BACKWARD, windows.OPTIMIZER)}
    share = sum(parts.values()) / window.mean(windows.STEP)
    values = {name.removesuffix("_s") + "_ms": round(1000 * seconds, 2) for name, seconds in parts.items()}
    values |= {"step_ms": round(1000 * window.mean(windows.STEP), 2), "share_of_phases": round(share, 3)}
    expect(window.steps == 900, "900 recorded steps", window.steps)
    expect(
        0.7 < share < 1.1 and min(parts[windows.FORWARD], parts[windows.BACKWARD]) > 0, "phases of the steps", values
    )
    if not place.on_gpu:
        return values
    expect(window.mean(windows.DEVICE) > GIB, "the memory that the rank allocated", window.mean(windows.DEVICE))
    samples = [sample for found in readings.samples.values() for sample in found]
    (gpu,) = (sample for sample in samples if isinstance(sample, GpuSample))
    expect(gpu.ranks == (0,) and gpu.busy > 0.5 and gpu.temperature_c > 0, "a busy GPU of rank 0", gpu)
    expect(gpu.tensor is not None and gpu.tensor > 0.05, "active tensor cores (GPM)", gpu)
    pools = {sample.pool: sample.used_bytes for sample in samples if isinstance(sample, MemorySample)}
    expect(pools.get("gpu 0", 0) > GIB, "the memory of rank 0 on GPU 0", pools)
    return values | {"device_gib": round(window.mean(windows.DEVICE) / GIB, 3), "busy": gpu.busy, "tensor": gpu.tensor}


OFFLOADS = {
    "none": "none",
    "optimizer": "optimizer",
    "optimizer, gradients": ["optimizer", "gradients"],
    "all": ["optimizer", "gradients", "parameters", "activations"],
}


def offload_row(place: Place) -> Values:
    found: dict[str, Values] = {}
    losses = {}
    for name, offload in (*OFFLOADS.items(), ("optimizer in a file", "optimizer")):
        where = {"train.offload_to": str(place.folder)} if "file" in name else {}
        run = place.train({"train.steps": 16, "train.precision": "bf16", "train.offload": offload, **where})
        records = steps_of(run)
        losses[name] = [record["loss_hex"] for record in records]
        step_s = statistics.median(record["seconds"] for record in records[6:])
        found[name] = {"step_ms": round(1000 * step_s, 1), "peak_gib": result_of(run)["peak_gib"]}
        expect(losses[name] == losses["none"], f"the losses without offload, bit by bit, with {name}", losses)
    if place.on_gpu:
        peaks = [found[name]["peak_gib"] for name in OFFLOADS]
        expect(peaks == sorted(peaks, reverse=True), "less memory with each part", peaks)
    return found


def adapters_row(place: Place) -> Values:
    """Train adapters on a base in each type; bitsandbytes provides nf4."""
    kinds = ("none", "int8", *(["nf4"] if importlib.util.find_spec("bitsandbytes") else []))
    found: dict[str, Values] = {}
    for kind in kinds:
        chosen = {"adapters.rank": 8, "adapters.quantize": kind, "adapters.modules_to_save": ["token_embedding"]}
        run = place.train({"train.steps": 20, "train.precision": "bf16", "train.lr": 0.003, **chosen})
        records = steps_of(run)
        step_s = statistics.median(record["seconds"] for record in records[10:])
        found[kind] = {"step_ms": round(1000 * step_s, 1), "last_loss": round(records[-1]["loss"], 4)}
        found[kind] |= {"peak_gib": result_of(run)["peak_gib"]}
    losses = [values["last_loss"] for values in found.values()]
    expect(max(losses) - min(losses) < 0.1, "about the same loss on each base", found)
    return found if "nf4" in kinds else found | {"note": "nf4 needs bitsandbytes: `gpu_wheels.sh quantized`"}


def copies_row(place: Place) -> Values:
    values = result_of(place.run("host_copies"))
    expect(values["is_equal"], "the same values after a copy to the host and back", values)
    return values


def ring_row(place: Place) -> Values:
    values = result_of(place.run("ring_blocks"))
    expect(values["float32"] < 1e-5 and values["bfloat16"] < 2e-2, "the attention of whole sequences", values)
    return values


def experts_row(place: Place) -> Values:
    values = result_of(place.run("experts_apart"))
    expect(values["float32"] < 1e-4 and values["bfloat16"] < 3e-2, "the results of a product per expert", values)
    return values


def compression_row(place: Place) -> Values:
    values = result_of(place.run("compressed"))
    expect(values["difference"] < 1e-3, "what a CPU decodes", values)
    expect(0 < values["error"] < 4, "the errors of the other algorithms", values)
    return values


def scaler_row(place: Place) -> Values:
    values = result_of(place.run("overflowing"))
    expect(0 < values["skipped"] < values["steps"], "some skipped steps, and then some that are not", values)
    expect(values["scale"] < values["first_scale"] and values["is_finite"], "a lower scale and finite weights", values)
    records = steps_of(place.train({"train.precision": "fp16"}))
    return values | {"last_loss": records[-1]["loss"]}


def oom_row(place: Place) -> Values:
    sizes = {**model_of(place.device), "args.context": 4096, "train.batch": 256, "train.micro_batch": 256}
    run = place.run("train", sizes, code=1)
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
    Row("nvml", nvml_row, 70, needs_gpu=True),  # the first row, which reads torch from a cold disk
    Row("topo", topo_row, 40),
    Row("nccl", nccl_row, 90),
    Row("binding", binding_row, 60, needs_gpu=True),
    Row("train_lm", train_row, 90),
    Row("observe", observe_row, 120),
    Row("oom", oom_row, 60, needs_gpu=True),
    Row("fsdp2", fsdp2_row, 60),
    Row("scaler", scaler_row, 90),
    Row("checkpoint", checkpoint_row, 120),
    Row("recompute", recompute_row, 120),
    Row("compile", compile_row, 120),
    Row("copies", copies_row, 60),
    Row("ring", ring_row, 60),
    Row("experts", experts_row, 60),
    Row("compression", compression_row, 60),
    Row("offload", offload_row, 150),
    Row("adapters", adapters_row, 90),
)


def main() -> None:
    name, device, folder = sys.argv[1:]
    row = next(row for row in ROWS if row.name == name)
    try:
        result = {"passed": True, **row.check(Place(device, Path(folder)))}
    except FailedRowError as failure:
        result = {"passed": False, "why": str(failure)}
    except SkippedRowError as reason:
        result = {"passed": None, "why": str(reason)}
    print(json.dumps({"row": name, "device": device} | result))


if __name__ == "__main__":
    main()
