"""Compute the ratios of `checkpoint_speed.py`, and format its results as tables for the docs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

OTHERS = ("DCP tuned", "DCP tuned, no CRC-32", "DCP as it comes", "torch.save", "safetensors")
LOADERS = ("DCP", "torch.load", "safetensors")
Cells = list[tuple[str, Callable[[dict[str, Any]], str]]]


def ratios(case: dict[str, Any]) -> dict[str, float]:
    """Return ratios of ours to the fastest method of each other group (below 1 is faster), and fractions of ours."""
    if "left_out" in case:
        return {}
    save, phase = case["median_s"]["save"], case["median_s"]["phase"]
    found = {}
    for ours in ("ours", "ours, always new files", "ours by dcp.save"):
        for other in OTHERS:
            found[f"save: {ours} / {other}"] = save[ours] / save[case["fastest"][other]]
    for what in ("load", "cold load"):
        load = case["median_s"].get(what, {})
        for ours in ("ours", "ours by dcp.load") if load else ():
            for other in LOADERS:
                found[f"{what}: {ours} / {other}"] = load[ours] / fastest_load(load, other)
    found["write phase of ours / raw, same files"] = phase["ours: write"] / phase["raw write, same files"]
    found["write phase of ours, always new files / raw, new files"] = (
        phase["ours, always new files: write"] / phase["raw write, new files"]
    )
    found["read phase of ours / raw"] = phase["ours: read"] / phase["raw read"]
    if "cold raw read" in phase:
        found["cold read phase of ours / raw"] = phase["ours: cold read"] / phase["cold raw read"]
    load = case["median_s"]["load"]
    found["digests: xxh3 alone / save"] = phase["xxh3 of the bytes"] / save["ours"]
    found["digests: xxh3 alone / load"] = phase["xxh3 of the bytes"] / load["ours"]
    found["digests: what leaving them out saves / save"] = 1 - save["ours, no digests"] / save["ours"]
    found["digests: what leaving them out saves / load"] = 1 - load["ours, no digests"] / load["ours"]
    return {name: round(value, 3) for name, value in found.items()}


def fastest_load(load: dict[str, float], group: str) -> float:
    """Return the fastest load among methods whose name is `group`, or starts with it and a comma."""
    return min(seconds for name, seconds in load.items() if name == group or name.startswith(f"{group},"))


def tables(result: dict[str, Any]) -> str:
    """Return all results as Markdown tables."""
    cases = [case for case in result["cases"] if "left_out" not in case]
    machine = result["machine"]
    about = (
        f"{machine['cores']} cores, torch {machine['torch']}, safetensors {machine['safetensors']}, load average "
        f"{machine['load_average']:.1f} at the start; medians of {result['rounds']} rounds, seconds."
    )
    cold = [case for case in cases if "cold load" in case["median_s"]]
    parts = [about, "Saving:", _table(_saving(), cases), "Loading from memory:", _table(_loading("load"), cases)]
    if cold:
        parts += [f"Loading from the disk ({result['cold']}):", _table(_loading("cold load"), cold)]
    parts += ["Writing, reading and digests, as ratios:", _table(_shares(), cases)]
    if result["planning"]:
        parts += [_planning(result["planning"])]
    left = [f"- {_name(case)}: skipped, {case['left_out']}" for case in result["cases"] if "left_out" in case]
    return "\n\n".join([*parts, *(["\n".join(left)] if left else [])])


def _name(case: dict[str, Any]) -> str:
    ranks = f"{case['ranks']} rank{'s'[: case['ranks'] - 1]}"
    return f"{ranks}, {case['megabytes']} MB in {case['tensors']:,} tensors, {case['folder']}"


def _table(cells: Cells, cases: Sequence[dict[str, Any]]) -> str:
    head = "| | " + " | ".join(name for name, _ in cells) + " |\n|---|" + "---:|" * len(cells)
    return "\n".join(
        [head, *(f"| {_name(case)} | " + " | ".join(cell(case) for _, cell in cells) + " |" for case in cases)]
    )


def _saving() -> Cells:
    def fastest(group: str) -> Callable[[dict[str, Any]], str]:
        return lambda case: f"{case['median_s']['save'][case['fastest'][group]]:.3f}"

    groups = ("ours", "ours, always new files", "ours by dcp.save", *OTHERS)
    ratio = ("ours / DCP tuned", lambda case: f"**{case['ratio']['save: ours / DCP tuned']:.2f}**")
    return [*((group, fastest(group)) for group in groups), ratio]


def _loading(what: str) -> Cells:
    def seconds(group: str) -> Callable[[dict[str, Any]], str]:
        if group.startswith("ours"):
            return lambda case: f"{case['median_s'][what][group]:.3f}"
        return lambda case: f"{fastest_load(case['median_s'][what], group):.3f}"

    ratio = ("ours / DCP", lambda case: f"**{case['ratio'][f'{what}: ours / DCP']:.2f}**")
    return [*((group, seconds(group)) for group in ("ours", "ours by dcp.load", *LOADERS)), ratio]


def _shares() -> Cells:
    def ratio(name: str) -> Callable[[dict[str, Any]], str]:
        return lambda case: f"{case['ratio'][name]:.2f}" if name in case["ratio"] else ""

    return [
        ("write / raw, same files", ratio("write phase of ours / raw, same files")),
        ("write / raw, new files", ratio("write phase of ours, always new files / raw, new files")),
        ("read / raw", ratio("read phase of ours / raw")),
        ("cold read / raw", ratio("cold read phase of ours / raw")),
        ("xxh3 alone / save", ratio("digests: xxh3 alone / save")),
        ("saved without digests / save", ratio("digests: what leaving them out saves / save")),
        ("xxh3 alone / load", ratio("digests: xxh3 alone / load")),
        ("saved without digests / load", ratio("digests: what leaving them out saves / load")),
    ]


def _planning(planned: dict[str, Any]) -> str:
    head = f"A save when nothing changed, {planned['ranks']:,} ranks with {planned['tensors']:,} tensors each, seconds:"
    parts = [f"| {name} | {seconds:.4f} |" for name, seconds in planned["median_s"].items()]
    totals = [f"| {name}: together | **{seconds:.4f}** |" for name, seconds in planned["total_s"].items()]
    ratio = [f"| {name} | **{value:.4f}** |" for name, value in planned["ratio"].items()]
    sent = [
        f"| DCP, bytes from each rank | {planned['dcp_bytes_from_a_rank']:,} |",
        f"| DCP, bytes to each rank | {planned['dcp_bytes_to_a_rank']:,} |",
    ]
    return "\n".join([f"{head}\n", "| | |\n|---|---:|", *parts, *totals, *ratio, *sent])
