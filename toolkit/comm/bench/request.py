"""What is to be measured, and whether that can be. Without torch: the login side asks, too."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from toolkit.comm.algorithms import ALGORITHMS, layouts_allow
from toolkit.config.job import JobTable
from toolkit.errors import ToolkitError, counted
from toolkit.metrics.collectives import OPERATIONS, sizes_of
from toolkit.world.facts import World

BACKENDS = ("auto", "gloo", "nccl")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"([0-9]{1,12})([KMG]?)(?:i?B)?", re.IGNORECASE)


@dataclass(frozen=True)
class BenchRequest:
    """The arguments of `toolkit bench collectives`, which are the table `[args]` of its job, as they are written.

    operations, algorithms: names with commas between them, or "all"; algorithms are those of all-reduce.
    sizes: "8..16M", or one size; K, M and G are powers of 1024. Each is `factor` times the one before.
    backend: "gloo", "nccl", or "auto" for that of the device.
    mpi: whether MPI's own collectives are measured beside.
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
        """Raise a ToolkitError for the first argument that cannot be."""
        _names(self.operations, tuple(OPERATIONS), "operations")
        _names(self.algorithms, tuple(ALGORITHMS), "algorithms")
        if self.algorithm_names != ("flat",) and "all_reduce" not in self.operation_names:
            raise _refused(
                f"{self.algorithms!r} is of all_reduce alone, and {self.operations} is measured",
                "algorithms",
                "leave it out, or measure all_reduce, too",
            )
        if self.backend not in BACKENDS:
            raise _refused(f"there is no backend {self.backend!r}", "backend", f"one of {', '.join(BACKENDS)}")
        for name, value, least in (
            ("factor", self.factor, 2), ("iterations", self.iterations, 1), ("warmup", self.warmup, 0),
        ):  # fmt: skip
            if value < least:
                raise _refused(f"{value} is too few", name, f"{least}, or more")
        first, last = self.first_and_last_bytes
        if last < 1:
            raise _refused(f"{self.sizes!r} holds no size", "sizes", "write 8..16M, or one size such as 64K")
        if first < 1:
            fix = f"write 8..{self.sizes.rpartition('..')[2].strip() if last >= 8 else '16M'}"
            raise _refused(f"{self.sizes!r} begins with 0, and no factor makes that more", "sizes", fix)
        if last < first:
            smaller, between, larger = (part.strip() for part in reversed(self.sizes.partition("..")))
            fix = f"write the smaller one first: {smaller}{between}{larger}"
            raise _refused(f"{self.sizes!r} holds no size", "sizes", fix)

    @property
    def operation_names(self) -> tuple[str, ...]:
        """The operations, each once, in the order that was asked for."""
        return _names(self.operations, tuple(OPERATIONS), "operations")

    @property
    def every_algorithm(self) -> bool:
        """Whether all algorithms are asked for that the layout of ranks allows."""
        return self.algorithms == "all"

    @property
    def algorithm_names(self) -> tuple[str, ...]:
        """The algorithms, each once, in the order that was asked for."""
        return _names(self.algorithms, tuple(ALGORITHMS), "algorithms")

    @property
    def first_and_last_bytes(self) -> tuple[int, int]:
        """The ends of the sizes."""
        first, between, last = self.sizes.partition("..")
        return self._bytes(first), self._bytes(last if between else first)

    def _bytes(self, text: str) -> int:
        match = _SIZE.fullmatch(text.strip())
        if match is None:
            raise _refused(f"{text!r} is no size", "sizes", "write 8..16M, or one size such as 64K")
        return int(match[1]) * _UNITS[match[2].upper()]

    def sizes_of(self, operation: str, ranks: int) -> tuple[int, ...]:
        """The sizes of an operation on so many ranks."""
        first, last = self.first_and_last_bytes
        return sizes_of(OPERATIONS[operation], first, last, self.factor, ranks)

    def check_ranks(self, ranks: int) -> None:
        """Refuse what these ranks cannot measure.

        Raises:
            ToolkitError: it is one rank, or an operation has no size that all of them can share.
        """
        if ranks < 2:
            raise ToolkitError(
                "one rank has nobody to talk to: its times would be those of copies",
                where=f"{ranks} rank{'s' * (ranks != 1)}",
                fix="start two or more: `toolkit bench collectives --ranks 2`, or `-n 2` for run, submit, mpirun or srun",
            )
        for name in self.operation_names:
            if not self.sizes_of(name, ranks):
                raise _refused(
                    f"no size up to {self.sizes.rpartition('..')[2]} gives each of {ranks} ranks 16 bytes of {name}",
                    "sizes",
                    f"write {self.sizes.partition('..')[0]}..{16 * ranks}, or more",
                )

    def check_layout(self, nodes: int, ranks_per_node: int) -> None:
        """Refuse an algorithm that so many nodes, with so many ranks each, cannot run.

        Raises:
            ToolkitError: it is asked for by its name.
        """
        if self.every_algorithm:
            return
        fitting = [name for name in ALGORITHMS if layouts_allow(name, nodes, ranks_per_node)]
        for name in self.algorithm_names:
            if name not in fitting:
                there = f"{counted(nodes, 'node')} of {counted(ranks_per_node, 'rank')}"
                raise _refused(
                    f"all-reduce algorithm {name!r} needs two or more nodes with two or more ranks each, and here is "
                    f"{there}",
                    "algorithms",
                    f"all, or some of {', '.join(fitting)}; or `toolkit submit bench_collectives -N 2 "
                    f"--ntasks-per-node 2 --set args.algorithms={name}`",
                )

    def check_shape(self, job: JobTable) -> None:
        """Refuse what the ranks of a job cannot measure; of a range of nodes what no number of them can.

        Raises:
            ToolkitError: as `check_ranks` and `check_layout`.
        """
        self.check_ranks(job.min_nodes * job.ranks_per_node)
        self.check_layout(job.max_nodes, job.ranks_per_node)

    def check_gpus(self, gpus: int, ranks_per_node: int) -> None:
        """Refuse what a machine with so many GPUs cannot measure.

        Raises:
            ToolkitError: nccl is asked for without a GPU, or ranks would share one.
        """
        if self.backend == "nccl" and not gpus:
            raise _refused(
                "nccl moves what is on GPUs, and this machine shows none",
                "backend",
                "leave it out; or `toolkit submit bench_collectives --gpus-per-node 2 --set args.backend=nccl`",
            )
        if self.backend != "gloo" and 0 < gpus < ranks_per_node:
            raise ToolkitError(
                f"{counted(ranks_per_node, 'rank')} would share {counted(gpus, 'GPU')}",
                where="args.ranks",
                fix=("--backend gloo" if gpus == 1 else f"--ranks {gpus}, or --backend gloo"),
            )

    def check_world(self, world: World) -> None:
        """Refuse what the ranks that were started cannot measure, before they meet."""
        self.check_ranks(world.size)
        if self.backend == "nccl" and not world.device.startswith("cuda"):
            raise _refused(
                f"nccl moves what is on GPUs, and the ranks on {world.host} have the device {world.device}",
                "backend",
                "leave backend out, or ask for GPUs (--gpus-per-node)",
            )


def on_backend(world: World, backend: str) -> World:
    """The world as it is measured: gloo works on the host's memory, also beside GPUs."""
    return replace(world, device="cpu") if backend == "gloo" else world


def _names(text: str, known: Sequence[str], key: str) -> tuple[str, ...]:
    if text.strip() == "all":
        return tuple(known)
    names: Iterable[str] = (name.strip() for name in text.split(","))
    found = tuple(dict.fromkeys(name for name in names if name))
    for name in found:
        if name not in known:
            near = difflib.get_close_matches(name.replace("-", "_").lower(), known, n=1)
            fix = f"did you mean {near[0]!r}" if near else f"all, or some of {', '.join(known)}"
            raise _refused(f"there is no {name!r}", key, fix)
    if not found:
        raise _refused(f"{text!r} names none", key, f"all, or some of {', '.join(known)}")
    return found


def _refused(message: str, key: str, fix: str) -> ToolkitError:
    return ToolkitError(message, where=f"args.{key}", fix=fix)
