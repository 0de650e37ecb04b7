"""What the ranks of `gpu_rows.py` run: functions that toolkit calls, and whose results the rows check."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import silu

from toolkit.checkpoint import Checkpointer
from toolkit.comm.communicator import Communicator
from toolkit.comm.compression.algorithms import BUILD
from toolkit.config.gradient_compression import GradientCompressionTable
from toolkit.config.resolved import ResolvedJob
from toolkit.jobs import train_lm
from toolkit.parallel.context.kernels import attend, attend_backward, merge
from toolkit.parallel.context.order import own_tokens
from toolkit.parallel.experts.layer import Experts
from toolkit.parallel.materialise import materialise, parameters_on_meta
from toolkit.parallel.sharded import shard
from toolkit.train.arguments import read_arguments
from toolkit.train.data.text import read_bytes, standard_library_sources
from toolkit.train.memory.tier import HostTier
from toolkit.train.optim.precision import agree_found_inf, autocast, gradient_scaler
from toolkit.world.facts import World
from toolkit.world.physical_gpu import gpu_of_device, gpus_of_process

Values = dict[str, Any]
GIB = 1 << 30


def collectives(world: World, config: ResolvedJob) -> Values:
    """Call each collective of the communicator and of torch on this device."""
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
    version = ".".join(map(str, torch.cuda.nccl.version())) if numbers.is_cuda else ""
    versions = {"nccl": version, "torch": str(torch.__version__)}
    return {"device": world.device, "backend": dist.get_backend_config(), "wrong": wrong, **versions}


def bound_rank(world: World, config: ResolvedJob) -> Values:
    """Return the UUID of this rank's GPU as torch and as NVML report it."""
    gpu = gpu_of_device(world.device, gpus_of_process(os.environ))
    uuid = f"GPU-{torch.cuda.get_device_properties(world.device).uuid}"
    return {"device": world.device, "torch": uuid, "nvml": gpu.uuid if gpu else None}


def train(world: World, config: ResolvedJob) -> Values:
    """Train as `train_lm` does; return the peak of allocated GPU memory."""
    train_lm.main(world, config)
    peak = torch.cuda.max_memory_allocated() if world.device != "cpu" else 0
    return {"device": world.device, "peak_gib": round(peak / GIB, 3)}


