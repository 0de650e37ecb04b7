"""torch.compile for the blocks of a model, and the memory format of convolutions."""

import os
import shutil
import socket
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from toolkit.errors import ToolkitError
from toolkit.train.blocks import needed_blocks

_FORMATS = {
    nn.Conv2d: torch.channels_last,
    nn.ConvTranspose2d: torch.channels_last,
    nn.Conv3d: torch.channels_last_3d,
    nn.ConvTranspose3d: torch.channels_last_3d,
}


def compile_blocks(model: nn.Module, below: Sequence[str] = (), **settings: Any) -> list[str]:
    """Compile each block in place; return their names. Blocks of one class share one compilation.

    Compiling blocks instead of the model ("regional compilation" in torch's tutorials) makes compile time independent
    of the depth, and leaves hooks of DDP and FSDP2 between blocks intact. No module is wrapped, so checkpoint names do
    not change.

    Args:
        below: parents of the blocks, if `blocks_of` does not find them.
        settings: arguments of torch.compile, such as `mode`, `dynamic` or `backend`.

    Raises:
        ToolkitError: the model has no blocks.
    """
    blocks = needed_blocks(model, "train.compile", below)
    for block in blocks.values():
        block.compile(**settings)
    return list(blocks)


def check_compiler(device: str) -> None:
    """Check that this machine has the compiler that torch.compile requires: C++ for CPUs, C for GPU kernel launchers.

    Raises:
        ToolkitError: the compiler or Python's header is missing.
    """
    variable, usual = ("CC", ("gcc", "clang")) if torch.device(device).type == "cuda" else ("CXX", ("g++",))
    wanted = (os.environ[variable],) if os.environ.get(variable) else usual
    leave_out = "or set train.compile = false"
    if not any(shutil.which(name) for name in wanted):
        raise ToolkitError(
            f"torch.compile requires a compiler, but {socket.gethostname()} has no {' or '.join(wanted)}",
            where="train.compile",
            fix=f"load the site's compiler with [env] modules, install one (Debian: apt-get install g++), set "
            f"{variable} to one with [env] vars, {leave_out}",
        )
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        raise ToolkitError(
            f"torch.compile builds Python extension modules, but {socket.gethostname()} has no {header}",
            where="train.compile",
            fix=f"install the Python headers (Debian: apt-get install python3-dev), {leave_out}",
        )


def use_channels_last(model: nn.Module) -> nn.Module:
    """Convert the weights of convolutions to channels_last, in place; their inputs and outputs adopt this format.

    Call it before creating the optimizer, whose state has the layout of the weights. Values and names do not change.

    Raises:
        ToolkitError: the model has no 2-D or 3-D convolution.
    """
    convolutions = [module for module in model.modules() if isinstance(module, tuple(_FORMATS))]
    if not convolutions:
        raise ToolkitError(
            f"{type(model).__name__} has no 2-D or 3-D convolution",
            where="train.channels_last",
            fix="set train.channels_last to false",
        )
    for module in convolutions:
        layout = next(layout for kind, layout in _FORMATS.items() if isinstance(module, kind))
        module.to(memory_format=layout)  # type: ignore[call-overload]
    return model
