"""Every rank says where it is and how it found out. Works under toolkit, mpirun, srun, torchrun, or alone."""

from toolkit.world.discover import discover

if __name__ == "__main__":
    world = discover()
    print(
        f"rank {world.rank} of {world.size}, local rank {world.local_rank} on {world.host} (node {world.node} of "
        f"{world.nodes}), device {world.device}, launcher {world.launcher}, discovered by {world.discovered_by}"
    )
