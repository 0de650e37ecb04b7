"""The request for a measurement, and its checks. Works without torch, because login nodes run the checks."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from toolkit.comm.algorithms import ALGORITHMS, layouts_allow
from toolkit.config.job import JobTable
from toolkit.errors import ToolkitError, counted
from toolkit.metrics.collectives import OPERATIONS, sizes_of
from toolkit.units import parse_bytes
from toolkit.world.facts import World

__all__ = ["BenchRequest", "on_backend"]

BACKENDS = ("auto", "gloo", "nccl")


@dataclass(frozen=True)
class BenchRequest:
    """The arguments of `toolkit bench collectives`, the table `[args]` of its job.

    Attributes:
        operations, algorithms: comma-separated names, or "all"; algorithms apply to all-reduce.
        sizes: "8..16M", or one size; K, M and G are powers of 1024. Each size is `factor` times the previous one.
        backend: "gloo", "nccl", or "auto" for the device's backend.
        mpi: also measure MPI's collectives.
    """

    operations: str = "all_reduce"
    algorithms: str = "flat"
    sizes: str = "8..16M"
    factor: int = 2
    backend: str = "auto"
    mpi: bool = False
    iterations: int = 20
    warmup: int = 5

    def __post_init__(self) -> None:
        """Raise a ToolkitError for the first invalid argument."""
        _names(self.operations, tuple(OPERATIONS), "operations")
        _names(self.algorithms, tuple(ALGORITHMS), "algorithms")
        if self.algorithm_names != ("flat",) and "all_reduce" not in self.operation_names:
            raise _invalid(
                f"{self.algorithms!r} applies only to all_reduce, but the operations are {self.operations}",
                "algorithms",
                "omit the algorithms, or also measure all_reduce",
            )
        if self.backend not in BACKENDS:
            raise _invalid(f"unknown backend {self.backend!r}", "backend", f"use one of {', '.join(BACKENDS)}")
        for name, value, least in (
            ("factor", self.factor, 2), ("iterations", self.iterations, 1), ("warmup", self.warmup, 0),
        ):  # fmt: skip
            if value < least:
                raise _invalid(f"expected {least} or more, got {value}", name, f"set {least} or more")
        first, last = self.first_and_last_bytes
        if last < 1:
            raise _invalid(f"{self.sizes!r} contains no size", "sizes", "set 8..16M, or one size such as 64K")
        if first < 1:
            fix = f"set 8..{self.sizes.rpartition('..')[2].strip() if last >= 8 else '16M'}"
            raise _invalid(f"{self.sizes!r} starts with 0, which no factor increases", "sizes", fix)
        if last < first:
            smaller, between, larger = (part.strip() for part in reversed(self.sizes.partition("..")))
            fix = f"set the smaller size first: {smaller}{between}{larger}"
            raise _invalid(f"{self.sizes!r} contains no size", "sizes", fix)

    @property
    def operation_names(self) -> tuple[str, ...]:
        """The operations, each once, in the requested order."""
        return _names(self.operations, tuple(OPERATIONS), "operations")

    @property
    def every_algorithm(self) -> bool:
        """Whether the request is for all algorithms that the layout of ranks allows."""
        return self.algorithms == "all"

    @property
    def algorithm_names(self) -> tuple[str, ...]:
        """The algorithms, each once, in the requested order."""
        return _names(self.algorithms, tuple(ALGORITHMS), "algorithms")

    @property
    def first_and_last_bytes(self) -> tuple[int, int]:
        """The smallest and the largest size."""
        first, between, last = self.sizes.partition("..")
        return self._bytes(first), self._bytes(last if between else first)

    def _bytes(self, text: str) -> int:
        size = parse_bytes(text, binary=True)
        if size is None:
            raise _invalid(f"{text!r} is not a valid size", "sizes", "set 8..16M, or one size such as 64K")
        return size

    def sizes_of(self, operation: str, ranks: int) -> tuple[int, ...]:
        """Return the sizes to measure for an operation on this number of ranks."""
        first, last = self.first_and_last_bytes
        return sizes_of(OPERATIONS[operation], first, last, self.factor, ranks)

    def check_ranks(self, ranks: int) -> None:
        """Check that a number of ranks can measure the request.

        Raises:
            ToolkitError: there is one rank, or an operation has no size that all ranks can share.
        """
        if ranks < 2:
            raise ToolkitError(
                "expected two or more ranks, got one, which would only measure copies",
                where=f"{ranks} rank{'s' * (ranks != 1)}",
                fix="start two ranks: `toolkit bench collectives --ranks 2`, or `-n 2` for run, submit, mpirun or srun",
            )
        for name in self.operation_names:
            if not self.sizes_of(name, ranks):
                raise _invalid(
                    f"no size up to {self.sizes.rpartition('..')[2]} gives each of {ranks} ranks 16 bytes of {name}",
                    "sizes",
                    f"set {self.sizes.partition('..')[0]}..{16 * ranks}, or more",
                )

    def check_layout(self, nodes: int, ranks_per_node: int) -> None:
        """Check that a number of nodes, with a number of ranks each, can run the algorithms.

        Raises:
            ToolkitError: they cannot run an algorithm that the request names.
        """
        if self.every_algorithm:
            return
        fitting = [name for name in ALGORITHMS if layouts_allow(name, nodes, ranks_per_node)]
        for name in self.algorithm_names:
            if name not in fitting:
                layout = f"{counted(nodes, 'node')} of {counted(ranks_per_node, 'rank')}"
                raise _invalid(
                    f"all-reduce algorithm {name!r} requires two nodes or more with two ranks or more each, "
                    f"got {layout}",
                    "algorithms",
                    f"use all, or some of {', '.join(fitting)}; or run `toolkit submit bench_collectives -N 2 "
                    f"--ntasks-per-node 2 --set args.algorithms={name}`",
                )

    def check_shape(self, job: JobTable) -> None:
        """Check that the ranks of a job can measure the request, with at least one number of nodes from its range.

        Raises:
            ToolkitError: see `check_ranks` and `check_layout`.
        """
        self.check_ranks(job.min_nodes * job.ranks_per_node)
        self.check_layout(job.max_nodes, job.ranks_per_node)

    def check_gpus(self, gpus: int, ranks_per_node: int) -> None:
        """Check that a machine with a number of GPUs can measure the request.

        Raises:
            ToolkitError: the backend is nccl without a GPU, or ranks would share a GPU.
        """
        if self.backend == "nccl" and not gpus:
            raise _invalid(
                "nccl requires GPUs, but this machine has none",
                "backend",
                "omit the backend, or run `toolkit submit bench_collectives --gpus-per-node 2 --set args.backend=nccl`",
            )
        if self.backend != "gloo" and 0 < gpus < ranks_per_node:
            raise ToolkitError(
                f"each rank requires a GPU, but {counted(ranks_per_node, 'rank')} would share {counted(gpus, 'GPU')}",
                where="args.ranks",
                fix=("pass --backend gloo" if gpus == 1 else f"pass --ranks {gpus}, or --backend gloo"),
            )

    def check_world(self, world: World) -> None:
        """Check that the started ranks can measure the request, before their rendezvous."""
        self.check_ranks(world.size)
        if self.backend == "nccl" and not world.device.startswith("cuda"):
            raise _invalid(
                f"nccl requires GPUs, but the ranks on {world.host} have the device {world.device}",
                "backend",
                "omit the backend, or request GPUs (--gpus-per-node)",
            )


def on_backend(world: World, backend: str) -> World:
    """Return the world with the device of the backend: gloo uses host memory, even on nodes with GPUs."""
    return replace(world, device="cpu") if backend == "gloo" else world


def _names(text: str, known: Sequence[str], key: str) -> tuple[str, ...]:
    if text.strip() == "all":
        return tuple(known)
    names: Iterable[str] = (name.strip() for name in text.split(","))
    chosen = tuple(dict.fromkeys(name for name in names if name))
    for name in chosen:
        if name not in known:
            similar = difflib.get_close_matches(name.replace("-", "_").lower(), known, n=1)
            fix = f"did you mean {similar[0]!r}" if similar else f"use all, or some of {', '.join(known)}"
            raise _invalid(f"unknown name {name!r}", key, fix)
    if not chosen:
        raise _invalid(f"{text!r} contains no name", key, f"use all, or some of {', '.join(known)}")
    return chosen


def _invalid(message: str, key: str, fix: str) -> ToolkitError:
    return ToolkitError(message, where=f"args.{key}", fix=fix)
