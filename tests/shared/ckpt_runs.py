"""What tests of checkpoints start from: a run with checkpoints, a way to type a command, a disk that is soon full."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from toolkit.checkpoint import Checkpointer
from toolkit.cli.main import main
from toolkit.world.facts import World

ALONE = World(0, 0, 1, 1, 0, 1, "here", "cpu", "none", "alone", attempt=0)
SHARD = "shard-00000-of-00001.h5"
MAIN = "from toolkit.cli.main import main; main()"


def save(run: Path, step: int, tensors: dict[str, Any], state: dict[str, Any] | None = None) -> Path:
    """One more checkpoint of a run; those before it stay."""
    return Checkpointer(run / "checkpoints", ALONE, keep_last=100).save(step, tensors, state or {})


def two_steps(folder: Path) -> Path:
    """A run with the checkpoints of steps 10 and 20, which hold the same."""
    for step in (10, 20):
        tensors = {"model": {"a/[b]": torch.ones(4, 3, dtype=torch.bfloat16)}, "lr": 0.5}
        save(folder / "run", step, tensors, {"loss": 1.5})
    return folder / "run"


def typed(*words: object, unprivileged: bool = False) -> subprocess.CompletedProcess[str]:
    """`toolkit ckpt WORDS`; if `unprivileged`, in a process of its own without the right to ignore file modes."""
    if unprivileged and os.geteuid() == 0:
        # Still root, who may read this checkout wherever it lies, but without the right to pass over modes.
        drop = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
        command = [*drop, sys.executable, "-c", MAIN, "ckpt", *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, check=False)
    argv = ["toolkit", "ckpt", *map(str, words)]
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    with patch.object(sys, "argv", argv), redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as end:
        main()
    said = []
    for stream in (out, err):
        stream.flush()
        said.append(stream.buffer.getvalue().decode())
    return subprocess.CompletedProcess(argv, int(end.value.code or 0), *said)


def flip(path: Path, byte: int) -> None:
    """Change one bit of one byte."""
    content = bytearray(path.read_bytes())
    content[byte] ^= 1
    path.write_bytes(content)


@contextmanager
def disk_of_one_mib(folder: Path) -> Iterator[Path]:
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder]).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
