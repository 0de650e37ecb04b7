"""Offer the preset of a program that the script of a job looks like."""

import ast
from collections.abc import Iterator

from toolkit.config.presets import Preset, presets
from toolkit.config.resolved import ResolvedJob
from toolkit.submission.preflight.unpassed import parse_script, python_file
from toolkit.supervise.launch import is_unmanaged
from toolkit.terminal.talk import say


def offer_preset(job: ResolvedJob) -> None:
    """Say in one line which preset the script looks like, unless the job sets `restart.argv` or `observe.step_line`."""
    if job.restart.argv or job.observe.step_line or not is_unmanaged(job.job.entry):
        return
    script = python_file(job)
    imported = set(_imported(parse_script(script)))
    if "toolkit" in imported:  # it reports its steps, or continues, by itself
        return
    for name, preset in presets().items():
        if script is not None and imported.intersection(preset.imports):
            if parts := ", ".join(_parts(name, preset, imported, job)):
                say(f"note: {script.name} looks like {name}: {parts}")
            return


def _parts(name: str, preset: Preset, imported: set[str], job: ResolvedJob) -> Iterator[str]:
    if preset.argv and (not preset.parsers or imported.intersection(preset.parsers)):
        yield f'restart.argv = "{name}" continues it after a walltime'
    elif preset.progress and not job.restart.progress:
        yield f'restart.progress = "{preset.progress}" shows its progress'
    if preset.step_line:
        yield f'observe.step_line = "{name}" shows its steps'


def _imported(module: ast.Module) -> Iterator[str]:
    """Yield the imported modules with the packages that contain them, and imported names as `module:name`."""
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield from (f"{node.module}:{one.name}" for one in node.names)
            modules = [node.module, *(f"{node.module}.{one.name}" for one in node.names)]
        else:
            modules = [one.name for one in node.names] if isinstance(node, ast.Import) else []
        for one in modules:
            words = one.split(".")
            yield from (".".join(words[:count]) for count in range(1, len(words) + 1))
