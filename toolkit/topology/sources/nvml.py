"""GPUs, their links and their NVLink fabric, from NVML: the library that NVIDIA's driver brings.

The functions are those of nvidia-ml-py (`import pynvml`); what an older driver lacks, or a kind of GPU cannot tell, is a
reason, not an error. A driver that hangs is given up on after a while.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from ctypes import byref
from functools import partial
from typing import Any

from toolkit.topology.claims import Answer
from toolkit.topology.facts import NO_FABRIC
from toolkit.topology.sources.commands import COMMAND_TIMEOUT_S

SOURCE = "NVML"
TELLS = (("gpu_count",), ("GPU",), ("link",))
# nvmlGpuTopologyLevel_t, in the words of nvidia-smi. INTERNAL is two GPUs of one board behind one switch.
_LEVELS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
_WORDS_OF_NODES = 16  # of 64 bits each: more NUMA nodes than Linux allows


def ask_nvml(library: Any = None, timeout_s: float = COMMAND_TIMEOUT_S) -> Answer:
    """Claim what NVML says; `library` is the module of nvidia-ml-py, imported when None."""
    if library is None:
        try:
            import pynvml

            library = pynvml
        except ImportError:
            answer = Answer(SOURCE, "direct", TELLS)
            answer.miss("NVML: nvidia-ml-py is not installed")
            return answer
    found: list[Answer] = []
    # The driver may hang in the kernel, where nothing can end it; a thread that nobody waits for harms nobody.
    asking = threading.Thread(target=lambda: found.append(_ask(library)), name="NVML", daemon=True)
    asking.start()
    asking.join(timeout_s)
    if found:
        return found[0]
    answer = Answer(SOURCE, "direct", TELLS)
    answer.miss(f"NVML gave no answer in {timeout_s:g} s")
    return answer


def _ask(nvml: Any) -> Answer:
    answer = Answer(SOURCE, "direct", TELLS)
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        answer.miss(f"NVML: {error}")
        return answer
    try:
        _Asking(nvml, answer).all()
    except nvml.NVMLError as error:
        answer.miss(f"NVML: {error}")
    finally:
        nvml.nvmlShutdown()
    return answer


class _Asking:
    """One conversation with the library."""

    def __init__(self, nvml: Any, answer: Answer) -> None:
        self.nvml = nvml
        self.answer = answer

    def all(self) -> None:
        count = int(self.nvml.nvmlDeviceGetCount())
        self.answer.say(count, "gpu_count")
        handles = {}
        for index in range(count):
            self.answer.claims["GPU", index] = True
            try:
                handles[index] = self.nvml.nvmlDeviceGetHandleByIndex(index)
            except self.nvml.NVMLError as error:  # a GPU that has fallen off the bus
                self.answer.miss(f"NVML: {error}", "GPU", index)
                self.answer.warnings.append(f"NVML: GPU{index}: {error}")
        for index, handle in handles.items():
            self._gpu(index, handle)
        self._links(handles)

    def _try(self, ask: Callable[[], Any], *about: Any) -> Any:
        """The answer of one function, which is claimed; None, and the reason, where there is none."""
        try:
            value = ask()
        # AttributeError: an nvidia-ml-py that is older than the function.
        except (self.nvml.NVMLError, AttributeError) as error:
            self.answer.miss(f"NVML: {error}", *about)
            return None
        self.answer.say(value, *about)
        return value

    def _gpu(self, index: int, handle: Any) -> None:
        nvml, about = self.nvml, ("GPU", index)
        self._try(lambda: _text(nvml.nvmlDeviceGetName(handle)), *about, "name")
        self._try(lambda: _text(nvml.nvmlDeviceGetUUID(handle)), *about, "uuid")
        self._try(lambda: pci_address(_text(nvml.nvmlDeviceGetPciInfo(handle).busId)), *about, "bus")
        self._try(lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).total), *about, "memory_bytes")
        self._try(lambda: self._mig(handle), *about, "mig")
        self._try(lambda: self._numa_node(handle), *about, "numa_node")
        if (*about, "numa_node") not in self.answer.claims:
            self.answer.reasons.setdefault((*about, "numa_node"), "NVML: not next to one NUMA node alone")
        fabric = self._try(lambda: self._fabric(handle), *about, "fabric")
        if fabric is None:
            self.answer.reasons.setdefault((*about, "fabric"), "NVML: the GPU has not joined its fabric yet")

    def _mig(self, handle: Any) -> bool:
        try:
            return bool(self.nvml.nvmlDeviceGetMigMode(handle)[0])
        except self.nvml.NVMLError as error:
            if error.value == self.nvml.NVML_ERROR_NOT_SUPPORTED:
                return False  # said of a GPU that has no such mode
            raise

    def _numa_node(self, handle: Any) -> int | None:
        words = self.nvml.nvmlDeviceGetMemoryAffinity(handle, _WORDS_OF_NODES, self.nvml.NVML_AFFINITY_SCOPE_NODE)
        near = [64 * place + bit for place, word in enumerate(words) for bit in range(64) if int(word) >> bit & 1]
        return near[0] if len(near) == 1 else None

    def _fabric(self, handle: Any) -> str | None:
        """The cluster's UUID and the clique's number, as `nvidia-smi -q` writes them; None while it is starting."""
        nvml = self.nvml
        try:
            info = nvml.c_nvmlGpuFabricInfoV_t()
            nvml.nvmlDeviceGetGpuFabricInfoV(handle, byref(info))
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_NOT_SUPPORTED:
                return NO_FABRIC
            info = nvml.c_nvmlGpuFabricInfo_t()  # a driver before 550
            nvml.nvmlDeviceGetGpuFabricInfo(handle, byref(info))
        if info.state == nvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED:
            return NO_FABRIC
        if info.state != nvml.NVML_GPU_FABRIC_STATE_COMPLETED or info.status:
            return None
        cluster = bytes(info.clusterUuid).hex()
        # One box with switches of its own reports a fabric of zeros, which is no other box's.
        return f"{cluster}.{info.cliqueId}" if int(cluster, 16) else NO_FABRIC

    def _links(self, handles: dict[int, Any]) -> None:
        ends = {index: self._nvlinks(index, handle) for index, handle in handles.items()}
        buses = {index: self.answer.claims.get(("GPU", index, "bus")) for index in handles}
        for one in handles:
            for other in (index for index in handles if index > one):
                about = ("link", f"GPU{one}", f"GPU{other}")
                mine, theirs = ends[one], ends[other]
                if mine is None or theirs is None:
                    silent = one if mine is None else other
                    self.answer.miss(f"NVML does not tell where the NVLinks of GPU{silent} end", *about)
                    continue
                count = mine.count(buses[other]) or min(mine.count(_SWITCH), theirs.count(_SWITCH))
                if count:
                    self.answer.say(f"NV{count}", *about)
                else:
                    self._try(partial(self._level, handles[one], handles[other]), *about)

    def _level(self, one: Any, other: Any) -> str | None:
        return _LEVELS.get(int(self.nvml.nvmlDeviceGetTopologyCommonAncestor(one, other)))

    def _nvlinks(self, index: int, handle: Any) -> list[str | None] | None:
        """Where each active NVLink of a GPU ends: at a PCI address, or at a switch; None where NVML does not tell."""
        nvml = self.nvml
        ends: list[str | None] = []
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            try:
                active = nvml.nvmlDeviceGetNvLinkState(handle, link)
            except nvml.NVMLError as error:
                if error.value in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_INVALID_ARGUMENT):
                    break  # there are no more links than these
                self.answer.warnings.append(f"NVML: NVLink {link} of GPU{index}: {error}")
                return None
            if not active:
                continue
            try:
                if nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link) == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
                    ends.append(_SWITCH)
                else:
                    ends.append(pci_address(_text(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)))
            except (nvml.NVMLError, AttributeError):
                return None
        return ends


_SWITCH = "switch"


def pci_address(text: str) -> str:
    """A PCI address as /sys writes it: 0000:07:00.0 of NVML's 00000000:07:00.0."""
    domain, _, rest = text.strip().lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
