"""Variables that do not go with one another. Each rule is one function of all that is set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from toolkit.topology.nccl.documented import variables
from toolkit.topology.nccl.finding import Finding, Given, Level, found
from toolkit.topology.nccl.values import as_c_reads
from toolkit.topology.nccl.variable import Version, before

Settings = Mapping[str, Given]
Rule = Callable[[Settings, Version | None], Iterator[Finding]]


def check_together(settings: Settings, version: Version | None) -> list[Finding]:
    """What variables say against one another, by all rules in their order."""
    return [finding for rule in RULES for finding in rule(settings, version)]


def _number(settings: Settings, name: str, default: int) -> int:
    return as_c_reads(settings[name].value) if _is_set(settings, name) else default


def _is_set(settings: Settings, name: str) -> bool:
    return name in settings and bool(settings[name].value.strip())


def _say(settings: Settings, name: str, why: str, fix: str, level: Level = "wrong") -> Finding:
    return found(level, settings[name], variables()[name], why, fix)


def _network_off(settings: Settings, version: Version | None) -> Iterator[Finding]:
    """InfiniBand is switched off, and tuned."""
    net = settings["NCCL_NET"].value.lower() if _is_set(settings, "NCCL_NET") else ""
    off = "NCCL_IB_DISABLE=1" if _number(settings, "NCCL_IB_DISABLE", 0) == 1 else ""
    if off and net == "ib":
        yield _say(
            settings, "NCCL_NET", f"{off} switches off the network that this forces: the job ends", "take one out"
        )
    off = off or ("NCCL_NET=Socket" if net == "socket" else "")
    for name in settings if off else ():
        tunes = name.startswith(("NCCL_IB_", "NCCL_NET_GDR_")) and name != "NCCL_IB_DISABLE"
        if tunes and _is_set(settings, name):
            yield _say(
                settings, name, f"it has no effect beside {off}", f"take out {off} where RDMA is wanted, else this"
            )


def _gid(settings: Settings, version: Version | None) -> Iterator[Finding]:
    """A fixed place in a table whose order differs from node to node."""
    name = "NCCL_IB_GID_INDEX"
    if not _is_set(settings, name) or _number(settings, name, -1) < 0:
        return
    for other in ("NCCL_IB_ROCE_VERSION_NUM", "NCCL_IB_ADDR_FAMILY", "NCCL_IB_ADDR_RANGE"):
        if _is_set(settings, other):
            yield _say(settings, other, f"it chooses among addresses only where {name} is not set", f"take {name} out")
    if before(version, (2, 21)):
        why = "the table of addresses differs from node to node; this NCCL cannot choose by itself on RoCE"
        yield _say(settings, name, why, "compare `show_gids` on all nodes; NCCL 2.21 or newer chooses itself", "note")
        return
    why = "the table of addresses differs from node to node and from boot to boot; NCCL chooses itself since 2.21"
    yield _say(settings, name, why, "take it out; NCCL_IB_ADDR_RANGE or NCCL_IB_ROCE_VERSION_NUM says what to choose")


def _bounds(settings: Settings, version: Version | None) -> Iterator[Finding]:
    for low, high in (("NCCL_MIN_CTAS", "NCCL_MAX_CTAS"), ("NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS")):
        if (
            _is_set(settings, low)
            and _is_set(settings, high)
            and _number(settings, low, 0) > _number(settings, high, 0)
        ):
            yield _say(settings, low, f"it is above {high}={settings[high].value}", "give bounds that hold together")
    for new, old in (("NCCL_MAX_CTAS", "NCCL_MAX_NCHANNELS"), ("NCCL_MIN_CTAS", "NCCL_MIN_NCHANNELS")):
        if _is_set(settings, new) and _is_set(settings, old) and settings[new].value != settings[old].value:
            why = f"{new}={settings[new].value} says another number, and the narrower one counts"
            yield _say(settings, old, why, f"keep {new} alone")
    for name in ("NCCL_MAX_CTAS", "NCCL_MAX_NCHANNELS"):
        if 1 <= _number(settings, name, 0) < 4:
            why = "so few channels cap the bandwidth, of NVLink above all"
            yield _say(settings, name, why, "take it out, unless kernels of yours need the GPU's room", "note")
    threads, sockets = _number(settings, "NCCL_SOCKET_NTHREADS", 1), _number(settings, "NCCL_NSOCKS_PERTHREAD", 1)
    if threads * sockets > 64:
        name = "NCCL_NSOCKS_PERTHREAD" if _is_set(settings, "NCCL_NSOCKS_PERTHREAD") else "NCCL_SOCKET_NTHREADS"
        why = f"NCCL_SOCKET_NTHREADS times NCCL_NSOCKS_PERTHREAD is {threads * sockets}, and 64 is the most"
        yield _say(settings, name, why, "give two numbers whose product is at most 64")
    buffer = _number(settings, "NCCL_BUFFSIZE", 4 << 20)
    if _number(settings, "NCCL_IB_AR_THRESHOLD", 8192) > buffer:
        name = "NCCL_IB_AR_THRESHOLD" if _is_set(settings, "NCCL_IB_AR_THRESHOLD") else "NCCL_BUFFSIZE"
        why = f"a threshold above the buffers' {buffer} bytes switches adaptive routing off"
        yield _say(settings, name, why, "NCCL_IB_ADAPTIVE_ROUTING=0 says so; else give less than NCCL_BUFFSIZE")


def _one_off_the_other(settings: Settings, version: Version | None) -> Iterator[Finding]:
    """A variable that another makes void, or forbids."""
    for name, other, value, why, fix in (
        ("NCCL_P2P_LEVEL", "NCCL_P2P_DISABLE", 1, "it has no effect beside NCCL_P2P_DISABLE=1", "take one out"),
        ("NCCL_MNNVL_ENABLE", "NCCL_CUMEM_ENABLE", 0, "NVLink between nodes needs cuMem, and NCCL_CUMEM_ENABLE=0",
         "take NCCL_CUMEM_ENABLE out"),
        ("NCCL_GDRCOPY_FLUSH_ENABLE", "NCCL_GDRCOPY_ENABLE", 0, "void beside NCCL_GDRCOPY_ENABLE=0", "take it out"),
        ("NCCL_NVLS_ENABLE", "NCCL_MULTI_RANK_GPU_ENABLE", 1, "reductions in NVSwitch fail where ranks share a GPU",
         "NCCL_NVLS_ENABLE=0"),
    ):  # fmt: skip
        on = _is_set(settings, name) and (name == "NCCL_P2P_LEVEL" or _number(settings, name, 0) == 1)
        if on and _is_set(settings, other) and _number(settings, other, -1) == value:
            yield _say(settings, name, why, fix)
    if (
        _number(settings, "NCCL_GRAPH_STREAM_ORDERING", 1) == 0
        and _number(settings, "NCCL_GRAPH_MIXING_SUPPORT", 0) == 1
    ):
        why = "without ordering, NCCL_GRAPH_MIXING_SUPPORT=1 is not supported"
        yield _say(settings, "NCCL_GRAPH_STREAM_ORDERING", why, "take it out, or NCCL_GRAPH_MIXING_SUPPORT=0")
    if _is_set(settings, "NCCL_IB_PKEY") and _number(settings, "NCCL_IB_PKEY_VALUE", -1) >= 0:
        yield _say(settings, "NCCL_IB_PKEY", "NCCL_IB_PKEY_VALUE counts first: this has no effect", "take one out")
    if _is_set(settings, "NCCL_OOB_NET_IFNAME") and _number(settings, "NCCL_OOB_NET_ENABLE", 0) == 0:
        yield _say(
            settings, "NCCL_OOB_NET_IFNAME", "it has no effect without NCCL_OOB_NET_ENABLE=1", "set both or none"
        )
    algorithms = settings["NCCL_ALGO"].value.lower() if _is_set(settings, "NCCL_ALGO") else ""
    if "nvls" in algorithms and "^" not in algorithms and _number(settings, "NCCL_NVLS_ENABLE", 2) == 0:
        yield _say(settings, "NCCL_ALGO", "it asks for NVLS, and NCCL_NVLS_ENABLE=0 switches that off", "take one out")


def _output(settings: Settings, version: Version | None) -> Iterator[Finding]:
    level = settings["NCCL_DEBUG"].value.upper() if _is_set(settings, "NCCL_DEBUG") else ""
    if _is_set(settings, "NCCL_DEBUG_SUBSYS") and level not in ("INFO", "TRACE"):
        why = "it chooses among what INFO prints, and has no effect without NCCL_DEBUG=INFO"
        yield _say(settings, "NCCL_DEBUG_SUBSYS", why, "set NCCL_DEBUG=INFO too, or take it out", "note")
    if not _is_set(settings, "NCCL_DEBUG_FILE"):
        return
    path = settings["NCCL_DEBUG_FILE"].value
    if not level:
        why = "it has no effect without NCCL_DEBUG"
        yield _say(settings, "NCCL_DEBUG_FILE", why, "set NCCL_DEBUG too, or take it out", "note")
    if "%p" not in path and not path.startswith("/dev/"):
        why = "all ranks that see this path write over one another's file"
        yield _say(settings, "NCCL_DEBUG_FILE", why, f"NCCL_DEBUG_FILE={path}.%h.%p")


RULES: tuple[Rule, ...] = (_network_off, _gid, _bounds, _one_off_the_other, _output)
