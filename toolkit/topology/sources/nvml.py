"""Claim GPUs, their links and their NVLink fabric from NVML, the management library of the NVIDIA driver.

toolkit calls NVML through nvidia-ml-py (`import pynvml`). If the driver or the GPU does not support a function, the fact
is unknown, with a reason. A time limit keeps a driver that hangs from blocking toolkit.
"""

import threading
from collections.abc import Callable
from ctypes import byref
from functools import partial
from typing import Any

from toolkit.topology.claims import Answer
from toolkit.topology.facts import NO_FABRIC
from toolkit.topology.sources.commands import COMMAND_TIMEOUT_S

__all__ = ["ask_nvml", "pci_address"]

SOURCE = "NVML"
COVERS = (("gpu_count",), ("GPU",), ("link",))
# nvmlGpuTopologyLevel_t in the terms of nvidia-smi. Level 0, INTERNAL, means two GPUs on one board with one switch.
_LEVELS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
_NODE_MASK_WORDS = 16  # words of 64 bits; together one bit for each NUMA node that Linux supports


def ask_nvml(library: Any = None, timeout_s: float = COMMAND_TIMEOUT_S) -> Answer:
    """Return the claims of NVML; `library` is the module of nvidia-ml-py, imported if None."""
    late = Answer(SOURCE, "direct", COVERS)
    if library is None:
        try:
            import pynvml

            library = pynvml
        except ImportError:
            late.miss("NVML: nvidia-ml-py is not installed")
            return late
    answers: list[Answer] = []
    # The driver may hang in the kernel, where no signal can interrupt it. A daemon thread does not block the process.
    query = threading.Thread(target=lambda: answers.append(_ask(library)), name="NVML", daemon=True)
    query.start()
    query.join(timeout_s)
    late.miss(f"NVML did not respond within {timeout_s:g} s")
    return answers[0] if answers else late


def _ask(nvml: Any) -> Answer:
    answer = Answer(SOURCE, "direct", COVERS)
    try:
        nvml.nvmlInit()
        try:
            _Query(nvml, answer).claim_all()
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        answer.miss(f"NVML: {error}")
    return answer


