"""What may be asked for."""

import re
import subprocess
import sys

import pytest

from toolkit.comm.algorithms import ALGORITHMS
from toolkit.comm.bench.request import BenchRequest, on_backend
from toolkit.errors import ToolkitError
from toolkit.world.facts import World


def world(size=2, device="cpu"):
    return World(0, 0, size, size, 0, 1, "n1", device, "mpirun", "MPI (MPICH)")


def test_the_names_of_algorithms_are_read_without_torch():
    script = (
        "import sys; from toolkit.comm.bench.request import BenchRequest\n"
        "print(*BenchRequest(algorithms='all').algorithm_names, sep=',')\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == ",".join(ALGORITHMS), done


def test_every_algorithm_is_the_function_that_its_row_names():
    """A row's words are looked up when it is run, and not before."""
    for name, algorithm in ALGORITHMS.items():
        assert algorithm.run.__name__ == f"{re.sub('[ -]', '_', name)}_all_reduce"


def test_names_and_sizes():
    request = BenchRequest(operations="reduce, all_reduce,reduce", algorithms="all", sizes="4k..2MiB")
    assert request.operation_names == ("reduce", "all_reduce")
    assert request.algorithm_names == tuple(ALGORITHMS) and request.every_algorithm
    assert request.first_and_last_bytes == (4096, 2 << 20)
    assert BenchRequest(sizes="1G").first_and_last_bytes == (1 << 30, 1 << 30)
    assert BenchRequest(operations="all").operation_names[0] == "all_reduce"


@pytest.mark.parametrize(
    ("arguments", "where", "said", "fix"),
    [
        ({"operations": "allreduce"}, "args.operations", "'allreduce'", "did you mean 'all_reduce'"),
        ({"operations": "all-gather"}, "args.operations", "'all-gather'", "did you mean 'all_gather'"),
        ({"operations": " , "}, "args.operations", "contains no name", "all_reduce"),
        ({"algorithms": "piplined ring"}, "args.algorithms", "piplined", "'pipelined ring'"),
        ({"operations": "all_gather", "algorithms": "ring"}, "args.algorithms", "'ring' applies only to all_reduce, but the operations are all_gather", "omit the algorithms, or also measure all_reduce"),
        ({"operations": "all_gather", "algorithms": "all"}, "args.algorithms", "'all' applies only to all_reduce", "omit the algorithms"),
        ({"sizes": "8-64"}, "args.sizes", "'8-64' is not a valid size", "8..16M"),
        ({"sizes": "64..8"}, "args.sizes", "contains no size", "smaller size first: 8..64"),
        ({"sizes": "0..1K"}, "args.sizes", "'0..1K' starts with 0", "set 8..1K"),
        ({"sizes": "0..3"}, "args.sizes", "starts with 0", "set 8..16M"),
        ({"sizes": "0"}, "args.sizes", "contains no size", "64K"),
        ({"factor": 1}, "args.factor", "expected 2 or more, got 1", "2 or more"),
        ({"iterations": 0}, "args.iterations", "expected 1 or more, got 0", "1 or more"),
        ({"warmup": -1}, "args.warmup", "expected 0 or more, got -1", "0 or more"),
        ({"backend": "mpi"}, "args.backend", "'mpi'", "auto, gloo, nccl"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(arguments, where, said, fix):
    with pytest.raises(ToolkitError) as caught:
        BenchRequest(**arguments)
    assert caught.value.where == where and said in caught.value.message and fix in caught.value.fix


def test_one_rank_is_refused():
    with pytest.raises(ToolkitError, match="expected two or more ranks, got one") as caught:
        BenchRequest().check_world(world(1))
    assert "--ranks 2" in caught.value.fix


def test_sizes_that_ranks_cannot_share_are_refused():
    BenchRequest(operations="all_gather", sizes="8..64").check_ranks(4)
    with pytest.raises(ToolkitError, match="no size up to 63 gives each of 4 ranks 16 bytes") as caught:
        BenchRequest(operations="all_gather", sizes="8..63").check_ranks(4)
    assert "8..64" in caught.value.fix


def test_nccl_needs_gpus():
    BenchRequest(backend="nccl").check_world(world(device="cuda:0"))
    with pytest.raises(ToolkitError, match="nccl requires GPUs"):
        BenchRequest(backend="nccl").check_world(world())
    with pytest.raises(ToolkitError, match="this machine has none"):
        BenchRequest(backend="nccl").check_gpus(0, 2)
    assert on_backend(world(device="cuda:0"), "gloo").device == "cpu"
    assert on_backend(world(device="cuda:0"), "auto").device == "cuda:0"


@pytest.mark.parametrize(
    ("gpus", "backend", "fix"), [(1, "auto", "pass --backend gloo"), (2, "nccl", "pass --ranks 2, or --backend gloo")]
)
def test_ranks_that_would_share_a_gpu_are_refused(gpus, backend, fix):
    with pytest.raises(ToolkitError, match="3 ranks would share") as caught:
        BenchRequest(backend=backend).check_gpus(gpus, 3)
    assert (caught.value.where, caught.value.fix) == ("args.ranks", fix)
    BenchRequest(backend=backend).check_gpus(3, 3)
    BenchRequest(backend="gloo").check_gpus(gpus, 3)
    BenchRequest(backend="auto").check_gpus(0, 3)


@pytest.mark.parametrize(("nodes", "ranks", "fits"), [(1, 8, False), (4, 1, False), (2, 2, True)])
def test_an_algorithm_that_the_layout_does_not_allow_is_refused(nodes, ranks, fits):
    """Unless nobody asked for it by its name."""
    BenchRequest(algorithms="all").check_layout(nodes, ranks)
    BenchRequest(operations="broadcast").check_layout(nodes, ranks)
    BenchRequest(algorithms="flat,leader").check_layout(nodes, ranks)
    request = BenchRequest(algorithms="ring,hierarchical")
    if fits:
        request.check_layout(nodes, ranks)
        return
    with pytest.raises(
        ToolkitError, match="'hierarchical' requires two nodes or more with two ranks or more"
    ) as caught:
        request.check_layout(nodes, ranks)
    assert caught.value.where == "args.algorithms" and "leader; or run `toolkit submit" in caught.value.fix
    assert "hierarchical" not in caught.value.fix.partition(";")[0]
