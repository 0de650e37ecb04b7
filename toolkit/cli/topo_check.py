"""`toolkit topo check`: check NCCL's environment, and from a log how a job used the network."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from toolkit.cli.options import RUN, runs_option
from toolkit.runs.named_runs import find
from toolkit.terminal.talk import say

if TYPE_CHECKING:
    from toolkit.topology.nccl.finding import Finding, Given
    from toolkit.topology.nccl.log_check import Plan
    from toolkit.topology.nccl.log_evidence import LogEvidence
    from toolkit.topology.nccl.node import AdapterPort
    from toolkit.topology.nccl.settings import FabricSetting
    from toolkit.topology.nccl.variables import Version
    from toolkit.topology.readers.nccl_log import NcclLog

EXISTING = click.Path(path_type=Path)


@click.command()
@click.option("--env-file", type=EXISTING, metavar="FILE", help="Check NAME=VALUE lines in FILE, not the environment.")
@click.option("--run", type=RUN, metavar="RUN", help="Check the variables that a run sets for its ranks.")
@runs_option
@click.option("--nccl", metavar="VERSION", help="NCCL version, such as 2.21.5 [the installed one].")
@click.option("--log", type=EXISTING, metavar="FILE", help="Check an NCCL_DEBUG=INFO log, and the variables in it.")
@click.option(
    "--facts", type=EXISTING, metavar="FILE", help="Output of `topo show --json` on a node, with what to expect."
)
@click.option("--expect-net", metavar="NET", help="Network that the log must show: IB, Socket, OFI or a plugin's name.")
@click.option("--expect-nics", metavar="NIC,NIC", help="Adapters that the log must show, all and no others.")
@click.option("--expect-gdr", type=click.Choice(["yes", "no"]), help="Whether the log must show GPUDirect RDMA.")
@click.option("--expect-rails", is_flag=True, help="Require that the log shows every connection on one rail.")
@click.option("--settings", is_flag=True, help="Print the variables to set for ranks, from this node's network.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; docs/fabric.md lists the keys.")
def check(
    env_file: Path | None,
    run: str | None,
    runs: Path | None,
    nccl: str | None,
    log: Path | None,
    facts: Path | None,
    expect_net: str | None,
    expect_nics: str | None,
    expect_gdr: str | None,
    expect_rails: bool,
    settings: bool,
    as_json: bool,
) -> int:
    """Check NCCL's variables in this environment, a file, a run or a log; and the log itself.

    The exit code is 1 if something is wrong, and 0 if there are only notes.

    \b
    toolkit topo check --env-file job.env --nccl 2.21.5
    toolkit topo check --log slurm-42.out --expect-net IB --expect-nics mlx5_0,mlx5_1
    """
    from toolkit.topology.nccl.lint import lint

    _refuse_both(env_file, run)
    _refuse_lonely(log, expect_net, expect_nics, expect_gdr, expect_rails)
    ports = _facts(facts)
    seen = _read_log(log) if log else None
    where, givens = _givens(env_file, run, runs, seen, log)
    version, said_by = _version(nccl, seen)
    findings = lint(givens, version, _here(where == "environment", ports))
    fine: list[str] = []
    if seen and log:
        from toolkit.topology.nccl.log_check import check_log

        plan = _plan(ports, expect_net, expect_nics, expect_gdr, expect_rails)
        of_log, fine = check_log(*seen, plan, str(log))
        findings = sorted([*of_log, *findings], key=lambda finding: finding.level != "wrong")
    advised = _settings(givens) if settings else None
    answer = {
        "ok": all(finding.level != "wrong" for finding in findings),
        "nccl": {"version": ".".join(map(str, version)) if version else None, "source": said_by},
        "checked": {"where": where, "variables": len(_ours(givens))},
        "findings": [finding.as_json() for finding in findings],
        "log": _log_as_json(*seen, fine) if seen else None,
        "settings": None if advised is None else [vars(setting) for setting in advised],
    }
    click.echo(json.dumps(answer, indent=1) if as_json else "\n".join(_lines(answer, findings, fine, advised)))
    return 0 if answer["ok"] else 1


def _refuse_both(env_file: Path | None, run: str | None) -> None:
    from toolkit.errors import ToolkitError

    if env_file and run:
        raise ToolkitError("--env-file cannot be combined with --run", where="topo check", fix="choose one of them")


def _refuse_lonely(log: Path | None, *expected: Any) -> None:
    from toolkit.errors import ToolkitError

    if log is None and any(expected):
        raise ToolkitError("the --expect options require a log", where="topo check", fix="pass --log FILE")


def _givens(
    env_file: Path | None, run: str | None, runs: Path | None, seen: tuple[NcclLog, LogEvidence] | None,
    log: Path | None,
) -> tuple[str, list[Given]]:  # fmt: skip
    from toolkit.topology.nccl import environment

    if env_file:
        return str(env_file), environment.of_file(env_file)
    if run:
        from toolkit.rundir.files import read_json
        from toolkit.rundir.find import newest_record

        record = newest_record(find(run, runs))
        return str(record), environment.of_job(read_json(record).get("job") or {}, record.name)
    if seen:
        return str(log), environment.of_log(seen[0].environment, str(log))
    return "environment", environment.of_process(os.environ)


def _read_log(path: Path) -> tuple[NcclLog, LogEvidence]:
    from toolkit.errors import ToolkitError
    from toolkit.topology.nccl.log_evidence import read_evidence
    from toolkit.topology.readers.nccl_log import parse_nccl_log

    try:
        text = path.read_bytes().decode("utf-8-sig", errors="replace")
    except OSError as error:
        raise ToolkitError(
            f"cannot be read: {error.strerror}", where=str(path), fix="pass a file that you can read"
        ) from error
    try:
        facts, warnings = parse_nccl_log(text)
    except ToolkitError as error:
        error.where = f"{path}:{error.where.removeprefix('line ')}" if error.where else str(path)
        error.fix = error.fix or "pass the output of a job that ran with NCCL_DEBUG=INFO"
        raise
    for warning in warnings:
        say(f"{path}: {warning}")
    return facts, read_evidence(text)


def _version(nccl: str | None, seen: tuple[NcclLog, LogEvidence] | None) -> tuple[Version | None, str]:
    from toolkit.topology.nccl.installed import find_nccl
    from toolkit.topology.nccl.variables import parse_version

    if nccl:
        return parse_version(nccl, "--nccl"), "--nccl"
    if seen:
        said = seen[1].version
        return (parse_version(said, "--log"), "the log") if said else (None, "the log does not show the version")
    return find_nccl(os.environ)


def _here(local: bool, ports: tuple[AdapterPort, ...] | None) -> Any:
    """Return the known devices: those in a facts file, else those of this node for its own environment."""
    from toolkit.topology.nccl.lint import Here
    from toolkit.topology.nccl.node import read_ports
    from toolkit.world.address import interface_addresses

    known = ports if ports is not None or not local else read_ports()
    adapters = tuple(dict.fromkeys(port.adapter for port in known)) if known is not None else None
    return Here(tuple(interface_addresses()) if local else None, adapters, sure=ports is not None)


def _facts(path: Path | None) -> tuple[AdapterPort, ...] | None:
    from toolkit.topology.nccl.node import read_facts_file

    return read_facts_file(path) if path else None


def _plan(
    ports: tuple[AdapterPort, ...] | None, network: str | None, nics: str | None, direct: str | None, rails: bool
) -> Plan:
    from dataclasses import replace

    from toolkit.topology.nccl.log_check import Plan, plan_from_ports

    plan = plan_from_ports(ports) if ports is not None else Plan()
    if network:
        plan = replace(plan, network=network)
    if nics:
        plan = replace(plan, devices=_names(nics), devices_named=True)
        plan = plan if plan.network else replace(plan, network="IB")
    return replace(plan, gpu_direct=None if direct is None else direct == "yes", rails=rails)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _settings(givens: list[Given]) -> list[FabricSetting]:
    from toolkit.topology.nccl.finding import effective
    from toolkit.topology.nccl.node import read_node
    from toolkit.topology.nccl.settings import fabric_settings
    from toolkit.world.address import choose_interface
    from toolkit.world.device import visible_gpus

    interface, _ = choose_interface("", single_node=False)
    node = read_node(interface, nodes=2, gpus=visible_gpus(os.environ))
    return fabric_settings(node, {name: given.value for name, given in effective(givens).items()})


def _ours(givens: list[Given]) -> set[str]:
    from toolkit.topology.nccl.lint import is_ours

    return {given.name for given in givens if is_ours(given.name) or given.name == "GLOO_SOCKET_IFNAME"}


def _log_as_json(log: NcclLog, evidence: LogEvidence, fine: list[str]) -> dict[str, Any]:
    from toolkit.topology.nccl.log_check import network_of

    return {
        "network": network_of(log, evidence),
        "devices": None if log.devices is None else list(log.devices),
        "gpu_direct": evidence.gpu_direct,
        "connections": len(evidence.hops),
        "as_planned": fine,
    }


def _lines(
    answer: dict[str, Any], findings: list[Finding], fine: list[str], advised: list[FabricSetting] | None
) -> list[str]:
    lines = [line for finding in findings for line in finding.lines()]
    lines += [f"fine: {said}" for said in fine]
    lines += [f"for ranks: {setting.line}  [{setting.source}]" for setting in advised or ()]
    version, said_by = answer["nccl"]["version"], answer["nccl"]["source"]
    wrong = sum(finding.level == "wrong" for finding in findings)
    nccl = f"NCCL {version} [{said_by}]" if version else f"NCCL unknown ({said_by}): checked as the newest"
    count, where = answer["checked"]["variables"], answer["checked"]["where"]
    counted = f"{count} variable{'' if count == 1 else 's'} in {where}"
    lines.append(f"{nccl}: {counted}, {wrong} wrong, {len(findings) - wrong} to note")
    return lines
