"""Find the version of the NCCL library that torch uses, without importing torch into this process."""

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.topology.nccl.variables import Version, parse_version

__all__ = ["find_nccl"]

PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
LIBRARY = re.compile(r"libnccl\.so\.([0-9]+\.[0-9]+\.[0-9]+)")
SYSTEM_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/local/lib", "/usr/lib")
TORCH_TIMEOUT_S = 60.0  # importing torch from a busy shared file system can take this long
_ASK_TORCH = "import torch; print('nccl', *torch.cuda.nccl.version())"


def find_nccl(
    environ: Mapping[str, str], folders: Sequence[str] = SYSTEM_FOLDERS, timeout_s: float = TORCH_TIMEOUT_S
) -> tuple[Version | None, str]:
    """Return (version, where it was found), or (None, why it is unknown)."""
    # A preloaded library takes precedence over the one in the pip package, which torch uses otherwise.
    preload = [path for path in re.split(r"[:\s]", environ.get("LD_PRELOAD", "")) if "libnccl" in path]
    for path in preload:
        if version := _of_library(Path(os.path.realpath(path))):
            return version, f"LD_PRELOAD={path}"
    for package in PACKAGES:
        try:
            return parse_version(importlib.metadata.version(package), package), f"package {package}"
        except (importlib.metadata.PackageNotFoundError, ToolkitError):
            continue
    if (version := _version_of_torch(timeout_s)) is not None:
        return version, "torch.cuda.nccl.version()"
    for folder in [*environ.get("LD_LIBRARY_PATH", "").split(":"), *folders]:
        for path in sorted(Path(folder).glob("libnccl.so.*")) if folder else ():
            if version := _of_library(path):
                return version, str(path)
    return None, "no NCCL found on this machine"


def _of_library(path: Path) -> Version | None:
    match = LIBRARY.fullmatch(path.name)
    return parse_version(match[1], str(path)) if match else None


def _version_of_torch(timeout_s: float) -> Version | None:
    """Return the version that torch reports in a separate process; None without torch or without CUDA."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    # Skip the import, which takes seconds, for CPU builds of torch: they contain no NCCL.
    if not any(Path(place, "lib", "libtorch_cuda.so").exists() for place in spec.submodule_search_locations):
        return None
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"^nccl ([0-9]+) ([0-9]+) ([0-9]+)", done.stdout, re.MULTILINE)
    return tuple(int(part) for part in match.groups()) if match else None
