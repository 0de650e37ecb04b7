"""Keep a process for each of `observe.trackers`, which sends the metrics of the run (`toolkit.trackers`)."""

import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from toolkit.rundir.layout import RunDirectory
from toolkit.supervise.log import say
from toolkit.supervise.parent_death import die_with_parent

__all__ = ["GIVES_UP", "Trackers"]

PAUSE_S = (10.0, 600.0)  # the first and the longest pause before a process that ended is started again
END_S = 5.0  # to send the last metrics, for all trackers together
GIVES_UP = 3  # exit code of a process that a further start would not help


@dataclass
class Trackers:
    """The processes of one start. The run never waits for them, except `END_S` at its end."""

    run: RunDirectory
    start: int
    names: list[str]
    _processes: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    _over: threading.Event = field(default_factory=threading.Event)
    _is_started: bool = False

    def begin(self, environment: Mapping[str, str]) -> None:
        """Start the processes with an environment; later calls have no effect."""
        if self._is_started:
            return
        self._is_started = True
        for name in self.names:
            threading.Thread(target=self._keep, args=(name, dict(environment)), name=name, daemon=True).start()

    def _keep(self, name: str, environment: dict[str, str]) -> None:
        pause_s = PAUSE_S[0]
        command = [sys.executable, "-P", "-m", "toolkit.trackers", name, str(self.run.path), str(self.start)]
        while not self._over.is_set():
            try:
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, text=True, env=environment, preexec_fn=die_with_parent
                )  # fmt: skip
            except OSError as error:
                say(f"cannot start {name}: {error.strerror}")
                return
            self._processes[name] = process
            if process.wait() == GIVES_UP or self._over.is_set():
                return
            say(
                f"the process of {name} ended with exit code {process.returncode}; starting it again in {pause_s:.0f} s"
            )
            self._over.wait(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S[1])

    def end(self, state: str) -> None:
        """Pass the state of the run, and give the processes `END_S` to send the rest; "" if the run continues, which waits for none."""
        self._over.set()
        deadline = time.monotonic() + END_S
        processes = dict(self._processes)
        for process in processes.values():
            with suppress(OSError):  # it has exited
                process.stdin.write(state)  # type: ignore[union-attr]
                process.stdin.close()  # type: ignore[union-attr]
        for name, process in processes.items() if state else ():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                say(f"{name} did not accept the last metrics within {END_S:.0f} s; `{self._command(name)}` sends them")

    def _command(self, name: str) -> str:
        # The package of wandb keeps rows in files of its own until its server has them.
        is_wandb = name == "wandb"
        return (
            f"wandb sync {self.run.trackers}/wandb/wandb/*run-*"
            if is_wandb
            else f"toolkit metrics send {self.run.run_id}"
        )
