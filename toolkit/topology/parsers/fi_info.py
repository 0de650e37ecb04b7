"""Read `fi_info`, also with -v: what libfabric offers, a record for each provider, domain and type of endpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from toolkit.topology.parsers.device_names import after_a_gap, is_left_of, out_of_order
from toolkit.topology.parsers.fabric_lines import Line, read_lines, strange

KEYS = {
    "records": "each record: provider, fabric, domain (a list: some print several), version, type, protocol, as printed; "
    "without what is not printed",
    "providers": "their providers, sorted, each once; layers are joined by ;",
    "domains": "their domains, sorted, each once",
}
KEY_LINE = re.compile(r"(provider|fabric|domain|version|type|protocol):\s*(.*)")
EVIDENCE = re.compile(
    r"(?:^|(?<=\s))provider:|fi_info:$|FI_EP_[A-Z]+$|fi_getinfo: -?[0-9]+|protocol: FI_PROTO_|domain: \S+$"
)
ORDER = ("provider", "fabric", "domain", "version", "type", "protocol")
_NAME = re.compile(r"(?:(?!(?:provider|fabric|domain|version|type|protocol):).)+")
_FORMS = {
    "provider": re.compile("[A-Za-z][A-Za-z0-9_]*(?:;[A-Za-z][A-Za-z0-9_]*)*"),
    "fabric": re.compile(rf"(?!EFA-){_NAME.pattern}|EFA-fe80::(?:[0-9a-f]{{1,4}}:){{3}}[0-9a-f]{{1,4}}"),
    "domain": _NAME,
    "version": re.compile(r"[0-9]{1,6}\.[0-9]{1,6}"),
    "type": re.compile("FI_EP_(?:UNSPEC|MSG|DGRAM|RDM|SOCK_STREAM|SOCK_DGRAM)|Unknown"),
    "protocol": re.compile("FI_PROTO_[A-Z0-9_]+|Unknown|[0-9]+"),
}
# Words of libfabric 1.5 to 2.1; one that lacks letters of them is damaged, another one may be newer.
_WORDS = {
    "provider": frozenset(
        """verbs tcp udp UDP sockets shm sm2 psm psm2 psm3 opx cxi efa gni usnic mlx ucx mrail rstream bgq netdir coll lnx lpp
        net xnet mxm ofi_rxm ofi_rxd ofi_mrail off_coll""".split()  # noqa: SIM905
    ),
    "protocol": frozenset(
        f"FI_PROTO_{word}"
        for word in """UNSPEC RDMA_CM_IB_RC IWARP IB_UD PSMX UDP SOCK_TCP MXM IWARP_RDM IB_RDM GNI RXM RXD MLX NETWORKDIRECT
        PSMX2 SHM MRAIL RSTREAM RDMA_CM_IB_XRC EFA PSMX3 RXM_TCP OPX CXI XNET COLL UCX SM2 CXI_RNR LPP""".split()  # noqa: SIM905
    ),
}
# How providers name their domains; EFA's end in the type of the endpoint.
_DOMAINS = {"cxi": re.compile("cxi[0-9]+"), "efa": re.compile(r"[a-z]\w*-(?:rdm|dgrm)")}
# Sites may name a device as they like, so that another name is said but kept.
_USUAL = {
    ("cxi", "fabric"): re.compile("cxi"),
    ("efa", "fabric"): re.compile("EFA-.*|efa(?:-direct)?"),
    ("efa", "domain"): re.compile("(?:rdmap[0-9]+s[0-9]+(?:f[0-9]+)?|efa_?[0-9]+)-.*"),
}
_EFA_TYPES = {"rdm": "FI_EP_RDM", "dgrm": "FI_EP_DGRAM"}
# Where -v prints the same: (its section, its key).
_VERBOSE = {
    ("fi_fabric_attr", "prov_name"): "provider",
    ("fi_fabric_attr", "name"): "fabric",
    ("fi_domain_attr", "name"): "domain",
    ("fi_fabric_attr", "prov_version"): "version",
    ("fi_ep_attr", "type"): "type",
    ("fi_ep_attr", "protocol"): "protocol",
}


@dataclass(frozen=True)
class FabricInfo:
    """One way to communicate; None where nothing is printed or its line is damaged, also for one of the domains."""

    provider: str | None
    fabric: str | None
    domains: tuple[str | None, ...]
    version: str | None
    endpoint_type: str | None
    protocol: str | None


@dataclass
class _Record:
    """A record whose lines are being read; the value of a key whose line is damaged is None."""

    line: int
    values: dict[str, str | None] = field(default_factory=dict)
    domains: list[str | None] = field(default_factory=list)

    def has(self, key: str) -> bool:
        return bool(self.domains) if key == "domain" else key in self.values


def parse_fi_info(text: str) -> tuple[tuple[FabricInfo, ...], tuple[str, ...]]:
    """Read the whole output: (records in printed order, warnings that name the damaged lines).

    Raises:
        CheckFailedError: it is no output of fi_info.
    """
    records, warnings = _read(text)
    infos = tuple(
        FabricInfo(
            provider=record.values.get("provider"),
            fabric=record.values.get("fabric"),
            domains=tuple(record.domains),
            version=record.values.get("version"),
            endpoint_type=record.values.get("type"),
            protocol=record.values.get("protocol"),
        )
        for record in records
    )
    return infos, warnings


def answer_fi_info(text: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The facts of an output of fi_info: (values of `KEYS`, warnings).

    Raises:
        CheckFailedError: it is no output of fi_info.
    """
    records, warnings = _read(text)
    entries = [
        {key: record.domains if key == "domain" else record.values[key] for key in ORDER if record.has(key)}
        for record in records
    ]
    facts = {
        "records": entries,
        "providers": sorted({name for record in records if (name := record.values.get("provider"))}),
        "domains": sorted({name for record in records for name in record.domains if name}),
    }
    return facts, warnings


