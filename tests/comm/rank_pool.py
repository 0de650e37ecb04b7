"""Real gloo ranks that stay alive between tests, so that hundreds of cases take seconds.

Each rank is forked from a server that has imported torch once. A case is a function of a module and its arguments;
every rank of the pool runs it as `function(rank_state, *arguments)` and its answers come back in the order of ranks.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from toolkit.comm.communicator import Communicator
from toolkit.topology.facts import Topology
from toolkit.world.facts import World

PATIENCE_S = 60
LAYOUTS = {1: (1,), 2: (1, 1), 3: (2, 1), 4: (2, 2), 8: (2, 2, 2, 2)}  # ranks on each simulated node


def world_of(rank: int, layout: tuple[int, ...]) -> World:
    node = next(n for n in range(len(layout)) if rank < sum(layout[: n + 1]))
    local_rank = rank - sum(layout[:node])
    return World(rank, local_rank, sum(layout), layout[node], node, len(layout), f"node{node}", "cpu", "local", "test")


def topology_of(layout: tuple[int, ...]) -> Topology:
    """The places alone; nothing is probed."""
    starts = [sum(layout[:node]) for node in range(len(layout) + 1)]
    ranks = {f"node{node}": tuple(range(starts[node], starts[node + 1])) for node in range(len(layout))}
    return Topology((), ranks)


@dataclass
class RankState:
    """What a rank of the pool keeps."""

    world: World
    communicator: Communicator


def _serve(rank: int, layout: tuple[int, ...], folder: str, connection: Any, timing: dict[str, float]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=sum(layout),
        timeout=timedelta(seconds=PATIENCE_S),
    )
    world = world_of(rank, layout)
    with Communicator(world, topology=topology_of(layout), **timing) as communicator:
        state = RankState(world, communicator)
        while (case := connection.recv()) is not None:
            function, arguments = case
            try:
                connection.send((True, function(state, *arguments)))
            except Exception:  # noqa: BLE001 - told to the test, which raises it
                connection.send((False, traceback.format_exc()))
    dist.destroy_process_group()


class RankPool:
    """Ranks over one layout of simulated nodes."""

    def __init__(self, layout: tuple[int, ...], **timing: float) -> None:
        """`timing` is for the communicator: timeout_s, beat_s."""
        self.size = sum(layout)
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("forkserver")
        self._ranks = []
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, layout, self._folder.name, theirs, {"timeout_s": PATIENCE_S, **timing}),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def run(self, function: Any, *arguments: Any) -> list[Any]:
        """Every rank's answer; the tracebacks when one failed."""
        answers = self.outcomes(function, *arguments)
        failures = [f"rank {rank}:\n{answer}" for rank, (well, answer) in enumerate(answers) if not well]
        assert not failures, "\n".join(failures)
        return [answer for _, answer in answers]

    def outcomes(self, function: Any, *arguments: Any) -> list[tuple[bool, Any]]:
        """Of every rank whether it was well, and its answer, its traceback, or "ended"."""
        for _, connection in self._ranks:
            connection.send((function, arguments))
        return [_received(connection) for _, connection in self._ranks]

    def close(self) -> None:
        """End the ranks in order, or kill what does not end."""
        for _, connection in self._ranks:
            try:
                connection.send(None)
            except OSError:
                continue  # this rank has ended after a failure
        for process, _ in self._ranks:
            process.join(10)
            process.kill()
        self._folder.cleanup()


def _received(connection: Any) -> tuple[bool, Any]:
    try:
        answer: tuple[bool, Any] = connection.recv() if connection.poll(PATIENCE_S + 30) else (False, "no answer")
    except (EOFError, ConnectionResetError):
        return False, "ended"
    return answer
