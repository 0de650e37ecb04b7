"""What ranks do with compressed gradients; each function runs on every rank of a pool."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from toolkit.comm.compression import exchange as exchanges
from toolkit.comm.compression.algorithms import BUILD
from toolkit.comm.compression.exchange import NodeTiers
from toolkit.comm.compression.reducer import GradientCompression
from toolkit.comm.gradient import find_reduction
from toolkit.comm.hierarchical import own_group
from toolkit.comm.peers import Peers
from toolkit.config.gradient_compression import GradientCompressionTable
from toolkit.topology.facts import Topology

SHAPES = {"first.weight": (48, 40), "first.bias": (48,), "second.weight": (37, 41), "third": (5, 6, 7, 8)}
NAMES = list(SHAPES)


def table(algorithm: str, **keys: Any) -> GradientCompressionTable:
    return GradientCompressionTable(**{"algorithm": algorithm, "min_elements": 100, "block": 64} | keys)


def compression_of(peers: Any, settings: GradientCompressionTable) -> GradientCompression:
    compression = GradientCompression(settings, {name: torch.zeros(shape) for name, shape in SHAPES.items()}, seed=1)
    compression.kept.peers = peers
    return compression


def gradients(rank: int, step: int) -> dict[str, torch.Tensor]:
    """Gradients with a part that all ranks share and of several magnitudes."""
    drawn = torch.Generator().manual_seed(1000 * step + rank)
    shared = torch.Generator().manual_seed(77)
    return {
        name: torch.randn(shape, generator=drawn) * 10.0**-number + torch.randn(shape, generator=shared)
        for number, (name, shape) in enumerate(SHAPES.items())
    }


def digest(tensors: list[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(one.contiguous().view(torch.uint8).numpy().tobytes() for one in tensors)).hexdigest()


def mean_over(peers: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    means = {name: one.double() / peers.size for name, one in tensors.items()}
    if peers.size > 1:
        for one in means.values():
            dist.all_reduce(one, group=peers.group)
    return means


def average(state: Any, settings: GradientCompressionTable) -> tuple[str, float, int]:
    """One mean: a digest of its bits, its error relative to the dense one, and the bytes that this rank sent for it."""
    peers = state.communicator.peers
    compression, found = compression_of(peers, settings), gradients(peers.place, 0)
    wanted = mean_over(peers, found)
    sent = count_sent(lambda: compression.reduce(NAMES, list(found.values()), peers))
    here = [name for name in NAMES if name in compression.compressed]
    assert "first.bias" not in here
    torch.testing.assert_close(found["first.bias"].double(), wanted["first.bias"], rtol=1e-5, atol=1e-6)
    error = sum(float((found[name] - wanted[name]).square().sum()) for name in here)
    whole = sum(float(wanted[name].square().sum()) for name in here)
    return digest(list(found.values())), (error / whole) ** 0.5, sent


def count_sent(call: Callable[[], object]) -> int:
    """The bytes of compressed messages that this rank sends to others during a call."""
    total, ranks = 0, dist.get_world_size()
    all_to_all, all_gather = dist.all_to_all_single, exchanges.all_gather_single

    def counted_all_to_all(received: torch.Tensor, sent: torch.Tensor, **rest: Any) -> Any:
        nonlocal total
        total += sent.nbytes * (ranks - 1) // ranks
        return all_to_all(received, sent, **rest)

    def counted_all_gather(rows: torch.Tensor, row: torch.Tensor, **rest: Any) -> Any:
        nonlocal total
        total += row.nbytes * (ranks - 1) if row.dtype == torch.uint8 else 0
        return all_gather(rows, row, **rest)

    dist.all_to_all_single, exchanges.all_gather_single = counted_all_to_all, counted_all_gather
    try:
        call()
    finally:
        dist.all_to_all_single, exchanges.all_gather_single = all_to_all, all_gather
    return total


def tiers_of(state: Any) -> NodeTiers:
    """Nodes of two of four ranks."""
    if not hasattr(state, "tiers"):
        node, across = own_group(((0, 1), (2, 3))), own_group(((0, 2), (1, 3)))
        state.tiers = NodeTiers(node, Peers(across, (0, 1), across.rank()))
    return state.tiers


def conserve(
    state: Any, settings: GradientCompressionTable, steps: int, segment: int = 0, in_nodes: bool = False
) -> tuple[list[float], list[str]]:
    """The relative difference between sums of gradients and of results plus mean residual, by parameter.

    Buckets change after the second step, a step is skipped, and one has an infinity. `segment` is the numbers of all ranks
    in one message, if not 0.
    """
    whole = exchanges._SEGMENT
    exchanges._SEGMENT = segment or whole
    assert not segment or len(list(exchanges._segments(1000, 64, 2, torch.device("cpu")))) > 5
    try:
        return _conserve(state, settings, steps, in_nodes)
    finally:
        exchanges._SEGMENT = whole


def _conserve(
    state: Any, settings: GradientCompressionTable, steps: int, in_nodes: bool
) -> tuple[list[float], list[str]]:
    peers = state.communicator.peers
    compression = compression_of(peers, settings)
    if in_nodes:
        compression.use_tiers(tiers_of(state))
    left = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    bits = []
    for step in range(steps):
        found = gradients(peers.place, step)
        wanted = mean_over(peers, found)
        skipped = step in (3, 5)
        if step == 5 and peers.place == 0:
            found["second.weight"][3, 4] = torch.inf
        buckets = [NAMES] if step < 2 else [["third"], ["first.weight", "first.bias", "second.weight"]]
        for bucket in buckets:
            compression.reduce(bucket, [found[name] for name in bucket], peers)
        bits.append(digest(list(found.values())))
        if step == 5:
            assert not torch.isfinite(found["second.weight"]).all(), "an infinity arrives on every rank"
        if step == 3:
            compression.kept.discard()
        if not skipped:
            for name in NAMES:
                left[name] += wanted[name] - found[name].double()
    saved = compression.kept.saved()
    residual = saved["mean"]["residual"] if saved else {}
    differences = []
    for name in compression.compressed:
        missing = left[name] - residual[name].double() if residual else left[name]
        differences.append(float(missing.norm() / (left[name].norm() + wanted[name].norm())))
    return differences, bits


def unbiased_mean(state: Any, settings: GradientCompressionTable, steps: int) -> float:
    """The error of the mean of many results of the same gradients, relative to the error of one."""
    peers = state.communicator.peers
    compression = compression_of(peers, settings)
    wanted = mean_over(peers, gradients(peers.place, 0))["third"]
    total, one = torch.zeros_like(wanted), 0.0
    for _ in range(steps):
        found = gradients(peers.place, 0)
        compression.reduce(NAMES, list(found.values()), peers)
        total += found["third"].double() - wanted
        one += float((found["third"] - wanted).square().sum()) / steps
    return float((total / steps).square().sum()) / one


def descend(state: Any, settings: GradientCompressionTable, steps: int, rate: float) -> float:
    """Gradient descent on quadratics whose common minimum is 0, at which the ranks' own gradients are large."""
    peers = state.communicator.peers
    name, size = "tensor", 128
    compression = GradientCompression(settings, {name: torch.zeros(size)}, seed=1)
    curvature = torch.linspace(0.5, 1.0, size)
    pull = torch.randn(size, generator=torch.Generator().manual_seed(3)) * 10
    pull = pull if peers.place % 2 else -pull
    x = torch.ones(size)
    for _ in range(steps):
        gradient = curvature * x + pull
        compression.reduce([name], [gradient], peers)
        x -= rate * gradient
    return float(x.norm())


