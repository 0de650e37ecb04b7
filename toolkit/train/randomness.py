"""Seed, save and restore the random number generators of a rank, which toolkit calls streams, by name.

Every rank draws its dropout from its own stream, so a checkpoint contains the streams of each rank.
"""

import hashlib
import random
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toolkit.errors import ToolkitError

__all__ = ["RandomStreams", "seed_rank"]

# Generator types that a job may register as a stream.
Generator = torch.Generator | random.Random | np.random.Generator

GLOBAL_STREAMS = ("cpu", "cuda", "python", "numpy")
_MASK_64 = 2**64 - 1
_TWISTER = struct.Struct("<624II?d")  # Mersenne Twister of Python and numpy: key, position, cached normal variate
_PCG64 = struct.Struct("<QQQQ?I")  # state and increment in 64-bit halves, cached 32 bits


def seed_rank(seed: int, step: int, rank: int) -> None:
    """Seed this rank's global streams (torch, Python, numpy) from seed, step and rank."""
    torch.manual_seed(_derived(seed, step, rank, "cpu"))  # seeds all devices
    random.seed(_derived(seed, step, rank, "python"))
    np.random.seed(_derived(seed, step, rank, "numpy") % 2**32)


def _derived(seed: int, step: int, rank: int, name: str) -> int:
    words = [seed, step, rank] + ([name] if name not in ("cpu", "cuda") else [])
    digest = hashlib.sha256("/".join(map(str, words)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class RandomStreams:
    """Streams of one rank: torch (CPU and the rank's GPU), Python, numpy, and the job's own.

    Args:
        device: the rank's torch device.
        named: the job's own generators: torch.Generator, random.Random, numpy.random.Generator (PCG64).

    Raises:
        ToolkitError: a name is reserved for a global stream, or a generator type is not supported.
    """

    def __init__(self, device: str, named: Mapping[str, Generator] | None = None) -> None:
        self._streams: dict[str, _Stream] = {"cpu": _Stream(torch.get_rng_state, torch.set_rng_state, _seed_cpu)}
        if device.startswith("cuda"):
            self._streams["cuda"] = _Stream(
                partial(torch.cuda.get_rng_state, device),
                partial(torch.cuda.set_rng_state, device=device),
                partial(_seed_gpu, device),
            )
        self._streams["python"] = _stream_of("python", random)
        self._streams["numpy"] = _Stream(_of_numpy, _to_numpy, lambda seed: np.random.seed(seed % 2**32))
        for name, generator in (named or {}).items():
            if name in GLOBAL_STREAMS:
                raise ToolkitError(
                    f"{name!r} is the name of a global random stream", where=f"streams.{name}", fix="rename this stream"
                )
            self._streams[name] = _stream_of(name, generator)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._streams)

    def states(self) -> dict[str, Tensor]:
        """Return the state of each stream, as uint8 tensors on the CPU."""
        return {name: stream.read() for name, stream in self._streams.items()}

    def set_states(self, states: Mapping[str, Tensor]) -> None:
        """Restore `states()` of an earlier attempt; streams that are not in `states` keep their state."""
        for name, state in states.items():
            self._streams[name].write(state)

    def derive(self, names: Iterable[str], seed: int, step: int, rank: int) -> None:
        """Seed these streams from seed, step, rank and name."""
        for name in names:
            self._streams[name].seed(_derived(seed, step, rank, name))


@dataclass(frozen=True)
class _Stream:
    read: Callable[[], Tensor]
    write: Callable[[Tensor], Any]
    seed: Callable[[int], Any]


def _stream_of(name: str, generator: Any) -> _Stream:
    if isinstance(generator, torch.Generator):
        return _Stream(generator.get_state, generator.set_state, generator.manual_seed)
    if generator is random or type(generator) is random.Random:
        return _Stream(partial(_of_python, generator), partial(_to_python, generator), generator.seed)
    if isinstance(generator, np.random.Generator) and type(generator.bit_generator) is np.random.PCG64:
        return _Stream(partial(_of_pcg64, generator), partial(_to_pcg64, generator), partial(_seed_pcg64, generator))
    raise ToolkitError(
        f"toolkit cannot save the state of a {type(generator).__module__}.{type(generator).__qualname__}",
        where=f"streams.{name}",
        fix="use a torch.Generator, a random.Random or numpy.random.default_rng()",
    )


def _seed_cpu(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def _seed_gpu(device: str, seed: int) -> None:
    with torch.cuda.device(device):
        torch.cuda.manual_seed(seed)


def _of_python(generator: Any) -> Tensor:
    _, words, spare = generator.getstate()
    return _tensor(_TWISTER.pack(*words, spare is not None, spare or 0.0))


def _to_python(generator: Any, state: Tensor) -> None:
    *words, has_spare, spare = _TWISTER.unpack(_bytes(state))
    generator.setstate((3, tuple(words), spare if has_spare else None))  # 3 is the version of Python's state format


def _of_numpy() -> Tensor:
    state: Any = np.random.get_state(legacy=False)
    place = state["state"]
    return _tensor(_TWISTER.pack(*place["key"].tolist(), place["pos"], bool(state["has_gauss"]), state["gauss"]))


def _to_numpy(state: Tensor) -> None:
    *words, place, has_spare, spare = _TWISTER.unpack(_bytes(state))
    np.random.set_state(("MT19937", np.array(words, np.uint32), place, int(has_spare), spare))


def _of_pcg64(generator: np.random.Generator) -> Tensor:
    state: Any = generator.bit_generator.state
    numbers = [state["state"]["state"], state["state"]["inc"]]
    halves = [half for number in numbers for half in (number & _MASK_64, number >> 64)]
    return _tensor(_PCG64.pack(*halves, bool(state["has_uint32"]), state["uinteger"]))


def _to_pcg64(generator: np.random.Generator, state: Tensor) -> None:
    low, high, step_low, step_high, has_spare, spare = _PCG64.unpack(_bytes(state))
    generator.bit_generator.state = {
        "bit_generator": "PCG64",
        "state": {"state": high << 64 | low, "inc": step_high << 64 | step_low},
        "has_uint32": int(has_spare),
        "uinteger": spare,
    }


def _seed_pcg64(generator: np.random.Generator, seed: int) -> None:
    generator.bit_generator.state = np.random.PCG64(seed).state


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _bytes(state: Tensor) -> bytes:
    return state.cpu().numpy().tobytes()