def train_and_compare(world: World, config: ResolvedJob) -> Values:
    """Train, and then train the same model in a loop that uses torch only."""
    values = train(world, config)
    gc.collect()
    if world.device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    values["plain_s"] = statistics.median(plain_steps(world.device, config)[config.train.steps // 2 :])
    peak = torch.cuda.max_memory_allocated() if world.device != "cpu" else 0
    return values | {"plain_peak_gib": round(peak / GIB, 3)}


def plain_steps(device: str, config: ResolvedJob) -> list[float]:
    """Return the seconds of each step of a loop as a user would write it: autocast, AdamW, clipping, a logged loss."""
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


def sharded(world: World, config: ResolvedJob) -> Values:
    """Train a few steps with FSDP2 and without, and restore the sharded parameters from a checkpoint."""
    args = read_arguments(train_lm.Arguments, {**config.args, "dropout": 0.0})
    kind = torch.device(world.device).type
    settings = SimpleNamespace(gather_type="as_is", reduce_type="as_is", output_type="as_is", zero=3, wrap="blocks")
    torch.manual_seed(0)
    rows = torch.randint(256, (4, args.context + 1), device=world.device)
    losses: dict[bool, list[float]] = {}
    for is_sharded in (False, True):
        with parameters_on_meta(0):
            model = train_lm.GPT(args)
        if is_sharded:
            shard(model, train_lm.OUTLINE, init_device_mesh(kind, (1,), mesh_dim_names=("shard",)), settings)  # type: ignore[arg-type]
        materialise(model, train_lm.initialise, 0, world.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)  # a larger rate amplifies differences of rounding
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
    assert world.run_dir is not None
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


def host_copies(world: World, config: ResolvedJob) -> Values:
    """Copy 1 GiB through the tier in host memory, alone, in both directions at once, and beside matrix products."""
    device = torch.device(world.device)
    size = GIB // 4 if device.type == "cuda" else GIB // 256
    tier = HostTier(world.device)
    one, other = (torch.randn(size, device=device) for _ in range(2))
    back = torch.empty_like(one)
    slots = tier.slot(one), tier.slot(other)
    matrix = torch.randn(8192 if device.type == "cuda" else 64, 8192 if device.type == "cuda" else 64, device=device)

    def products() -> None:
        for _ in range(20):
            matrix @ matrix

    def out() -> None:
        tier.write(slots[0], one).wait()

    def into() -> None:
        tier.read(slots[0], back).wait()

    def both() -> None:
        transfers = tier.write(slots[1], other), tier.read(slots[0], back)
        for transfer in transfers:
            transfer.wait()

    def beside() -> None:
        transfers = tier.write(slots[1], other), tier.read(slots[0], back)
        products()
        for transfer in transfers:
            transfer.wait()

    seconds = {do.__name__: _seconds_of(do, device) for do in (out, into, both, products, beside)}
    gb = one.nbytes / 1e9
    return {
        "device": world.device, "is_equal": torch.equal(one, back), "pinned": slots[0].kept.is_pinned(),
        "out_gb_per_s": round(gb / seconds["out"], 1), "in_gb_per_s": round(gb / seconds["into"], 1),
        "both_gb_per_s": round(2 * gb / seconds["both"], 1), "products_ms": round(1000 * seconds["products"], 1),
        "copies_ms": round(1000 * seconds["both"], 1), "beside_ms": round(1000 * seconds["beside"], 1),
    }  # fmt: skip


def _seconds_of(do: Callable[[], None], device: torch.device) -> float:
    """Return the shortest of five times, after one that does not count."""
    taken = []
    for _ in range(6):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        do()
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return min(taken[1:])


def overflowing(world: World, config: ResolvedJob) -> Values:
    """Train with a loss scale that is too large at first."""
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


def ring_blocks(world: World, config: ResolvedJob) -> dict[str, Any]:
    """The blocks of a causal ring of two ranks, computed by one process with the device's fused kernels.

    Returns the relative error of outputs and gradients to those of whole sequences, by type.
    """
    tokens = 4096 if world.device.startswith("cuda") else 256
    return {name: _ring_error(world.device, tokens, getattr(torch, name)) for name in ("float32", "bfloat16")}


def experts_apart(world: World, config: ResolvedJob) -> Values:
    """A layer with experts in one grouped product, beside a product per expert.

    Returns the largest relative error of outputs and gradients, and the milliseconds of both passes, by type.
    """
    device = torch.device(world.device)
    found: Values = {}
    tokens, width, hidden = (8192, 1024, 2048) if device.type == "cuda" else (256, 64, 64)
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        torch.manual_seed(0)
        experts = Experts(8, width, hidden).to(device, dtype)
        rows = torch.randn(tokens, width, device=device, dtype=dtype)
        counts = torch.tensor([0, 1, 7, *[tokens // 8] * 4, tokens - 8 - tokens // 8 * 4], device=device)
        grouped, looped = (
            partial(_passes_of, experts, rows, counts),
            partial(_passes_of, _looped(experts), rows, counts),
        )
        pairs = zip(grouped(), looped(), strict=True)
        found[name] = max(_apart(one, other) for one, other in pairs)
        found[f"{name}_grouped_ms"] = round(1000 * _seconds_of(grouped, device), 2)
        found[f"{name}_looped_ms"] = round(1000 * _seconds_of(looped, device), 2)
    return found


def compressed(world: World, config: ResolvedJob) -> Values:
    """Gradients that are encoded and decoded on the device and on a CPU.

    Returns the largest relative difference of both for algorithms that round alike, the largest error of the others relative
    to their input, and the milliseconds per MB to encode and to decode.
    """
    device, found = torch.device(world.device), {"difference": 0.0, "error": 0.0}
    torch.manual_seed(0)
    values = torch.randn(1, 1 << (22 if device.type == "cuda" else 12))
    there = values.to(device)
    for name, build in BUILD.items():
        compressor = build(GradientCompressionTable(algorithm=name))
        message = compressor.encode(there, 1)
        decode = partial(compressor.decode, message, values.shape[1], 1)
        if compressor.is_unbiased or compressor.is_linear or name in ("gaussian_k", "top_k", "ef21", "threshold"):
            error = float((decode().cpu() - values).norm() / values.norm())
            found["error"] = max(found["error"], error)
        else:
            own = compressor.decode(compressor.encode(values, 1), values.shape[1], 1)
            found["difference"] = max(found["difference"], _apart(decode().cpu(), own))
        seconds = (_seconds_of(partial(compressor.encode, there, 1), device), _seconds_of(decode, device))
        found[f"{name}_ms_per_mb"] = [round(1e9 * one / there.nbytes, 4) for one in seconds]
    return found


def _looped(experts: Experts) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def compute(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        parts = zip(rows.split(counts.tolist()), experts.gate, experts.up, experts.down, strict=True)
        return torch.cat([(silu(part @ gate.T) * (part @ up.T)) @ down.T for part, gate, up, down in parts])

    return compute


def _passes_of(
    compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], rows: torch.Tensor, counts: torch.Tensor
) -> list[torch.Tensor]:
    """Return the outputs, and the gradient of the rows."""
    given = rows.clone().requires_grad_()
    outputs = compute(given, counts)
    outputs.square().mean().backward()
    assert given.grad is not None
    return [outputs.detach(), given.grad]


def _ring_error(device: str, tokens: int, dtype: torch.dtype) -> float:
    scale, half = 64**-0.5, tokens // 4
    torch.manual_seed(0)
    *given, gradient = (torch.randn(2, 8, tokens, 64, device=device, dtype=dtype) for _ in range(4))
    leaves = [one.clone().requires_grad_() for one in given]
    wanted = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
    wanted.backward(gradient)
    parts = [[_own(one, place) for one in given] for place in range(2)]
    gradients = [[torch.zeros_like(one, dtype=torch.float32) for one in of_rank] for of_rank in parts]
    largest = 0.0
    for place, (query, *_) in enumerate(parts):
        own = attend(*parts[place], True, scale)
        first, last = (0, half) if place else (half, None)  # of the block of the other rank's keys
        keys = [one[:, :, :last] for one in parts[1 - place][1:]]
        mixed, sums = own[0].float(), own[1].clone()
        other = attend(query[:, :, first:], *keys, False, scale)
        mixed[:, :, first:], sums[:, :, first:] = merge(mixed[:, :, first:], sums[:, :, first:], *other)
        mixed, of_own = mixed.to(dtype), _own(gradient, place)
        largest = max(largest, _apart(mixed, _own(wanted, place)))
        for total, block in zip(
            gradients[place], attend_backward(of_own, *parts[place], mixed, sums, True, scale), strict=True
        ):
            total += block
        of_query, *of_keys = attend_backward(
            of_own[:, :, first:], query[:, :, first:], *keys, mixed[:, :, first:], sums[:, :, first:], False, scale
        )
        gradients[place][0][:, :, first:] += of_query
        for total, block in zip(gradients[1 - place][1:], of_keys, strict=True):
            total[:, :, :last] += block
    pairs = [
        (one, _own(leaf.grad, place)) for place in range(2) for one, leaf in zip(gradients[place], leaves, strict=True)
    ]
    return max(largest, *(_apart(found, right) for found, right in pairs))


def _own(tensor: torch.Tensor | None, place: int) -> torch.Tensor:
    assert tensor is not None
    return own_tokens(tensor.detach().transpose(1, 2), place, 2).transpose(1, 2).contiguous()


def _apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())
