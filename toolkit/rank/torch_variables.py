"""Set the variables that torchrun and JAX give their processes, so that scripts written for them run unchanged."""

import importlib.util
import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

from toolkit.world.device import own_slice
from toolkit.world.discover import Place, from_slurm, in_slurm_step
from toolkit.world.facts import World
from toolkit.world.rendezvous import Endpoint, meet

# How launchers name the rank of a process within its node.
_LOCAL_RANKS = ("SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "LOCAL_RANK")


def set_for_script(world: World, interface: str) -> object:
    """Set the variables in this process; rank 0 returns the store to which `env://` in the script connects."""
    endpoint = meet(world, interface=interface)
    has_torch = importlib.util.find_spec("torch") is not None
    os.environ |= _variables(world, endpoint, has_store=has_torch)
    if not has_torch or world.rank != 0 or endpoint.listener is None:
        return endpoint
    import torch.distributed as dist

    return dist.TCPStore(
        endpoint.host, endpoint.port, None, True, timedelta(minutes=30),
        wait_for_workers=False, master_listen_fd=endpoint.listener.detach(),
    )  # fmt: skip


def set_for_program(rank: int, interface: str) -> None:
    """Set the variables in this process, which becomes the program; it may use MPI, so this process must not.

    Rank 0 of the program opens the store on a port that was free a moment before.
    """
    world = _world_of_launcher(os.environ, rank)
    endpoint = meet(world, interface=interface)
    if endpoint.listener is not None:
        endpoint.listener.close()
    os.environ |= _variables(world, endpoint, has_store=False)
    if own := own_slice(world.local_rank, os.environ):
        os.environ["CUDA_VISIBLE_DEVICES"] = own


def _variables(world: World, endpoint: Endpoint, *, has_store: bool) -> dict[str, str]:
    """Return the variables of a rank. `has_store`: toolkit serves the store, as the agent of torchrun does."""
    variables = {
        "RANK": world.rank, "WORLD_SIZE": world.size, "LOCAL_RANK": world.local_rank,
        "LOCAL_WORLD_SIZE": world.local_size, "GROUP_RANK": world.node, "GROUP_WORLD_SIZE": world.nodes,
        "ROLE_NAME": "default", "ROLE_RANK": world.rank, "ROLE_WORLD_SIZE": world.size,
        "MASTER_ADDR": endpoint.host, "MASTER_PORT": endpoint.port, "TORCHELASTIC_USE_AGENT_STORE": has_store,
        "TORCHELASTIC_MAX_RESTARTS": 0, "JAX_COORDINATOR_ADDRESS": f"{endpoint.host}:{endpoint.port + 1}",
    }  # fmt: skip
    # Without this id, Lightning selects MPI outside of Slurm, and then a port without a listener. In an srun step it must
    # select Slurm, because only then does it save on SIGUSR1.
    if world.launcher != "srun":
        own = world.run_dir.name if world.run_dir is not None else "toolkit"
        variables["TORCHELASTIC_RUN_ID"] = os.environ.get("TORCHELASTIC_RUN_ID", own)  # [env] vars may set another one
    return {name: str(value) for name, value in variables.items()}


def _world_of_launcher(environ: Mapping[str, str], rank: int) -> World:
    """Return the world of a rank from the launcher's variables; outside of srun, ranks fill one node after the other."""
    size, each = int(environ["TOOLKIT_WORLD_SIZE"]), int(environ["TOOLKIT_RANKS_PER_NODE"].partition(",")[0])
    node, local_rank = divmod(rank, each)
    place = Place(
        rank, size, local_rank, min(each, size - node * each), node, -(-size // each), environ["TOOLKIT_LAUNCHER"], ""
    )
    if in_slurm_step(environ):
        place = from_slurm(environ)
    named = next((int(environ[name]) for name in _LOCAL_RANKS if environ.get(name, "").isdigit()), place.local_rank)
    return World(
        rank=rank, local_rank=named, size=size, local_size=place.local_size, node=place.node, nodes=place.nodes,
        host="", device="cpu", launcher=place.launcher, discovered_by="the launcher's variables",
        attempt=int(environ["TOOLKIT_ATTEMPT"]), run_dir=Path(environ["TOOLKIT_RUN_DIR"]),
    )  # fmt: skip