def resume(state: Any, settings: GradientCompressionTable, steps: int) -> tuple[list[str], list[str], str]:
    """Digests of the results of steps after a save: of the same object, and of another that took the saved tensors."""
    peers = state.communicator.peers
    first, then = compression_of(peers, settings), compression_of(peers, settings)

    def run(compression: GradientCompression, numbers: range) -> list[str]:
        found = [gradients(peers.place, step) for step in numbers]
        for one in found:
            compression.reduce(NAMES, list(one.values()), peers)
        return [digest(list(one.values())) for one in found]

    run(first, range(steps))
    saved, counted = first.kept.saved(), first.state_dict()
    run(then, range(7, 9))  # a rehearsal, whose traces the load removes
    room = then.kept.room()
    if saved:
        assert shapes(room) == shapes(saved)
        notice = then.kept.take(saved, [], peers.size)
    else:  # nothing but zeros, which a checkpoint then lacks
        lacking = [
            f"{source}.{kind}.{name}" for source, kinds in room.items() for kind in kinds for name in kinds[kind]
        ]
        notice = then.kept.take(room, lacking, peers.size)
    then.load_state_dict(counted)
    return run(first, range(steps, 2 * steps)), run(then, range(steps, 2 * steps)), notice


def shapes(tree: Any) -> Any:
    return {key: shapes(value) for key, value in tree.items()} if isinstance(tree, dict) else tuple(tree.shape)


