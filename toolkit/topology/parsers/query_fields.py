"""The fields that `nvidia-smi --query-gpu` can be asked for, by its --help-query-gpu, and how their values look."""

from __future__ import annotations

import difflib
import re

# ruff: noqa: SIM905

# By name the unit, or "=" and the form, of the value; "" where it is free. Several names of one field are all there.
FIELDS: dict[str, str] = {
    **dict.fromkeys("""timestamp pci.baseClass pci.subClass serial gpu_serial display_mode display_attached
        display_active persistence_mode addressing_mode accounting.mode
        accounting.buffer_size driver_model.current driver_model.pending vbios_version inforom.img inforom.image
        inforom.oem inforom.ecc inforom.pwr inforom.power inforom.checksum_validation gom.current
        gpu_operation_mode.current gom.pending gpu_operation_mode.pending clocks_throttle_reasons.supported
        clocks_event_reasons.supported compute_mode ecc.mode.current ecc.mode.pending mig.mode.current
        mig.mode.pending gsp.mode.current gsp.mode.default c2c.mode fabric.state fabric.status fabric.cliqueId
        fabric.clusterUuid fabric.health.bandwidth fabric.health.summary encoder.stats.sessionCount
        encoder.stats.averageFps encoder.stats.averageLatency dramEncryption.mode.current dramEncryption.mode.pending
        retired_pages.pending retired_pages.single_bit_ecc.count retired_pages.sbe retired_pages.double_bit.count
        retired_pages.dbe remapped_rows.correctable remapped_rows.uncorrectable remapped_rows.pending
        remapped_rows.failure remapped_rows.histogram.max gpu_recovery_action protected_memory.total
        protected_memory.used protected_memory.free power.management gpu_link_info.max reset_status.reset_required
        reset_status.drain_and_reset_recommended platform.chassis_serial_number platform.slot_number platform.tray_index
        platform.host_id platform.peer_type platform.module_id platform.gpu_fabric_guid hostname
        module_id board_id""".split(), ""),
    **dict.fromkeys("""count index minor_number gpu_module_id temperature.gpu
        temperature.memory temperature.gpu.tlimit""".split(), "=number"),
    **dict.fromkeys(("name", "gpu_name"), "=name"),
    **{f"pcie.link.gen.{when}": "=PCIe generation" for when in ("current", "gpucurrent", "max", "gpumax", "hostmax")},
    **{f"pcie.link.width.{when}": "=PCIe width" for when in ("current", "max")},
    "compute_cap": "=decimal",
    "pstate": "=performance state",
    **dict.fromkeys(("uuid", "gpu_uuid"), "=uuid"),
    **dict.fromkeys(("pci.bus_id", "gpu_bus_id"), "=bus id"),
    **dict.fromkeys("""pci.domain pci.bus pci.device pci.device_id pci.sub_device_id clocks_throttle_reasons.active
        clocks_event_reasons.active gpu_bus""".split(), "=hexadecimal"),
    "driver_version": "=version",
    **dict.fromkeys("memory.total memory.reserved memory.used memory.free".split(), "MiB"),
    **dict.fromkeys("""utilization.gpu utilization.memory utilization.encoder utilization.decoder utilization.jpeg
        utilization.ofa fan.speed""".split(), "%"),
    **dict.fromkeys("""power.draw power.draw.average power.draw.instant power.limit enforced.power.limit
        power.default_limit power.min_limit power.max_limit module.power.draw.average module.power.draw.instant
        module.power.limit module.enforced.power.limit module.power.default_limit module.power.min_limit
        module.power.max_limit""".split(), "W"),
    **dict.fromkeys("""clocks.current.graphics clocks.gr clocks.current.sm clocks.sm clocks.current.memory clocks.mem
        clocks.current.video clocks.video clocks.applications.graphics clocks.applications.gr clocks.applications.memory
        clocks.applications.mem clocks.default_applications.graphics clocks.default_applications.gr
        clocks.default_applications.memory clocks.default_applications.mem clocks.max.graphics clocks.max.gr
        clocks.max.sm clocks.max.memory clocks.max.mem""".split(), "MHz"),
    **{f"ecc.errors.{kind}.{when}.{where}": ""
       for kind in ("corrected", "uncorrected") for when in ("volatile", "aggregate")
       for where in ("device_memory", "dram", "register_file", "l1_cache", "l2_cache", "texture_memory", "cbu", "sram",
                     "total")},
    **{f"{family}.{reason}": ""
       for family in ("clocks_throttle_reasons", "clocks_event_reasons")
       for reason in ("gpu_idle", "applications_clocks_setting", "sw_power_cap", "hw_slowdown", "hw_thermal_slowdown",
                      "hw_power_brake_slowdown", "sw_thermal_slowdown", "sync_boost")},
}  # fmt: skip
LONGEST_FIELD = 80
_FIELD = re.compile(r"[A-Za-z][A-Za-z0-9_.]*(?: \[[A-Za-z%/]+\])?")
_FORMS = {
    "uuid": re.compile(r"(?:GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"),
    "bus id": re.compile(r"(?:[0-9A-Fa-f]{4}|[0-9A-Fa-f]{8}):[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]"),
    "hexadecimal": re.compile(r"0x[0-9A-Fa-f]+"),
    "version": re.compile(r"[0-9]{3}(?:\.[0-9]{2,3}){1,2}"),
    "PCIe generation": re.compile(r"[0-9]"),
    "PCIe width": re.compile(r"0|1|2|4|8|12|16|32"),
    "decimal": re.compile(r"[0-9]{1,2}\.[0-9]"),
    "performance state": re.compile(r"P[0-9]{1,2}"),
    "number": re.compile(r"[0-9]{1,4}"),
}


def like_a_field(cell: str) -> bool:
    """It could be a name in the header, of this or another driver."""
    return bool(_FIELD.fullmatch(cell))


def nearest_field(name: str) -> str | None:
    """The known field that a name is a damaged form of; None for a name unlike all of them."""
    if len(name) > LONGEST_FIELD:
        return None
    return next(iter(difflib.get_close_matches(name, FIELDS, n=1, cutoff=0.8)), None)


def fits(name: str, cell: str) -> bool:
    """Whether a cell can be the value of that field, as far as is known of it."""
    form = FIELDS.get(name, "")
    if form == "=name":
        return form_of(cell) is None and bool(re.search("[A-Za-z]{2}", cell)) and " MiB" not in cell
    return not form.startswith("=") or bool(_FORMS[form[1:]].fullmatch(cell))


def form_of(cell: str) -> str | None:
    """What a cell is by its looks alone: "uuid", "bus id", ... as in `FIELDS`; else None."""
    return next((name for name, form in _FORMS.items() if form.fullmatch(cell)), None)
