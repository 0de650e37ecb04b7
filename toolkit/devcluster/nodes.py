"""Simulated nodes: process trees with their own network, host name, PIDs, shared memory, /tmp, /dev/shm and /sys.

The first process of a node is its PID 1. If it is killed, the kernel removes the node's processes, mounts and links.
"""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from toolkit.devcluster.layout import Layout
from toolkit.devcluster.processes import clean_environment, find_processes, kill_and_wait
from toolkit.errors import OwnFailureError

# Runs as PID 1 of the node; $1 is the node's name, $2 its folder, $3 the hosts file, $4 nsswitch.conf, $5 the programs of
# the Slurm release, which replace this machine's: a job need not inherit PATH. The final `wait` also reaps orphans of the
# node, since bash waits for any child; dash would only wait for its own.
FIRST_PROCESS = """
set -e
echo "$1" > /proc/sys/kernel/hostname
mount --bind "$2/tmp" /tmp
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t sysfs sysfs /sys
mount --bind "$3" /etc/hosts
mount --bind "$4" /etc/nsswitch.conf
for program in ${5:+"$5"/*}; do
    for place in "/usr/bin/${program##*/}" "/usr/sbin/${program##*/}"; do
        [ ! -e "$place" ] || mount --bind "$program" "$place"
    done
done
echo ready
exec >/dev/null 2>&1
sleep infinity &
wait
"""
_NAMESPACES = ("--mount", "--uts", "--ipc", "--net", "--pid")


def start_node(layout: Layout, node: str) -> int:
    """Start the node's first process, and return its PID on this host. Raises OwnFailureError if it fails."""
    unshare = ["unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc", "--propagation", "private"]
    files = (str(layout.name_services), layout.read_spec().programs)
    process = subprocess.Popen(
        [*unshare, "bash", "-c", FIRST_PROCESS, "node", *_arguments(layout, node), *files],
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        cwd="/",
    )
    assert process.stdout is not None
    first_line = process.stdout.readline().strip()
    process.stdout.close()
    first = first_process(layout, node)
    if first_line != "ready" or first is None:
        process.kill()
        raise OwnFailureError(f"{node} did not start: {first_line or 'no output'}", where=str(layout.folder))
    return first


def first_process(layout: Layout, node: str) -> int | None:
    """Return the PID of the node's first process on this host; None if the node is not running."""
    pids = find_processes("bash", *_arguments(layout, node))
    return pids[0] if pids else None


def _arguments(layout: Layout, node: str) -> tuple[str, ...]:
    """Return the arguments that identify the first process of a node."""
    return (node, str(layout.node_folder(node)), str(layout.hosts))


def stop_nodes(layout: Layout, nodes: Sequence[str]) -> None:
    """Kill nodes with everything that runs in them, and the nsenter processes outside that wait for children inside.

    nsenter stops itself when its child is stopped, and would then not notice that the node has been killed.
    """
    firsts = [pid for node in nodes if (pid := first_process(layout, node)) is not None]
    waiting = [pid for first in firsts for pid in find_processes("nsenter", _target(first))]
    kill_and_wait(firsts)
    kill_and_wait(waiting)
    kill_and_wait([pid for node in nodes for pid in find_processes("unshare", str(layout.node_folder(node)))])


def enter_command(first: int, argv: Sequence[str], *, directory: Path | None = None) -> list[str]:
    """Return the command that runs `argv` inside the node whose first process is `first`."""
    inside = ["nsenter", _target(first), *_NAMESPACES]
    if directory is not None:
        inside.append(f"--wdns={directory}")
    return [*inside, "--", *argv]


def _target(first: int) -> str:
    return f"--target={first}"


def process_in_node(layout: Layout, node: str, program: str) -> int | None:
    """PID on this host of the oldest process named `program` inside `node`; None if there is none."""
    first = first_process(layout, node)
    if first is None:
        return None
    home = Path(f"/proc/{first}/ns/pid").readlink()
    for pid in find_processes(program):
        try:
            if Path(f"/proc/{pid}/ns/pid").readlink() == home:
                return pid
        except FileNotFoundError:  # the process has exited meanwhile
            continue
    return None