def save_residual(state: Any, settings: GradientCompressionTable) -> tuple[Any, Any]:
    """The saved means after three steps, and the sums that they must conserve."""
    peers = state.communicator.peers
    compression = compression_of(peers, settings)
    left = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for step in range(3):
        found = gradients(peers.place, step)
        wanted = mean_over(peers, found)
        compression.reduce(NAMES, list(found.values()), peers)
        for name in NAMES:
            left[name] += wanted[name] - found[name].double()
    return compression.kept.saved(), left


def continue_from(
    state: Any, settings: GradientCompressionTable, saved: Any, left: Any, ranks: int
) -> tuple[float, str]:
    """The largest relative difference of what is conserved after three more steps on this number of ranks."""
    peers = state.communicator.peers
    compression = compression_of(peers, settings)
    own = f"rank-{peers.place:05d}"
    missing = [f"{own}.{kind}.{name}" for kind, tensors in saved["mean"].items() for name in tensors]
    notice = compression.kept.take(saved, missing, ranks)
    for step in range(3, 6):
        found = gradients(peers.place, step)
        wanted = mean_over(peers, found)
        compression.reduce(NAMES, list(found.values()), peers)
        for name in NAMES:
            left[name] = left[name] + wanted[name] - found[name].double()
    residual = compression.kept.saved()["mean"]["residual"]
    differences = [float((left[one] - residual[one]).norm() / left[one].norm()) for one in compression.compressed]
    return max(differences), notice


def approximate(state: Any, rank: int, rounds: int, kind: str) -> tuple[float, float]:
    """The error of PowerSGD without feedback for a fixed matrix, and the least error of any matrix of this rank."""
    peers = state.communicator.peers
    drawn = torch.Generator().manual_seed(4)
    matrix = (
        torch.randn(60, 40, generator=drawn)
        @ torch.diag(0.8 ** torch.arange(40.0))
        @ torch.randn(40, 40, generator=drawn)
    )
    if kind == "low":
        left, values, right = torch.linalg.svd(matrix)
        matrix = left[:, :3] @ torch.diag(values[:3]) @ right[:3]
    if kind == "zero":
        matrix = torch.zeros(60, 40)
    noise = torch.randn(60, 40, generator=drawn)
    own = matrix * 1e-12 + noise * (1e-12 if kind == "full" else 0) * (1 if peers.place else -1) * (peers.size % 2 == 0)
    wanted = mean_over(peers, {"one": own})["one"]
    compression = GradientCompression(table("powersgd", rank=rank, error_feedback="off"), {"one": own})
    for _ in range(rounds):
        found = own.clone()
        compression.reduce(["one"], [found], peers)
    scale = float(wanted.norm()) or 1.0
    values = torch.linalg.svdvals(wanted)
    return float((found - wanted).norm()) / scale, float(values[rank:].norm()) / scale


def all_reduce(state: Any, op: str, compression: Any, shape: tuple[int, ...], dtype: str) -> tuple[str, float]:
    communicator = state.communicator
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(state.world.rank)).to(getattr(torch, dtype))
    wanted = tensor.double().clone()
    dist.all_reduce(wanted)
    wanted = wanted / communicator.size if op == "avg" else wanted
    assert communicator.all_reduce(tensor, op, compression=compression) is tensor
    return digest([tensor]), float((tensor - wanted).norm() / wanted.norm())


