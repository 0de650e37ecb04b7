"""Make one rank of a real run of two ranks slow, leaking or diverging, and print which verdict names it after how long.

python benchmarks/real_faults.py [--only stopped work ...]

Each fault doubles the work of rank 1, from outside (SIGSTOP, a busy process on its processor) or in its program (more work,
slow data), and a verdict must name the right rank and cause within 120 s. `leak` and `nan` are faults of memory and loss. One
fault takes two to five minutes; the machine needs two processors that other programs leave idle.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from toolkit.metrics.verdicts import Verdict, line_of_verdict, read_verdicts

TOOLKIT = [sys.executable, "-c", "from toolkit.cli.main import main; main()"]
CLEAN_S = 45.0
PROGRAM = """
import math, os, time
from pathlib import Path

import torch
import torch.distributed as dist

import toolkit

dist.init_process_group("gloo")
rank, kept, fault = dist.get_rank(), [], ""
os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % 2]})
value = torch.ones(1)


def work(seconds):  # the same amount of work in each step, whatever the processor does
    for _ in range(int(seconds * RATE)):
        math.sqrt(2.0)


RATE = 1e6
began = time.thread_time()
work(1.0)
rate = torch.tensor([1e6 / (time.thread_time() - began)], dtype=torch.float64)
dist.broadcast(rate, 0)  # the same work on both ranks
RATE = float(rate)
for number in range(10**9):
    if rank == 1 and number % 10 == 0 and Path("fault").exists():
        fault = Path("fault").read_text()
    began = time.monotonic()
    time.sleep(0.05 if fault == "data" else 0.002)
    toolkit.record("data_s", time.monotonic() - began)
    work(0.1 if fault == "work" else 0.05)
    if fault == "leak":
        kept.append(bytearray(os.urandom(1) * 6_000_000))
    began = time.monotonic()
    dist.all_reduce(value.fill_(1.0))
    toolkit.record("exposed_s", time.monotonic() - began)
    toolkit.record("loss", math.nan if fault == "nan" else 2.0 + 0.01 * math.sin(number))
    toolkit.step(number)
"""


@dataclass(frozen=True)
class Fault:
    """A fault: the verdicts that name it, and what causes it from outside until the returned function is called."""

    kinds: tuple[str, ...]
    causes: tuple[str, ...]
    begin: Callable[[Path, int], Callable[[], None]]
    limit_s: float = 120.0


def in_program(name: str) -> Callable[[Path, int], Callable[[], None]]:
    def begin(folder: Path, pid: int) -> Callable[[], None]:
        (folder / "draft").write_text(name)
        (folder / "draft").rename(folder / "fault")
        return lambda: None

    return begin


def stopped(folder: Path, pid: int) -> Callable[[], None]:
    """Stop rank 1 for as long as it runs."""
    program = (
        f"import os, time\nwhile True:\n  os.kill({pid}, 19); time.sleep(.05); os.kill({pid}, 18); time.sleep(.05)"
    )
    process = subprocess.Popen([sys.executable, "-c", program])

    def end() -> None:
        process.kill()
        process.wait()
        os.kill(pid, signal.SIGCONT)

    return end


def neighbour(folder: Path, pid: int) -> Callable[[], None]:
    """Use the processor of rank 1."""
    cpus = os.sched_getaffinity(pid)
    process = subprocess.Popen(
        [sys.executable, "-c", "while True: pass"], preexec_fn=lambda: os.sched_setaffinity(0, cpus)
    )
    return process.kill


FAULTS = {
    "stopped": Fault(("straggler",), ("paused",), stopped),
    "work": Fault(("straggler",), ("own_work",), in_program("work")),
    "neighbour": Fault(("straggler",), ("neighbours",), neighbour),
    "data": Fault(("straggler",), ("data",), in_program("data")),
    "leak": Fault(("memory_leak",), ("growth",), in_program("leak"), 300.0),
    "nan": Fault(("loss_not_finite",), ("",), in_program("nan")),
}


def verdicts_of(run: Path) -> list[Verdict]:
    path = run / "metrics" / "verdicts.jsonl"
    return read_verdicts(path) if path.exists() else []


def run_of(folder: Path) -> Path:
    """Return the directory of the run, once both ranks have made steps."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        found = list(folder.glob("runs/work/2*"))
        if found and list(found[0].glob("attempts/000/windows/rank-*.bin")):
            return found[0]
        time.sleep(0.5)
    sys.exit(f"expected windows of a run in {folder}")


def measure(name: str, fault: Fault, folder: Path) -> dict[str, object]:
    """Run the program, begin the fault after `CLEAN_S`, and return the first verdict that names it."""
    (folder / "work.py").write_text(PROGRAM)
    (folder / "work.toml").write_text('[job]\nentry = "work.py"\nranks_per_node = 2\n')
    (folder / "here.toml").write_text('name = "here"\n[scheduler]\nkind = "local"\n[launcher]\nkind = "local"\n')
    variables = os.environ | {"OMP_NUM_THREADS": "1", "TOOLKIT_INDEX": str(folder / "index")}
    command = [*TOOLKIT, "run", "work.toml", "--site", "./here.toml", "--runs", "runs", "-t", "15"]
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, env=variables, stdout=output, stderr=output)
        end = None
        try:
            run = run_of(folder)
            time.sleep(CLEAN_S)
            before = len(verdicts_of(run))
            guard = json.loads((run / "attempts" / "000" / "ranks" / "rank-00001.json").read_text())["pid"]
            (child,) = Path(f"/proc/{guard}/task/{guard}/children").read_text().split()
            began = time.monotonic()
            end = fault.begin(folder, int(child))
            found = None
            while found is None and time.monotonic() < began + 2 * fault.limit_s:
                time.sleep(1)
                new = verdicts_of(run)[before:]
                found = next((one for one in new if one.kind in fault.kinds and one.state == "raised"), None)
            delay_s = time.monotonic() - began
        finally:
            if end is not None:
                end()
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGINT)
            process.wait(60)
    others = [line_of_verdict(one) for one in verdicts_of(run) if one.kind not in fault.kinds and one.state == "raised"]
    result = {"fault": name, "load": os.getloadavg()[0], "other_verdicts": others}
    if found is None:
        return result | {"passed": False, "why": f"no {fault.kinds} within {2 * fault.limit_s:.0f} s"}
    is_right = found.ranks == (1,) and found.cause in fault.causes
    return result | {
        "passed": is_right and delay_s <= fault.limit_s, "delay_s": round(delay_s, 1), "ranks": found.ranks,
        "cause": found.cause, "message": line_of_verdict(found), "evidence": found.evidence,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*FAULTS], default=[*FAULTS])
    failed = 0
    for name in parser.parse_args().only:
        folder = Path(tempfile.mkdtemp(prefix="faults-", dir=Path.home()))
        try:
            result = measure(name, FAULTS[name], folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        failed += not result["passed"]
        print(json.dumps(result), flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
