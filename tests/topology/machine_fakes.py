"""A node that does not exist: a library shaped like pynvml, a folder like /sys, and commands on PATH."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace


class NVMLError(Exception):
    """As pynvml's: `value` is the number of the error."""

    def __init__(self, value: int) -> None:
        super().__init__({3: "Not Supported", 2: "Invalid Argument", 15: "GPU is lost"}.get(value, f"error {value}"))
        self.value = value


class FakeNvml:
    """What the probe calls of nvidia-ml-py. `gpus` are dicts: bus, numa, links (where each NVLink ends), fabric."""

    NVMLError = NVMLError
    NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_INVALID_ARGUMENT = 3, 2
    NVML_NVLINK_MAX_LINKS, NVML_NVLINK_DEVICE_TYPE_SWITCH, NVML_AFFINITY_SCOPE_NODE = 36, 2, 0
    NVML_GPU_FABRIC_STATE_NOT_SUPPORTED, NVML_GPU_FABRIC_STATE_COMPLETED = 0, 3

    def __init__(self, gpus, level=50) -> None:
        self.gpus, self.level, self.open = gpus, level, 0

    def nvmlInit(self):
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetCount(self):
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        if self.gpus[index].get("lost"):
            raise NVMLError(15)
        return self.gpus[index]

    def nvmlDeviceGetName(self, handle):
        return handle.get("name", "NVIDIA H100 80GB HBM3")

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-{handle['bus']}".encode()  # older releases give bytes

    def nvmlDeviceGetPciInfo(self, handle):
        return SimpleNamespace(busId=f"0000{handle['bus'].upper()}")

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(total=80 * 2**30)

    def nvmlDeviceGetMigMode(self, handle):
        if "mig" not in handle:
            raise NVMLError(3)
        return [handle["mig"], handle["mig"]]

    def nvmlDeviceGetMemoryAffinity(self, handle, words, scope):
        assert scope == 0
        return [1 << handle["numa"], *([0] * (words - 1))]

    def c_nvmlGpuFabricInfoV_t(self):
        import ctypes

        class Info(ctypes.Structure):
            _fields_ = (
                ("clusterUuid", ctypes.c_uint8 * 16), ("status", ctypes.c_uint), ("cliqueId", ctypes.c_uint32),
                ("state", ctypes.c_ubyte),
            )  # fmt: skip

        return Info()

    def nvmlDeviceGetGpuFabricInfoV(self, handle, reference):
        info = reference._obj
        info.state, info.status, info.cliqueId, identity = handle.get("fabric", (0, 0, 0, 0))
        info.clusterUuid[15] = identity

    def nvmlDeviceGetNvLinkState(self, handle, link):
        if link >= len(handle.get("links", ())):
            raise NVMLError(2)
        return handle["links"][link] is not None

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle, link):
        return 2 if handle["links"][link] == "switch" else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle, link):
        return SimpleNamespace(busId=handle["links"][link])

    def nvmlDeviceGetTopologyCommonAncestor(self, one, other):
        return self.level


def write_system(root: Path, pci=None, nics=None, sockets=2, cpus_per_node=4) -> Path:
    """A folder like /sys, a NUMA node a socket.

    `pci`: address -> (folder below devices, NUMA node, class); `nics`: name -> (address, state, rate).
    """
    cpus = sockets * cpus_per_node
    put = _writer(root)
    put("devices/system/cpu/online", f"0-{cpus - 1}")
    put("devices/system/node/online", f"0-{sockets - 1}" if sockets > 1 else "0")
    for cpu in range(cpus):
        put(f"devices/system/cpu/cpu{cpu}/topology/physical_package_id", str(cpu // cpus_per_node))
    for node in range(sockets):
        first = node * cpus_per_node
        folder = f"devices/system/node/node{node}"
        put(f"{folder}/cpulist", f"{first}-{first + cpus_per_node - 1}")
        put(f"{folder}/cpumap", f"{((1 << cpus_per_node) - 1) << first:x}")
        put(f"{folder}/distance", " ".join("10" if node == other else "20" for other in range(sockets)))
        put(f"{folder}/meminfo", f"Node {node} MemTotal:       16777216 kB\nNode {node} MemFree: 5 kB")
    (root / "bus/pci/devices").mkdir(parents=True)
    for address, (folder, numa, code) in (pci or {}).items():
        for file, value in (("class", code), ("vendor", "0x10de" if code == "0x030200" else "0x15b3"),
                            ("device", "0x2330"), ("numa_node", numa), ("local_cpulist", "0-3")):  # fmt: skip
            put(f"devices/{folder}/{address}/{file}", str(value))
        (root / "bus/pci/devices" / address).symlink_to(root / "devices" / folder / address)
    for name, (address, state, rate) in (nics or {}).items():
        for file, value in (("hca_type", "MT4129"), ("node_guid", f"a088:c203:0000:{name[-1]:0>4}"),
                            ("ports/1/state", f"4: {state}"), ("ports/1/phys_state", "5: LinkUp"),
                            ("ports/1/rate", rate), ("ports/1/link_layer", "InfiniBand")):  # fmt: skip
            put(f"class/infiniband/{name}/{file}", value)
        (root / "class/infiniband" / name / "device").symlink_to(root / "bus/pci/devices" / address)
        (root / "bus/pci/devices" / address / "net" / f"ib{name[-1]}").mkdir(parents=True)
    return root


def _writer(root: Path):
    def put(path: str, value: str) -> None:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(value + "\n", encoding="utf-8")

    return put


SWITCH = "pci0000:00/0000:00:01.0/0000:01:00.0"  # a root port and a switch's upper side


def h100_pair(root: Path) -> tuple[FakeNvml, Path]:
    """Two GPUs joined by 18 NVLinks over switches, on two sockets; a NIC beside the first, one that is down."""
    gpus = [{"bus": f"0000:{bus}:00.0", "numa": numa, "links": ["switch"] * 18, "mig": 0}
            for bus, numa in (("03", 0), ("83", 1))]  # fmt: skip
    system = write_system(
        root,
        {
            "0000:03:00.0": (f"{SWITCH}/0000:02:00.0", 0, "0x030200"),
            "0000:04:00.0": (f"{SWITCH}/0000:02:01.0", 0, "0x020700"),
            "0000:83:00.0": ("pci0000:80/0000:80:01.0", 1, "0x030200"),
            "0000:84:00.0": ("pci0000:80/0000:80:02.0", -1, "0x020700"),
        },
        {
            "mlx5_0": ("0000:04:00.0", "ACTIVE", "400 Gb/sec (4X NDR)"),
            "mlx5_1": ("0000:84:00.0", "DOWN", "10 Gb/sec (4X SDR)"),
        },
    )
    return FakeNvml(gpus), system
