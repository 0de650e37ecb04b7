"""Train a model whose state is twice the memory limit, with the tier in a file; compare with a run without a limit.

    python benchmarks/offload_limit.py FOLDER [--limit-gb 2.4] [--steps 5]

FOLDER is on the disk to measure. The rank of the limited run gets RLIMIT_DATA and, as root where cgroups are mounted, a
memory cgroup of its own with the same limit, which also counts the page cache. Prints the peaks of the rank's memory
(VmHWM) and of the cgroup, whether all losses are equal to the last bit, also after a resume, and the time of a step as a
ratio of the larger one of two times: that of the run without a limit, and that of the offloaded bytes at the rate that
this disk has with O_DIRECT in the same number of threads. Load of other programs changes all of these.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from toolkit.train.memory.tier import _PIECE_BYTES, _THREADS

# 303 million parameters: 4.8 GB of parameters, gradients and AdamW's state.
SETTINGS = (
    "args.width=1024", "args.layers=24", "args.heads=16", "args.context=128", "args.dropout=0.0", "train.batch=2", "train.clip_norm=0.0",
    'train.recompute="every"', "checkpoint.every_steps=100000",
    'env.vars={MALLOC_MMAP_THRESHOLD_="65536", MALLOC_TRIM_THRESHOLD_="65536", MALLOC_ARENA_MAX="1"}',
)  # fmt: skip
PARAMETERS = 303e6
STATE_GB = PARAMETERS * 16 / 1e9
CGROUPS = (
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.max_usage_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max", "memory.peak"),
)


class Peak(threading.Thread):
    """Reads VmHWM of the rank of a command until that ends."""

    def __init__(self, command: subprocess.Popen[bytes]) -> None:
        super().__init__()
        self._command, self.bytes = command, 0

    def run(self) -> None:
        while self._command.poll() is None:
            for folder in Path("/proc").glob("[0-9]*"):
                try:
                    is_rank = b"toolkit.rank" in (folder / "cmdline").read_bytes()
                    is_ours = is_rank and os.getsid(int(folder.name)) and self._is_below(folder.name)
                    if is_ours:
                        lines = (folder / "status").read_text().splitlines()
                        high = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
                        self.bytes = max(self.bytes, high)
                except (OSError, StopIteration):  # it has ended
                    continue
            time.sleep(0.2)

    def _is_below(self, pid: str) -> bool:
        while pid not in ("0", "1"):
            if int(pid) == self._command.pid:
                return True
            pid = (Path("/proc") / pid / "stat").read_text().rpartition(")")[2].split()[1]
        return False


def cgroup_of(limit: int) -> tuple[Path, str] | None:
    """Make a memory cgroup with this limit; return its folder and the name of the file with its peak."""
    for mount, of_limit, of_peak in CGROUPS:
        folder = mount / f"offload-{os.getpid()}"
        try:
            folder.mkdir()
            (folder / of_limit).write_text(str(limit))
            if (folder / of_peak).exists():
                return folder, of_peak
        except OSError:
            continue
    return None


def train(
    runs: Path, *settings: str, enter: Callable[[], None] | None = None, resume: Path | None = None
) -> tuple[Path, int]:
    """Run the job, or resume it; return its run directory and the rank's VmHWM."""
    toolkit = [str(Path(sys.executable).with_name("toolkit"))]
    start = (
        ["resume", str(resume), "--here"]
        if resume
        else ["run", "train_lm", "--site", "local", "-n", "1", "--runs", str(runs)]
    )
    chosen = [f"--set={one}" for one in (settings if resume else (*SETTINGS, *settings))]
    process = subprocess.Popen(
        [*toolkit, *start, *chosen], preexec_fn=enter, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    peak = Peak(process)
    peak.start()
    printed, _ = process.communicate()
    peak.join()
    if process.returncode:
        sys.exit(printed.decode()[-3000:])
    return resume or max((runs / "train_lm").glob("2*")), peak.bytes


def records_of(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "metrics" / "train.jsonl").read_text().splitlines()]