def average_in_nodes(state: Any, settings: GradientCompressionTable) -> tuple[str, float, int]:
    """One mean of four ranks on two nodes: a digest of its bits, its error, and the bytes of messages to the other node."""
    peers = state.communicator.peers
    compression, found = compression_of(peers, settings), gradients(peers.place, 0)
    compression.use_tiers(tiers_of(state))
    wanted = mean_over(peers, found)
    total, posted = 0, exchanges.exchange

    def counted(x: torch.Tensor, *rest: Any, **named: Any) -> Any:
        nonlocal total
        total += int(exchanges.sent_bytes(len(x), BUILD[settings.algorithm](settings), 2))
        return posted(x, *rest, **named)

    exchanges.exchange = counted
    try:
        compression.reduce(NAMES, list(found.values()), peers)
    finally:
        exchanges.exchange = posted
    here = list(compression.compressed)
    error = sum(float((found[name] - wanted[name]).square().sum()) for name in here)
    return digest(list(found.values())), (error / sum(float(wanted[one].square().sum()) for one in here)) ** 0.5, total


def train_with_ddp(
    state: Any, settings: GradientCompressionTable, bucket_mb: float, in_nodes: bool = False
) -> dict[str, Any]:
    """Real buckets: rebuilt after the first pass, accumulated in two passes, the last one with the hook."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
    compression = GradientCompression(settings, dict(model.named_parameters()))
    parallel = DistributedDataParallel(model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)
    topology = Topology((), {"node0": (0, 1), "node1": (2, 3)} if in_nodes else {})
    found = find_reduction(dist.group.WORLD, state.world, "auto", topology, compression=compression)
    found.register_on(parallel)
    total = {name: torch.zeros_like(one, dtype=torch.float64) for name, one in model.named_parameters()}
    generator = torch.Generator().manual_seed(state.world.rank)
    bits, buckets = [], set()
    for _ in range(5):
        inputs = torch.randn(2, 8, 64, generator=generator)
        model.zero_grad(set_to_none=False)
        for part in inputs:  # alone, what this rank would contribute
            model(part).square().mean().backward()
        own = {name: one.grad.double() / state.world.size for name, one in model.named_parameters()}
        model.zero_grad(set_to_none=False)
        with parallel.no_sync():
            parallel(inputs[0]).square().mean().backward()
        parallel(inputs[1]).square().mean().backward()
        bits.append(digest([one.grad for one in model.parameters()]))
        for name, one in model.named_parameters():
            dist.all_reduce(own[name])
            total[name] += own[name] - one.grad.double()
    residual = compression.kept.saved()["mean"]["residual"]
    differences = [float((total[one] - residual[one]).norm() / total[one].norm()) for one in compression.compressed]
    return {"bits": bits, "largest": max(differences), "line": found.line, "buckets": len(buckets)}


def shifted_mean(state: Any, saved: Any) -> float:
    """The error of a mean by differences that are sent whole, after this rank took the means of other ranks."""
    peers = state.communicator.peers
    compression = compression_of(peers, table("ef21", density=1.0))
    compression.kept.take({"mean": {kind: saved["mean"][kind] for kind in ("shift", "mean_shift")}}, [], 4)
    found = gradients(peers.place, 9)
    wanted = mean_over(peers, found)
    compression.reduce(NAMES, list(found.values()), peers)
    return max(float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in NAMES)


def reduce_sparse(state: Any) -> None:
    compression = compression_of(state.communicator.peers, table("int8"))
    compression.reduce(["third"], [torch.ones(3, 3).to_sparse()], state.communicator.peers)


def keep_after_nan_bias(state: Any) -> bool:
    """Whether the residual is that of the step before, after one with a NaN in a parameter that is not compressed."""
    peers = state.communicator.peers
    compression = compression_of(peers, table("top_k"))
    residuals = []
    for step in range(2):
        found = gradients(peers.place, step)
        if step and peers.place:
            found["first.bias"][0] = torch.nan
        compression.reduce(["first.bias"], [found.pop("first.bias")], peers)
        compression.reduce(list(found), list(found.values()), peers)
        residuals.append(digest(list(compression.kept.saved()["mean"]["residual"].values())))
    return residuals[0] == residuals[1]


def empty_parts(state: Any, algorithms: list[str]) -> bool:
    """Whether the mean of parts of length 0 is one, with every algorithm."""
    for algorithm in algorithms:
        compression = GradientCompression(table(algorithm, min_elements=1), {"head": torch.zeros(0, 4096)})
        compression.compressed = {"head": torch.Size((0, 4096))}
        gradient = torch.zeros(0, 4096)
        compression.reduce(["head"], [gradient], state.communicator.peers)
        assert gradient.shape == (0, 4096)
    return True
