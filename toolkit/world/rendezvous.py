"""Rendezvous of the ranks: rank 0 opens the socket of torch's store and sends its address to the other ranks."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from toolkit.errors import OwnFailureError, ToolkitError
from toolkit.rundir.files import read_json_or_none, write_json
from toolkit.rundir.layout import RunDirectory
from toolkit.world.address import choose_interface
from toolkit.world.facts import World

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["Endpoint", "meet", "start_groups"]

_ENDPOINT_BYTES = 128
_PORT_TRIES = 20
ADDRESS_PATIENCE_S = 300.0  # wait for rank 0's address; shorter than the stall timeout, whose error is less specific
COLLECTIVE_TIMEOUT_S = 1800.0  # torch's default for gloo


@dataclass(frozen=True)
class Endpoint:
    """The address of the store. `listener` is the open socket on rank 0."""

    host: str
    port: int
    listener: socket.socket | None = None


def meet(world: World, *, interface: str = "", timeout_s: float = ADDRESS_PATIENCE_S) -> Endpoint:
    """Agree on the endpoint of the store: over MPI, else through the run directory, else from the environment."""
    name, address = choose_interface(interface, single_node=world.nodes == 1)
    # gloo would otherwise resolve the host name, often to loopback. A value from the user or site has precedence.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # without "=", NCCL treats the name as a prefix
    if world.launcher == "torchrun":
        return Endpoint(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if world.discovered_by.startswith("MPI"):
        return _over_mpi(world, address)
    if world.size == 1:
        return _listen(address)
    if world.run_dir is not None:
        return _over_files(world, address, timeout_s)
    return _from_slurm(world, address)


def _listen(address: str, port: int = 0) -> Endpoint:
    """Open a port; if toolkit chooses it, the next port is free as well, for JAX."""
    for _ in range(_PORT_TRIES if port == 0 else 0):
        endpoint = _open(address, 0)
        assert endpoint.listener is not None
        if _is_free(address, endpoint.port + 1):
            return endpoint
        endpoint.listener.close()
    return _open(address, port)


def _is_free(address: str, port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, port))
        except (OSError, OverflowError):  # in use, or above the last port
            return False
    return True


def _open(address: str, port: int) -> Endpoint:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
    except OSError as error:
        listener.close()
        raise OwnFailureError(
            f"cannot listen on {address}:{port}: {error.strerror}",
            where=socket.gethostname(),
            fix="start through `toolkit run` or `toolkit submit`, which choose a free port",
        ) from error
    listener.listen(4096)
    return Endpoint(address, listener.getsockname()[1], listener)


def _over_mpi(world: World, address: str) -> Endpoint:
    from mpi4py import MPI

    endpoint = _listen(address) if world.rank == 0 else None
    text = f"{endpoint.host} {endpoint.port}" if endpoint else ""
    buffer = bytearray(text.encode().ljust(_ENDPOINT_BYTES))
    MPI.COMM_WORLD.Bcast(buffer, root=0)
    if endpoint is not None:
        return endpoint
    host, port = buffer.decode().split()
    return Endpoint(host, int(port))


def _over_files(world: World, address: str, timeout_s: float) -> Endpoint:
    assert world.run_dir is not None
    path = RunDirectory(world.run_dir).attempt(world.attempt).rendezvous
    if world.rank == 0:
        endpoint = _listen(address)
        write_json(path, {"host": endpoint.host, "port": endpoint.port})
        return endpoint
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = read_json_or_none(path)
        if value is not None:
            return Endpoint(value["host"], value["port"])
        time.sleep(0.05)
    raise OwnFailureError(
        f"rank 0 did not write its address within {timeout_s:.0f} s",
        where=str(path),
        fix="see the log of rank 0, and check that all nodes share this folder",
    )


def _from_slurm(world: World, address: str) -> Endpoint:
    """Return an endpoint without MPI or run directory: the first node of the step, and a port from the step id."""
    from toolkit.slurm.hostlist import first_host

    nodes = os.environ.get("SLURM_STEP_NODELIST")
    if not nodes:
        raise ToolkitError(
            f"{world.size} ranks have no means of finding rank 0 ({world.discovered_by})",
            fix="start through `toolkit run`, srun, mpirun or torchrun",
        )
    step = (os.environ["SLURM_JOB_ID"], os.environ["SLURM_STEP_ID"])
    port = 20000 + (int(step[0]) * 31 + int(step[1])) % 20000
    if world.rank == 0:
        return _listen(address, port)
    return Endpoint("127.0.0.1" if world.nodes == 1 else first_host(nodes), port)


def open_store(world: World, endpoint: Endpoint, *, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> dist.Store:
    """Return torch's store at `endpoint`.

    Its keys begin with a value that only the owner of the run can derive, and with the attempt, so that others and earlier
    attempts are ignored.
    """
    import torch.distributed as dist

    listener = endpoint.listener
    # The agent of torchrun already hosts the store, so all ranks are clients.
    hosted = world.launcher == "torchrun" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_master = world.rank == 0 and not hosted
    store = dist.TCPStore(
        endpoint.host,
        endpoint.port,
        world.size,
        is_master,
        timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach() if listener is not None else None,
    )
    secret = os.environ.get("TOOLKIT_STORE_PREFIX", "")  # the same on all ranks; none without a run
    return dist.PrefixStore(f"{secret}/attempt-{world.attempt}" if secret else f"attempt-{world.attempt}", store)


def start_groups(world: World, *, interface: str = "", timeout_s: float = COLLECTIVE_TIMEOUT_S) -> None:
    """Initialize torch's default process group: gloo for CPU tensors and, on GPUs, NCCL for CUDA tensors.

    `timeout_s` limits how long a rank waits in a collective of this group, or for the store.
    """
    import torch
    import torch.distributed as dist

    endpoint = meet(world, interface=interface)
    store = open_store(world, endpoint, timeout_s=timeout_s)
    on_gpu = world.device.startswith("cuda")
    if on_gpu:
        torch.cuda.set_device(world.device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo", store=store, rank=world.rank, world_size=world.size,
        timeout=timedelta(seconds=timeout_s),
    )  # fmt: skip