class _Query:
    """Queries an initialized NVML, and adds the claims to one `Answer`."""

    def __init__(self, nvml: Any, answer: Answer) -> None:
        self.nvml = nvml
        self.answer = answer

    def claim_all(self) -> None:
        count = int(self.nvml.nvmlDeviceGetCount())
        self.answer.say(count, "gpu_count")
        handles = {}
        for index in range(count):
            self.answer.claims["GPU", index] = True
            try:
                handles[index] = self.nvml.nvmlDeviceGetHandleByIndex(index)
            except self.nvml.NVMLError as error:  # for example, the GPU has fallen off the bus
                self.answer.miss(f"NVML: {error}", "GPU", index)
                self.answer.warnings.append(f"NVML: GPU{index}: {error}")
        for index, handle in handles.items():
            self._gpu(index, handle)
        self._links(handles)

    def _try(self, call: Callable[[], Any], *about: Any) -> None:
        """Claim the value of one NVML function, or record why the function fails."""
        try:
            self.answer.say(call(), *about)
        # AttributeError: this version of nvidia-ml-py does not have the function yet.
        except (self.nvml.NVMLError, AttributeError) as error:
            self.answer.miss(f"NVML: {error}", *about)

    def _gpu(self, index: int, handle: Any) -> None:
        nvml = self.nvml
        calls: dict[str, Callable[[], Any]] = {
            "name": lambda: _decoded(nvml.nvmlDeviceGetName(handle)),
            "uuid": lambda: _decoded(nvml.nvmlDeviceGetUUID(handle)),
            "bus": lambda: pci_address(_decoded(nvml.nvmlDeviceGetPciInfo(handle).busId)),
            "memory_bytes": lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
            "mig": lambda: self._mig(handle),
            "numa_node": lambda: self._numa_node(handle),
            "fabric": lambda: self._fabric(handle),
        }
        for name, call in calls.items():
            self._try(call, "GPU", index, name)
        reasons = self.answer.reasons  # a call may also return None without an error
        reasons.setdefault(("GPU", index, "numa_node"), "NVML: the GPU is not nearest to a single NUMA node")
        reasons.setdefault(("GPU", index, "fabric"), "NVML: the GPU has not joined its fabric yet")

    def _mig(self, handle: Any) -> bool:
        try:
            return bool(self.nvml.nvmlDeviceGetMigMode(handle)[0])
        except self.nvml.NVMLError as error:
            if error.value == self.nvml.NVML_ERROR_NOT_SUPPORTED:
                return False  # the GPU has no MIG mode
            raise

    def _numa_node(self, handle: Any) -> int | None:
        mask = self.nvml.nvmlDeviceGetMemoryAffinity(handle, _NODE_MASK_WORDS, self.nvml.NVML_AFFINITY_SCOPE_NODE)
        near = [64 * index + bit for index, bits in enumerate(mask) for bit in range(64) if int(bits) >> bit & 1]
        return near[0] if len(near) == 1 else None

    def _fabric(self, handle: Any) -> str | None:
        """Return the cluster UUID and the clique number, as in `nvidia-smi -q`; None while the fabric starts."""
        nvml = self.nvml
        try:
            info = nvml.c_nvmlGpuFabricInfoV_t()
            nvml.nvmlDeviceGetGpuFabricInfoV(handle, byref(info))
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_NOT_SUPPORTED:
                return NO_FABRIC
            info = nvml.c_nvmlGpuFabricInfo_t()  # drivers before 550 lack the first function
            nvml.nvmlDeviceGetGpuFabricInfo(handle, byref(info))
        if info.state == nvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED:
            return NO_FABRIC
        if info.state != nvml.NVML_GPU_FABRIC_STATE_COMPLETED or info.status:
            return None
        cluster = bytes(info.clusterUuid).hex()
        # A machine whose NVSwitches connect only its own GPUs reports a cluster UUID of zeros.
        return f"{cluster}.{info.cliqueId}" if int(cluster, 16) else NO_FABRIC

    def _links(self, handles: dict[int, Any]) -> None:
        ends = {index: self._nvlinks(index, handle) for index, handle in handles.items()}
        buses = {index: self.answer.claims.get(("GPU", index, "bus")) for index in handles}
        for first in handles:
            for second in (index for index in handles if index > first):
                about = ("link", f"GPU{first}", f"GPU{second}")
                first_ends, second_ends = ends[first], ends[second]
                if first_ends is None or second_ends is None:
                    unreported = first if first_ends is None else second
                    self.answer.miss(f"NVML does not report where the NVLinks of GPU{unreported} end", *about)
                    continue
                count = first_ends.count(buses[second]) or min(first_ends.count(_SWITCH), second_ends.count(_SWITCH))
                if count:
                    self.answer.say(f"NV{count}", *about)
                else:
                    self._try(partial(self._level, handles[first], handles[second]), *about)

    def _level(self, first: Any, second: Any) -> str | None:
        return _LEVELS.get(int(self.nvml.nvmlDeviceGetTopologyCommonAncestor(first, second)))

    def _nvlinks(self, index: int, handle: Any) -> list[str | None] | None:
        """Return the remote end of each active NVLink, a PCI address or `_SWITCH`; None if NVML does not report it."""
        nvml = self.nvml
        ends: list[str | None] = []
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            try:
                active = nvml.nvmlDeviceGetNvLinkState(handle, link)
            except nvml.NVMLError as error:
                if error.value in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_INVALID_ARGUMENT):
                    break  # the GPU has no further links
                self.answer.warnings.append(f"NVML: NVLink {link} of GPU{index}: {error}")
                return None
            if not active:
                continue
            try:
                if nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link) == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
                    ends.append(_SWITCH)
                else:
                    ends.append(pci_address(_decoded(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)))
            except (nvml.NVMLError, AttributeError):
                return None
        return ends


_SWITCH = "switch"


def pci_address(nvml_address: str) -> str:
    """Return a PCI address from NVML (00000000:07:00.0) in the format of /sys (0000:07:00.0)."""
    domain, _, rest = nvml_address.strip().lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _decoded(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
