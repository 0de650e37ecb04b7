"""Every rank prints its number, node and device. Works under toolkit, mpirun, srun, torchrun, or alone."""

import sys

from toolkit.errors import ToolkitError
from toolkit.world.discover import discover

if __name__ == "__main__":
    try:
        world = discover()
    except ToolkitError as error:
        sys.exit(f"mpi_hello: {error}")
    print(
        f"rank {world.rank} of {world.size}, local rank {world.local_rank} on {world.host} "
        f"(node {world.node} of {world.nodes}), device {world.device}, launcher {world.launcher}, "
        f"discovered by {world.discovered_by}"
    )
