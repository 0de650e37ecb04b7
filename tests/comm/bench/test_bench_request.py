"""What may be asked for."""

import pytest

from toolkit.comm.algorithms import ALGORITHMS as REAL
from toolkit.comm.bench.request import ALGORITHMS, BenchRequest, on_backend
from toolkit.errors import ToolkitError
from toolkit.world.facts import World


def world(size=2, device="cpu"):
    return World(0, 0, size, size, 0, 1, "n1", device, "mpirun", "MPI (MPICH)")


def test_the_names_are_those_of_the_communicator():
    assert tuple(REAL) == ALGORITHMS


def test_names_and_sizes():
    request = BenchRequest(operations="reduce, all_reduce,reduce", algorithms="all", sizes="4k..2MiB")
    assert request.operation_names == ("reduce", "all_reduce")
    assert request.algorithm_names == ALGORITHMS and request.every_algorithm
    assert request.first_and_last_bytes == (4096, 2 << 20)
    assert BenchRequest(sizes="1G").first_and_last_bytes == (1 << 30, 1 << 30)
    assert BenchRequest(operations="all").operation_names[0] == "all_reduce"


@pytest.mark.parametrize(
    ("arguments", "where", "said", "fix"),
    [
        ({"operations": "allreduce"}, "args.operations", "'allreduce'", "did you mean 'all_reduce'"),
        ({"operations": "all-gather"}, "args.operations", "'all-gather'", "did you mean 'all_gather'"),
        ({"operations": " , "}, "args.operations", "names none", "all_reduce"),
        ({"algorithms": "piplined ring"}, "args.algorithms", "piplined", "'pipelined ring'"),
        ({"sizes": "8-64"}, "args.sizes", "'8-64' is no size", "8..16M"),
        ({"sizes": "64..8"}, "args.sizes", "holds no size", "smaller one first"),
        ({"sizes": "0..8"}, "args.sizes", "holds no size", "8..16M"),
        ({"factor": 1}, "args.factor", "1 is too few", "2, or more"),
        ({"iterations": 0}, "args.iterations", "0 is too few", "1, or more"),
        ({"warmup": -1}, "args.warmup", "-1 is too few", "0, or more"),
        ({"backend": "mpi"}, "args.backend", "'mpi'", "auto, gloo, nccl"),
    ],
)
def test_what_cannot_be_is_refused(arguments, where, said, fix):
    with pytest.raises(ToolkitError) as caught:
        BenchRequest(**arguments)
    assert caught.value.where == where and said in caught.value.message and fix in caught.value.fix


def test_one_rank_is_refused():
    with pytest.raises(ToolkitError, match="one rank has nobody to talk to") as caught:
        BenchRequest().check_world(world(1))
    assert "--ranks 2" in caught.value.fix


def test_sizes_that_ranks_cannot_share_are_refused():
    BenchRequest(operations="all_gather", sizes="8..64").check_ranks(4)
    with pytest.raises(ToolkitError, match="no size up to 63 gives each of 4 ranks 16 bytes") as caught:
        BenchRequest(operations="all_gather", sizes="8..63").check_ranks(4)
    assert "8..64" in caught.value.fix


def test_nccl_needs_gpus():
    BenchRequest(backend="nccl").check_world(world(device="cuda:0"))
    with pytest.raises(ToolkitError, match="nccl moves what is on GPUs"):
        BenchRequest(backend="nccl").check_world(world())
    assert on_backend(world(device="cuda:0"), "gloo").device == "cpu"
    assert on_backend(world(device="cuda:0"), "auto").device == "cuda:0"
