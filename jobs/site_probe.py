"""Every rank prints one line of JSON: its rank and node, an MPI test, and the GPUs, network and shared folder it sees.

`toolkit site check` submits this job to each partition of a site and evaluates the lines.
"""

import argparse
import json
import os
import re
import sys
import time
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.world.address import interface_addresses
from toolkit.world.discover import discover

LINE = "site-probe: "
FILE_S = 20.0  # a network file system may show a new file late
MESSAGE_BYTES = 4 << 20
MEASURE_S = 1.0
VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--token", default="alone", help="string that rank 0 writes to the shared file")
    parser.add_argument("--folder", type=Path, default=Path(), help="folder that all nodes should share")
    asked = parser.parse_args()
    try:
        world = discover()
    except ToolkitError as error:
        sys.exit(f"site_probe: {error}")
    shared = asked.folder / f".site-probe-{asked.token}"
    if world.rank == 0:
        shared.write_text(asked.token)
    report = {
        "rank": world.rank, "size": world.size, "host": world.host, "node": world.node, "nodes": world.nodes,
        "discovered_by": world.discovered_by, "gpus": {"visible": visible_gpus(), "driver": gpus_of_driver()},
        "interfaces": [name for name, at in interface_addresses().items() if not at.startswith("127.")],
        "shared": read_shared(shared), **over_mpi(world),
    }  # fmt: skip
    print(LINE + json.dumps(report), flush=True)
    if world.rank == 0 and not report["mpi"]["error"]:  # all ranks have read it, since they all passed the MPI barrier
        shared.unlink()


def over_mpi(world):
    """Sum the rank numbers over all ranks, read the clock after a barrier, and send from the first node to another."""
    nothing = {"size": 0, "sum": 0, "library": "", "path": "", "error": ""}
    if not world.discovered_by.startswith("MPI"):
        said = f"the launcher started the ranks without MPI: they were discovered by {world.discovered_by}"
        return {"mpi": {**nothing, "error": said}, "clock_s": time.time(), "rate_mb_per_s": 0.0}
    from mpi4py import MPI

    everybody = MPI.COMM_WORLD
    total = everybody.allreduce(world.rank)
    everybody.Barrier()
    clock_s = time.time()
    mpi = {
        **nothing, "size": everybody.Get_size(), "sum": total, "path": library_path(),
        "library": " ".join(MPI.Get_library_version().split(",")[0].split("\n")[0].split()),
    }  # fmt: skip
    return {"mpi": mpi, "clock_s": clock_s, "rate_mb_per_s": rate_between_nodes(everybody, world)}


def rate_between_nodes(everybody, world):
    """Return the MB/s from rank 0 to the first rank on another node; 0 on other ranks, or if there is only one node."""
    nodes = everybody.allgather(world.node)
    other = next((rank for rank, node in enumerate(nodes) if node != nodes[0]), None)
    if other is None or world.rank not in (0, other):
        return 0.0
    peer = other if world.rank == 0 else 0
    message, answer = bytearray(MESSAGE_BYTES), bytearray(1)
    sent, began, more = 0, time.perf_counter(), True
    while more:
        if world.rank == 0:
            answer[0] = more = time.perf_counter() - began < MEASURE_S
            everybody.Send(message, peer)
            everybody.Send(answer, peer)
            everybody.Recv(answer, peer)
        else:
            everybody.Recv(message, peer)
            everybody.Recv(answer, peer)
            more = bool(answer[0])
            everybody.Send(answer, peer)
        sent += len(message)
    return sent / (time.perf_counter() - began) / 1e6 if world.rank == 0 else 0.0


def library_path():
    """Return the path of the MPI library that this process has loaded."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if match := re.search(r"(/\S*/libmpi[^/]*\.so\S*)$", line):
            return match[1]
    return ""


def visible_gpus():
    """Return the number of GPUs that Slurm assigned to this rank, from the first variable that lists them."""
    lists = (os.environ[name] for name in VISIBLE if os.environ.get(name))
    return len(next(lists, "").replace(",", " ").split())


def gpus_of_driver():
    """Return the number of GPUs that the NVIDIA driver reports; None without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError:
        return None


def read_shared(path):
    """Return the contents of the shared file; "" if it does not appear in time."""
    deadline = time.monotonic() + FILE_S
    while time.monotonic() < deadline:
        if path.exists() and (text := path.read_text()):
            return text
        time.sleep(0.2)
    return ""


if __name__ == "__main__":
    main()
