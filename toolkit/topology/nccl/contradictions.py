"""Checks of variables that contradict each other. Each rule is one function of all settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from toolkit.topology.nccl.finding import Finding, Given, Level, finding_of
from toolkit.topology.nccl.values import as_c_reads
from toolkit.topology.nccl.variables import Version, is_before, variables


@dataclass(frozen=True)
class _Settings:
    """The settings of variables that NCCL reads as they were meant."""

    givens: Mapping[str, Given]
    version: Version | None

    def has(self, name: str) -> bool:
        return bool(self.value(name).strip())

    def value(self, name: str) -> str:
        return self.givens[name].value if name in self.givens else ""

    def number(self, name: str, default: int) -> int:
        return as_c_reads(self.value(name)) if self.has(name) else default

    def finding(self, name: str, why: str, fix: str, level: Level = "wrong") -> Finding:
        return finding_of(level, self.givens[name], variables()[name], why, fix)


def check_together(givens: Mapping[str, Given], version: Version | None) -> list[Finding]:
    """All contradictions, in the order of the rules."""
    settings = _Settings(givens, version)
    return [finding for rule in _RULES for finding in rule(settings)]


def _network_off(settings: _Settings) -> Iterator[Finding]:
    """InfiniBand is disabled, but tuned."""
    net = settings.value("NCCL_NET").lower()
    off = "NCCL_IB_DISABLE=1" if settings.number("NCCL_IB_DISABLE", 0) == 1 else ""
    if off and net == "ib":
        yield settings.finding("NCCL_NET", f"{off} disables the network that this forces: the job fails", "remove one")
    off = off or ("NCCL_NET=Socket" if net == "socket" else "")
    for name in settings.givens if off else ():
        tunes = name.startswith(("NCCL_IB_", "NCCL_NET_GDR_")) and name != "NCCL_IB_DISABLE"
        if tunes and settings.has(name):
            yield settings.finding(name, f"it has no effect with {off}", f"remove {off} to use RDMA, else remove this")


def _gid(settings: _Settings) -> Iterator[Finding]:
    """A fixed index in the GID table, whose order differs between nodes."""
    name = "NCCL_IB_GID_INDEX"
    if settings.number(name, -1) < 0:
        return
    for other in ("NCCL_IB_ROCE_VERSION_NUM", "NCCL_IB_ADDR_FAMILY", "NCCL_IB_ADDR_RANGE"):
        if settings.has(other):
            yield settings.finding(other, f"it chooses an address only if {name} is not set", f"remove {name}")
    if is_before(settings.version, (2, 21)):
        why = "the GID table differs between nodes; this NCCL cannot choose an entry on RoCE by itself"
        yield settings.finding(name, why, "compare `show_gids` on all nodes, or use NCCL 2.21 or newer", "note")
    else:
        why = "the GID table differs between nodes and between boots; NCCL chooses an entry by itself since 2.21"
        yield settings.finding(
            name, why, "remove it; NCCL_IB_ADDR_RANGE or NCCL_IB_ROCE_VERSION_NUM restrict the choice"
        )


def _channels(settings: _Settings) -> Iterator[Finding]:
    """Bounds of channels and blocks that exclude each other, or are very low."""
    for low, high in (("NCCL_MIN_CTAS", "NCCL_MAX_CTAS"), ("NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS")):
        if settings.has(low) and settings.has(high) and settings.number(low, 0) > settings.number(high, 0):
            yield settings.finding(low, f"it is above {high}={settings.value(high)}", "set a minimum below the maximum")
    for new, old in (("NCCL_MAX_CTAS", "NCCL_MAX_NCHANNELS"), ("NCCL_MIN_CTAS", "NCCL_MIN_NCHANNELS")):
        if settings.has(new) and settings.has(old) and settings.value(new) != settings.value(old):
            why = f"it differs from {new}={settings.value(new)}, and the narrower bound applies"
            yield settings.finding(old, why, f"keep {new} alone")
    for name in ("NCCL_MAX_CTAS", "NCCL_MAX_NCHANNELS"):
        if 1 <= settings.number(name, 0) < 4:
            why = "few channels limit the bandwidth, of NVLink in particular"
            yield settings.finding(name, why, "remove it, unless your own kernels need the GPU's resources", "note")


def _sizes(settings: _Settings) -> Iterator[Finding]:
    """Products and thresholds that exceed a limit."""
    threads, sockets = settings.number("NCCL_SOCKET_NTHREADS", 1), settings.number("NCCL_NSOCKS_PERTHREAD", 1)
    if threads * sockets > 64:
        name = "NCCL_NSOCKS_PERTHREAD" if settings.has("NCCL_NSOCKS_PERTHREAD") else "NCCL_SOCKET_NTHREADS"
        why = f"NCCL_SOCKET_NTHREADS times NCCL_NSOCKS_PERTHREAD is {threads * sockets}, and the limit is 64"
        yield settings.finding(name, why, "set numbers with a product of at most 64")
    buffer = settings.number("NCCL_BUFFSIZE", 4 << 20)
    if settings.number("NCCL_IB_AR_THRESHOLD", 8192) > buffer:
        name = "NCCL_IB_AR_THRESHOLD" if settings.has("NCCL_IB_AR_THRESHOLD") else "NCCL_BUFFSIZE"
        why = f"a threshold above the buffer size of {buffer} bytes disables adaptive routing"
        yield settings.finding(name, why, "set it below NCCL_BUFFSIZE, or NCCL_IB_ADAPTIVE_ROUTING=0 to disable it")


# (variable, its value or None for any, other variable, its value, reason, fix)
_EXCLUSIONS = (
    ("NCCL_P2P_LEVEL", None, "NCCL_P2P_DISABLE", 1, "it has no effect with NCCL_P2P_DISABLE=1", "remove one"),
    ("NCCL_MNNVL_ENABLE", 1, "NCCL_CUMEM_ENABLE", 0, "NVLink between nodes needs cuMem, but NCCL_CUMEM_ENABLE=0",
     "remove NCCL_CUMEM_ENABLE"),
    ("NCCL_GDRCOPY_FLUSH_ENABLE", 1, "NCCL_GDRCOPY_ENABLE", 0, "it has no effect with NCCL_GDRCOPY_ENABLE=0",
     "remove it"),
    ("NCCL_NVLS_ENABLE", 1, "NCCL_MULTI_RANK_GPU_ENABLE", 1, "reductions in NVSwitch fail if ranks share a GPU",
     "NCCL_NVLS_ENABLE=0"),
    ("NCCL_GRAPH_STREAM_ORDERING", 0, "NCCL_GRAPH_MIXING_SUPPORT", 1,
     "without ordering, NCCL_GRAPH_MIXING_SUPPORT=1 is not supported", "remove it, or set NCCL_GRAPH_MIXING_SUPPORT=0"),
)  # fmt: skip


def _exclusions(settings: _Settings) -> Iterator[Finding]:
    """A variable that another one disables or forbids."""
    for name, value, other, other_value, why, fix in _EXCLUSIONS:
        applies = settings.has(name) and (value is None or settings.number(name, -1) == value)
        if applies and settings.number(other, -1) == other_value:
            yield settings.finding(name, why, fix)
    if settings.has("NCCL_IB_PKEY") and settings.number("NCCL_IB_PKEY_VALUE", -1) >= 0:
        yield settings.finding("NCCL_IB_PKEY", "NCCL_IB_PKEY_VALUE overrides it: it has no effect", "remove one")
    if settings.has("NCCL_OOB_NET_IFNAME") and settings.number("NCCL_OOB_NET_ENABLE", 0) == 0:
        why = "it has no effect without NCCL_OOB_NET_ENABLE=1"
        yield settings.finding("NCCL_OOB_NET_IFNAME", why, "set both or neither")
    algorithms = settings.value("NCCL_ALGO").lower()
    if "nvls" in algorithms and "^" not in algorithms and settings.number("NCCL_NVLS_ENABLE", 2) == 0:
        yield settings.finding("NCCL_ALGO", "it requests NVLS, but NCCL_NVLS_ENABLE=0 disables that", "remove one")


def _output(settings: _Settings) -> Iterator[Finding]:
    """A log that NCCL does not write, or that ranks overwrite."""
    level = settings.value("NCCL_DEBUG").strip().upper()
    if settings.has("NCCL_DEBUG_SUBSYS") and level not in ("INFO", "TRACE"):
        why = "it selects among the lines of INFO, and has no effect without NCCL_DEBUG=INFO"
        yield settings.finding("NCCL_DEBUG_SUBSYS", why, "also set NCCL_DEBUG=INFO, or remove it", "note")
    if not settings.has("NCCL_DEBUG_FILE"):
        return
    path = settings.value("NCCL_DEBUG_FILE")
    if not level:
        why = "it has no effect without NCCL_DEBUG"
        yield settings.finding("NCCL_DEBUG_FILE", why, "also set NCCL_DEBUG, or remove it", "note")
    if "%p" not in path and not path.startswith("/dev/"):
        why = "all ranks with this path overwrite the same file"
        yield settings.finding("NCCL_DEBUG_FILE", why, f"NCCL_DEBUG_FILE={path}.%h.%p")


_RULES: tuple[Callable[[_Settings], Iterator[Finding]], ...] = (
    _network_off, _gid, _channels, _sizes, _exclusions, _output,
)  # fmt: skip
