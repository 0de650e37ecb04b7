"""Disturb real runs of four ranks on two nodes of a dev cluster, and print which verdict names the fault after how long.

    toolkit devcluster up --nodes 2; export SLURM_CONF=...
    python benchmarks/real_faults.py [--only stopped work ...] [--clean SECONDS] [--minutes 10] [--load 2]

Each fault begins after some clean steps, in rank 3 on node2 or, for `link` and `disk`, in its environment. A verdict must name
the right ranks, node and cause; all other raised verdicts are printed, too. The four ranks share the processors of this
machine, so the stopped rank is one of four on two of them. `nothing` runs for `--minutes` beside `--load` busy processes, and
passes if no verdict blames a rank, the work, the data, the network, memory or the loss.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from toolkit.metrics.verdicts import Verdict, line_of_verdict, read_verdicts

TOOLKIT = [sys.executable, "-c", "from toolkit.cli.main import main; main()"]
FAULTY = 3
PROGRAM = """
import math, os, subprocess, sys, time
from pathlib import Path

import torch
import torch.distributed as dist

import toolkit

FAULTY = 3
dist.init_process_group("gloo")
rank, kept, fault, other = dist.get_rank(), [], "", None
cpus = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, {cpus[rank % len(cpus)]})
value, RATE = torch.ones(250_000), 1e6


def work(seconds):  # the same amount of work in each step, whatever the processor does
    for _ in range(int(seconds * RATE)):
        math.sqrt(2.0)


def next_batch():
    began = time.monotonic()
    while fault == "stuck":
        time.sleep(0.2)
    time.sleep(0.05 if fault == "data" else 0.002)
    toolkit.record("data_s", time.monotonic() - began)


def reduce_loss():
    if fault == "mismatched":
        dist.barrier()
    began = time.monotonic()
    dist.all_reduce(value.fill_(1.0))
    toolkit.record("exposed_s", time.monotonic() - began)


STOP = "import os, time\\nwhile True:\\n  os.kill({0}, 19); time.sleep(.05); os.kill({0}, 18); time.sleep(.05)"
began = time.thread_time()
work(1.0)
rate = torch.tensor([1e6 / (time.thread_time() - began)], dtype=torch.float64)
dist.broadcast(rate, 0)  # the same work on all ranks
RATE = float(rate)
grown_at = time.monotonic()
for number in range(10**9):
    if rank == FAULTY and not fault and Path("fault").exists():
        fault, grown_at = Path("fault").read_text(), time.monotonic()
        if fault == "stopped":
            other = subprocess.Popen([sys.executable, "-c", STOP.format(os.getpid())])
        Path("first").write_text(str(number))
    next_batch()
    work(0.04 if fault == "work" else 0.02)
    if fault == "asleep":
        time.sleep(0.04)
    if fault == "leak" and time.monotonic() > grown_at + 1:
        kept.append(bytearray(os.urandom(1) * 6_000_000))
        grown_at += 1
    is_bad = torch.tensor([float(fault == "nan")])
    toolkit.record("loss", math.nan if fault == "nan" or kept == [math.nan] else 2.0 + 0.01 * math.sin(number))
    reduce_loss()
    dist.all_reduce(is_bad)  # as the exchange of gradients does
    if float(is_bad):
        kept = [math.nan]
    toolkit.step(number)
