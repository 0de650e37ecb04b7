"""The bytes that a rank sends are those of ring algorithms, for the collectives of every way to train."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from launch import results_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from toolkit.comm.compat import all_gather_single, reduce_scatter_single
from toolkit.comm.ordered_thread import OrderedThread
from toolkit.comm.sent_bytes import SentBytes

ROWS = 3072  # float32; divisible by every number of ranks
RANKS = 3


def count_each(world: Any) -> dict[str, dict[str, int]]:
    rank, size = world.rank, world.size
    whole, part = torch.ones(ROWS), torch.ones(ROWS // size)
    sent = [rank + 1] * (size - 1) + [0]
    received = [n + 1 for n in range(size)] if rank < size - 1 else [0] * size
    following = dist.P2POp(dist.isend, whole, (rank + 1) % size)
    previous = dist.P2POp(dist.irecv, torch.empty(ROWS), (rank - 1) % size)
    tensor = distribute_tensor(torch.ones(12, 12), init_device_mesh("cpu", (size,)), [Shard(0)])
    calls = {
        "all-reduce": lambda: dist.all_reduce(whole.clone()),
        "all-gather": lambda: all_gather_single(torch.empty(ROWS), part),
        "reduce-scatter": lambda: reduce_scatter_single(torch.empty(ROWS // size), whole),
        "all-to-all": lambda: dist.all_to_all_single(torch.empty(ROWS), whole),
        "unequal": lambda: dist.all_to_all_single(torch.empty(sum(received)), torch.ones(sum(sent)), received, sent),
        "broadcast": lambda: dist.broadcast(whole.clone(), 0),
        "send": lambda: [work.wait() for work in dist.batch_isend_irecv([following, previous])],
        "full_tensor": lambda: tensor.full_tensor(),
        "other_dimension": lambda: tensor.redistribute(placements=[Shard(1)]),
        "sum": lambda: tensor.sum().full_tensor(),
        "inside_an_operator": lambda: torch.relu(tensor.sum()),
        "nothing": lambda: whole @ whole,
    }
    counts = {}
    for name, call in calls.items():
        with SentBytes() as counted:
            call()
        counts[name] = dict(counted.of)
    return counts


def test_each_collective_counts_as_a_ring_sends_it(tmp_path):
    whole_bytes = 4 * ROWS
    for rank, counts in enumerate(results_of(count_each, RANKS, tmp_path)):
        assert counts == {
            "all-reduce": {"all-reduce": whole_bytes * 4 // 3},
            "all-gather": {"all-gather": whole_bytes * 2 // 3},
            "reduce-scatter": {"reduce-scatter": whole_bytes * 2 // 3},
            "all-to-all": {"all-to-all": whole_bytes * 2 // 3},
            "unequal": {"all-to-all": 4 * (rank + 1 if rank < 2 else 6)},
            "broadcast": {"broadcast": whole_bytes * 2 // 3},
            "send": {"send": whole_bytes},
            "full_tensor": {"all-gather": 12 * 12 * 4 * 2 // 3},
            "other_dimension": {"all-gather": 12 * 12 * 4 * 2 // 3},  # gloo gathers; NCCL would exchange
            "sum": {"all-reduce": round(4 * 4 / 3)},
            "inside_an_operator": {"all-reduce": round(4 * 4 / 3)},
            "nothing": {},
        }


def count_steps(world: Any) -> list[dict[str, int]]:
    def model() -> Any:
        return nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))

    sharded = model()
    for part in (*sharded, sharded):
        fully_shard(part)
    counts = []
    for one in (DistributedDataParallel(model()), sharded):
        for _ in range(3):  # DDP makes its buckets in the first two passes
            with SentBytes() as counted:
                one(torch.ones(4, 64)).sum().backward()
        counts.append(dict(counted.of))
    thread = OrderedThread("exchange")
    with SentBytes() as counted:
        thread.submit(lambda: dist.all_reduce(torch.ones(64))).result()
    thread.submit(lambda: dist.all_reduce(torch.ones(64))).result()
    return [*counts, dict(counted.of)]


def test_a_step_counts_its_backward_pass_and_threads_that_exchange_for_it(tmp_path):
    gradients = 2 * 64 * 64 * 4
    ddp, fsdp = {"all-reduce": gradients}, {"all-gather": 2 * gradients // 2, "reduce-scatter": gradients // 2}
    assert results_of(count_steps, 2, tmp_path) == [[ddp, fsdp, {"all-reduce": 256}]] * 2