def _read(text: str) -> tuple[list[_Record], tuple[str, ...]]:
    warnings: list[str] = []
    records: list[_Record] = []
    here: _Record | None = None  # None also below a provider whose line is lost
    lines = read_lines(text, EVIDENCE, "fi_info", warnings)
    for line in _condensed(lines) if any(line.text == "fi_info:" for line in lines) else lines:
        match = KEY_LINE.fullmatch(line.text)
        if match is None:
            warnings.append(strange(line, "a record"))
            continue
        key, value = match.groups()
        if key == "provider" and not (here and list(here.values) == ["provider"] and here.values[key] == value):
            here = _Record(line.number)
            records.append(here)
        elif here and any(here.has(later) for later in ORDER[ORDER.index(key) + 1 :]):
            warnings.append(
                f"line {line.number}: {key} stands behind what is printed after it; a provider's line is lost"
            )
            here = None
        if here is None:
            warnings.append(f"line {line.number}: {key} belongs to no provider; it is not read")
        else:
            _put(here, key, value, line, warnings)
    _check(records, warnings)
    return records, tuple(warnings)


def _condensed(lines: list[Line]) -> Iterator[Line]:
    """The lines that fi_info would print without -v."""
    section, found = "", dict[str, Line]()
    for line in [*lines, Line(lines[-1].number, "fi_info:", False)]:
        key, _, value = line.text.partition(":")
        if line.text == "fi_info:":
            yield from (found[name] for name in ORDER if name in found)
            found = {}
        elif not value.strip():
            section = key
        elif name := _VERBOSE.get((section, key)):
            found.setdefault(name, Line(line.number, f"{name}: {value.strip()}", line.cut))


def _put(record: _Record, key: str, value: str, line: Line, warnings: list[str]) -> None:
    words = _WORDS.get(key, frozenset())
    parts = value.split(";") if key == "provider" else [value]
    lacking = any(part not in words and any(is_left_of(part, word) for word in words) for part in parts)
    read: str | None = value
    if not _FORMS[key].fullmatch(value) or lacking:
        warnings.append(f"line {line.number}: {key} is not read from {value[:60]!r}")
        read = None
    elif line.cut and not (key == "type" or value in words):
        read = None
    provider = record.values.get("provider") or ""
    usual, form = _USUAL.get((provider, key)), _DOMAINS.get(provider)
    if read is not None and usual and not usual.fullmatch(read):
        warnings.append(f"line {line.number}: {read[:60]!r} is no usual {key} of {provider}")
    if key == "domain" and read is not None and form and not form.fullmatch(read):
        warnings.append(f"line {line.number}: {read[:60]!r} is no domain of {provider}")
        read = None
    if key == "domain" and read is not None and read in record.domains:
        warnings.append(f"line {line.number}: the domain {read} is printed a second time")
    elif key == "domain":
        record.domains.append(read)
    elif key in record.values:
        warnings.append(f"line {line.number}: {key} is printed a second time")
        if record.values[key] != read:
            record.values[key] = None
    else:
        record.values[key] = read


def _check(records: list[_Record], warnings: list[str]) -> None:
    """What one line says against another, and what is missing."""
    asked = [key for key in ORDER if len(records) == 1 or any(record.has(key) for record in records)]
    seen: list[tuple[dict[str, str | None], list[str | None]]] = []
    for record in records:
        missing = [key for key in asked if not record.has(key)]
        if missing:
            warnings.append(f"line {record.line}: a record without {', '.join(missing)}")
        if (record.values, record.domains) in seen:
            warnings.append(f"line {record.line}: this record is printed a second time")
        seen.append((record.values, record.domains))
        names = [name for name in record.domains if name]
        place = out_of_order(names)
        for odd in after_a_gap(names) if place is None else [place]:
            warnings.append(f"line {record.line}: the domain {names[odd]} does not follow {names[odd - 1]}")
        for name in record.domains if record.values.get("provider") == "efa" else ():
            kind = _EFA_TYPES.get((name or "").rpartition("-")[2])
            if kind and record.values.get("type") not in (kind, None):
                warnings.append(f"line {record.line}: {name} does not go with {record.values['type']}")