"""


@dataclass(frozen=True)
class Fault:
    """A fault, and what a verdict must say of it. `begin` causes it from outside of the ranks."""

    kinds: tuple[str, ...]
    causes: tuple[str, ...]
    ranks: tuple[int, ...] = (FAULTY,)
    host: str = "node2"
    says: str = ""
    begin: Callable[[Path], None] | None = None
    limit_s: float = 240.0
    is_killed: bool = False  # whether Slurm kills the job for its memory, and the end must name the node


def slow_link(folder: Path) -> None:
    devcluster("shape", "node2", "20mbit")


def fill(folder: Path) -> None:
    with (folder / "runs" / "ballast").open("wb", buffering=0) as stream:
        try:
            while stream.write(bytes(1 << 16)):
                pass
        except OSError:
            return


FAULTS = {
    "work": Fault(("straggler",), ("own_work",)),
    "asleep": Fault(("straggler",), ("paused",)),
    "stopped": Fault(("straggler",), ("paused",)),
    "data": Fault(("straggler",), ("data",)),
    "stuck": Fault(("stall",), ("other_place", "late"), says="next_batch (work.py:"),
    "mismatched": Fault(("stall",), ("differs",), says="barrier"),
    "nan": Fault(("loss_not_finite",), ("",)),
    "leak": Fault(("memory_leak",), ("growth",), limit_s=400.0, is_killed=True),
    "link": Fault(("slow_link",), ("network",), ranks=(), host="", begin=slow_link),
    "disk": Fault(("disk_pressure",), ("full",), ranks=(), host="", begin=fill),
    "nothing": Fault((), ()),
}
# Verdicts that are right beside other load: processors are shared, and steps become slower when the load rises.
TRUE_BESIDE_LOAD = ("cpu_contention", "throughput_drop")


def devcluster(*argv: str) -> None:
    """Run `toolkit devcluster` on the cluster of SLURM_CONF."""
    folder = Path(os.environ["SLURM_CONF"]).parents[1]
    subprocess.run(
        [*TOOLKIT, "devcluster", "--name", folder.name, "--folder", str(folder), *argv], check=True, capture_output=True
    )


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Put the runs on a file system of 64 MB that this machine and the nodes mount."""
    image, runs = folder / "image", folder / "runs"
    runs.mkdir()
    with image.open("wb") as stream:
        stream.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True)
    device = subprocess.run(
        ["losetup", "--find", "--show", image], check=True, capture_output=True, text=True
    ).stdout.strip()
    mount = ["mount", device, str(runs)]
    subprocess.run(mount, check=True)
    for node in ("node1", "node2"):
        devcluster("exec", node, *mount)
    try:
        yield
    finally:
        for node in ("node1", "node2"):
            devcluster("exec", node, "umount", "--lazy", str(runs))
        subprocess.run(["umount", "--lazy", runs], check=True)
        subprocess.run(["losetup", "--detach", device], check=True)


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Use the processors of this machine half of the time."""
    program = "import time\nwhile True:\n  end = time.monotonic() + .5\n  while time.monotonic() < end: pass\n  time.sleep(.5)"
    running = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def verdicts_of(run: Path) -> list[Verdict]:
    path = run / "metrics" / "verdicts.jsonl"
    return read_verdicts(path) if path.exists() else []


def until(condition: Callable[[], object], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not (met := bool(condition())) and time.monotonic() < deadline:
        time.sleep(1)
    return met


def start(folder: Path, clean_s: float) -> Path:
    """Submit the program, and return the directory of its run after some clean steps."""
    (folder / "work.py").write_text(PROGRAM)
    (folder / "work.toml").write_text(
        '[job]\nentry = "work.py"\nnodes = 2\nranks_per_node = 2\nmem_gb_per_node = 2\ntime = "0:30:00"\n[restart]\ncrashes = 0\n'
        '[env]\nvars = { OMP_NUM_THREADS = "1", TORCH_FR_BUFFER_SIZE = "200" }\n'
    )
    (folder / "here.toml").write_text(
        f'name = "here"\nextends = "devcluster"\n[scheduler]\nconf = "{os.environ["SLURM_CONF"]}"\n'
    )
    command = [*TOOLKIT, "submit", "work.toml", "--site", "./here.toml", "--runs", "runs", "--parsable"]
    done = subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    run = folder / "runs" / "work" / done.stdout.strip().partition(";")[2]
    if not until(lambda: len(list(run.glob("attempts/000/windows/rank-*.bin"))) == 2, 180):
        sys.exit(f"expected windows of both nodes in {run}")
    time.sleep(clean_s)
    return run


def environment(folder: Path) -> dict[str, str]:
    return os.environ | {"TOOLKIT_INDEX": str(folder / "index")}


def measure(name: str, fault: Fault, folder: Path, options: argparse.Namespace) -> dict[str, object]:
    """Begin the fault in a run, and return the first verdict that is raised for it."""
    run = start(folder, options.clean)
    began, before, found = time.monotonic(), len(verdicts_of(run)), None
    try:
        if name == "nothing":
            time.sleep(60 * options.minutes)
        elif fault.begin is not None:
            fault.begin(folder)
        else:
            (folder / "draft").write_text(name)
            (folder / "draft").rename(folder / "fault")
        while fault.kinds and found is None and time.monotonic() < began + 1.5 * fault.limit_s:
            time.sleep(1)
            shown = verdicts_of(run)[before:] if name != "disk" else seen_by_login(run, folder)
            found = next((one for one in shown if one.kind in fault.kinds and one.state == "raised"), None)
        delay_s = time.monotonic() - began
        host = end_host(run) if fault.is_killed and found is not None else fault.host
    finally:
        subprocess.run(
            [*TOOLKIT, "cancel", run.name, "--runs", "runs"],
            cwd=folder,
            env=environment(folder),
            capture_output=True,
            check=False,
        )
        if fault.begin is slow_link:
            devcluster("shape", "node2", "none")
        elif fault.begin is fill:
            (folder / "runs" / "ballast").unlink(missing_ok=True)
        until(lambda: not subprocess.run(["squeue", "-h"], capture_output=True, check=True).stdout, 90)
    others = [one for one in verdicts_of(run) if one.kind not in fault.kinds and one.state == "raised"]
    result = {"fault": name, "load": round(os.getloadavg()[0], 1), "other_verdicts": list(map(line_of_verdict, others))}
    if name == "nothing":
        return result | {"passed": all(one.kind in TRUE_BESIDE_LOAD for one in others), "minutes": options.minutes}
    if found is None:
        return result | {"passed": False, "why": f"no {fault.kinds} within {1.5 * fault.limit_s:.0f} s"}
    is_right = (
        (found.ranks, found.host) == (fault.ranks, fault.host)
        and found.cause in fault.causes
        and fault.says in found.message
    )
    if name == "nan":
        is_right &= found.first_step == int((folder / "first").read_text())
    return result | {
        "passed": is_right and host == fault.host and delay_s <= fault.limit_s, "delay_s": round(delay_s, 1), "ranks": found.ranks,
        "host": found.host, "end_host": host, "cause": found.cause, "message": line_of_verdict(found),
    }  # fmt: skip


def seen_by_login(run: Path, folder: Path) -> list[Verdict]:
    """Return the verdicts that `toolkit verdict` shows: a full file system has no space for its line."""
    command = [*TOOLKIT, "verdict", run.name, "--runs", "runs", "--json"]
    done = subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True, check=True)
    return [Verdict.from_line(json.dumps(row)) for row in json.loads(done.stdout)]


def end_host(run: Path) -> str:
    """Return the node that the end of the attempt names, once Slurm has killed the job."""
    end = run / "attempts" / "000" / "exit.json"
    until(end.exists, 400)
    return str(json.loads(end.read_text())["host"]) if end.exists() else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*FAULTS], default=[name for name in FAULTS if name != "nothing"])
    parser.add_argument("--clean", type=float, default=60, help="seconds of clean steps before the fault")
    parser.add_argument("--minutes", type=float, default=10, help="length of a run without a fault")
    parser.add_argument("--load", type=int, default=2, help="busy processes beside a run without a fault")
    parser.add_argument("--folder", type=Path, default=Path.home(), help="folder for the runs, which the nodes share")
    options = parser.parse_args()
    failed = 0
    for name in options.only:
        folder = Path(tempfile.mkdtemp(prefix="faults-", dir=options.folder))
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            if name == "disk":
                stack.enter_context(small_disk(folder))
            if name == "nothing":
                stack.enter_context(busy(options.load))
            result = measure(name, FAULTS[name], folder, options)
        failed += not result["passed"]
        print(json.dumps(result), flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
