"""Measure the processor time of reading steps from the output of a program that prints 10 MB/s.

    python benchmarks/step_lines_cost.py

A process writes the log as `rank` does, and `StepLines` reads it in a process of its own, whose user and system time is
counted. Prints the share of one CPU: minimum and median of ROUNDS rounds after a warm-up, for a quiet program, too.
"""

import os
import tempfile
import time
from pathlib import Path
from statistics import median

from toolkit.config.presets import presets
from toolkit.rank.step_lines import StepRecords
from toolkit.rundir.layout import RunDirectory

ROUNDS, ROUND_S, RATE = 5, 4.0, 10_000_000
LINES = {
    "nanogpt": "iter {}: loss 2.3456, time 123.45ms, mfu 12.34%\n",
    "hf": "{{'loss': '3.239', 'grad_norm': '1.25', 'learning_rate': '5e-05', 'epoch': '0.{}'}}\n",
}


def write_at(rate: int, line: str, log: Path, seconds: float) -> None:
    """Append lines for some seconds, at a rate in bytes per second."""
    began, number = time.monotonic(), 0
    lines = max(1, rate // 50 // len(line))
    with log.open("a") as stream:
        while time.monotonic() - began < seconds:
            stream.write("".join(line.format(number + one) for one in range(lines)))
            stream.flush()
            number += lines
            time.sleep(max(0.0, began + number * len(line) / rate - time.monotonic()))


def share(name: str, rate: int) -> float:
    """Return the share of a CPU that a reader needs."""
    with tempfile.TemporaryDirectory() as folder:
        attempt = RunDirectory(Path(folder) / "bench-lines").attempt(1)
        attempt.logs.mkdir(parents=True)
        log = attempt.log_file(0)
        log.touch()
        writer = os.fork()
        if not writer:
            write_at(rate, LINES[name], log, ROUND_S + 2)
            os._exit(0)
        records = StepRecords(attempt, log, {"step_line": presets()[name].step_line})
        time.sleep(1)
        records.read()  # the burst of the start
        used, began = time.process_time(), time.monotonic()
        while time.monotonic() - began < ROUND_S:
            time.sleep(0.1)
            records.read()
        used = time.process_time() - used
        elapsed_s = time.monotonic() - began
        os.waitpid(writer, 0)
        return used / elapsed_s


def main() -> None:
    for name in LINES:
        for rate in (RATE, 1000):
            share(name, rate)
            shares = [100 * share(name, rate) for _ in range(ROUNDS)]
            print(
                f"{name:8} {rate / 1e6:8.3f} MB/s: {min(shares):.2f} % of a CPU, median {median(shares):.2f} %",
                flush=True,
            )


if __name__ == "__main__":
    main()