def rate_of(folder: Path, gb: float = 1.0) -> tuple[float, float]:
    """Return the rates in bytes/s at which this disk reads and writes with O_DIRECT; each is the best of three."""
    path, count = folder / "rate.bin", int(gb * 1e9) // _PIECE_BYTES
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    own = threading.local()

    def buffer() -> mmap.mmap:
        if not hasattr(own, "pages"):
            own.pages = mmap.mmap(-1, _PIECE_BYTES)
            own.pages.write(os.urandom(_PIECE_BYTES))
        return own.pages  # type: ignore[no-any-return]

    def rate(move: Callable[[int], int]) -> float:
        began = time.perf_counter()
        list(pool.map(move, range(count)))
        return count * _PIECE_BYTES / (time.perf_counter() - began)

    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            writes = [rate(lambda n: os.pwritev(descriptor, [buffer()], n * _PIECE_BYTES)) for _ in range(3)]
            reads = [rate(lambda n: os.preadv(descriptor, [buffer()], n * _PIECE_BYTES)) for _ in range(3)]
    finally:
        os.close(descriptor)
        path.unlink()
    return max(reads), max(writes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="on the disk to measure")
    parser.add_argument("--limit-gb", type=float, default=2.4)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    limit, folder = int(options.limit_gb * 1e9), options.folder.resolve()
    read_rate, write_rate = rate_of(folder)
    print(f"disk: {read_rate / 1e9:.2f} GB/s read, {write_rate / 1e9:.2f} GB/s written", flush=True)
    free, high = train(folder / "runs", f"train.steps={options.steps}")
    print(f"without a limit: VmHWM {high / 1e9:.2f} GB", flush=True)
    cgroup = cgroup_of(limit)

    def enter() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        if cgroup is not None:
            (cgroup[0] / "cgroup.procs").write_text(str(os.getpid()))

    offload = ('train.offload=["optimizer", "gradients"]', f"train.offload_to={json.dumps(str(folder))}")
    first = f"train.steps={options.steps - 1}"
    limited, high = train(folder / "runs", first, *offload, enter=enter)
    print(f"limit {limit / 1e9:.2f} GB, state {STATE_GB:.2f} GB: VmHWM {high / 1e9:.2f} GB", flush=True)
    _, high = train(folder / "runs", f"train.steps={options.steps}", enter=enter, resume=limited)
    print(f"resumed: VmHWM {high / 1e9:.2f} GB")
    if cgroup is not None:
        print(
            f"cgroup with page cache: peak {int((cgroup[0] / cgroup[1]).read_text()) / 1e9:.2f} GB of {limit / 1e9:.2f}"
        )
        cgroup[0].rmdir()
    before, after = records_of(free), records_of(limited)
    equal = [one["loss_hex"] == other["loss_hex"] for one, other in zip(before, after, strict=True)]
    print(f"losses equal to the last bit: {sum(equal)} of {len(equal)}, the last one after a resume")
    # The first step has no state to read, and the last one is the first after the resume.
    compute, with_tier = ([one["seconds"] for one in records[1:-1]] for records in (before, after))
    move_s = PARAMETERS * 8 / read_rate + PARAMETERS * 8 / write_rate  # AdamW's state; gradients do not move
    bound = max(min(compute), move_s)  # type: ignore[type-var]
    print(
        f"step: without a limit {min(compute):.1f} s (median {statistics.median(compute):.1f}), bytes at the disk's rate "  # type: ignore[type-var, arg-type]
        f"{move_s:.1f} s, offloaded {min(with_tier):.1f} s (median {statistics.median(with_tier):.1f}): "  # type: ignore[type-var, arg-type]
        f"{min(with_tier) / bound:.2f} times the larger"  # type: ignore[operator, type-var]
    )


if __name__ == "__main__":
    main()
