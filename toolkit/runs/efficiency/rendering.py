"""Print a run's efficiency: the use of each requested resource, then the flags to change."""

from collections.abc import Callable, Iterator
from statistics import median_low

from toolkit.errors import counted
from toolkit.runs.efficiency.report import Efficiency, Share
from toolkit.runs.status.state_table import state_phrase
from toolkit.slurm.times import format_slurm_time
from toolkit.units import format_bytes_in

__all__ = ["lines_of"]

_GIB = 2**30


def lines_of(efficiency: Efficiency) -> Iterator[str]:
    """Return the lines: the use of each requested resource, then the flags to change."""
    status, steps = efficiency.status, efficiency.steps
    job = f" (job {status.full_job_id})" if status.job_id else ""
    shape = f"{counted(status.starts, 'start')}, {counted(status.attempts, 'attempt')}"
    yield f"{status.job_name} {status.run_id}{job} {state_phrase(status.state)}, {shape}"
    yield f"took      {efficiency.node_hours:.2f} node-hours" + (
        f", {efficiency.gpu_hours:.2f} GPU-hours" if efficiency.gpu_hours else ""
    )
    yield f"walltime  {_line(efficiency.walltime_s, _seconds)}"
    peak = f", at most {efficiency.cpus_peak:.1f} at once on a node" if efficiency.cpus_peak is not None else ""
    yield f"CPU       {_line(efficiency.cpu_s, _cpu_time)}{peak}"
    yield from _of_tasks({one.task: one.cpu_share or 0.0 for one in efficiency.tasks}, lambda share: f"{share:.0%}")
    mean = f", {_in_gib(efficiency.memory_mean_bytes)} on average" if efficiency.memory_mean_bytes is not None else ""
    yield f"memory    {_line(efficiency.memory_bytes, _in_gib)}{mean}"
    yield from _of_tasks({one.task: one.memory_peak_bytes for one in efficiency.tasks}, _in_gib)
    if efficiency.gpus is not None:
        memory = f"{efficiency.gpus.memory_peak_bytes / _GIB:.1f} of {efficiency.gpus.memory_bytes / _GIB:.1f} GiB"
        busy = f"{efficiency.gpus.utilisation:.0%} busy (at most {efficiency.gpus.utilisation_peak:.0%})"
        yield f"GPUs      {busy}, {efficiency.gpus.idle} of {efficiency.gpus.count} never; memory at most {memory}"
    elif efficiency.gpu_hours:
        yield "GPUs      unknown"
    if steps is not None:
        again = "; the others were repeated" if steps.useful < steps.made else ""
        yield f"steps     {steps.useful} of {steps.made} counted ({steps.useful / steps.made:.0%}){again}"
    else:
        yield "steps     unknown"
    yield f"counted   by {efficiency.source}"
    for number, advice in enumerate(efficiency.advice):
        yield f"{'' if number else 'change':<10}{advice.change}: {advice.said}"
    if not efficiency.advice:
        yield "change    nothing, according to these figures"


def _of_tasks(used: dict[int, float], in_unit: Callable[[float], str]) -> Iterator[str]:
    """Yield the median and the maximum over the tasks of an array, because all tasks get the same resources."""
    if len(used) > 1:
        task, most = max(used.items(), key=lambda item: item[1])
        yield f"{'':<10}median of {len(used)} tasks {in_unit(median_low(used.values()))}; maximum {in_unit(most)}, in task {task}"


def _in_gib(count: float) -> str:
    return format_bytes_in(count, "GiB", digits=2)


def _line(resource: Share, in_unit: Callable[[float], str]) -> str:
    if resource.used is None:
        return "unknown"
    if resource.asked is None or resource.share is None:
        return f"{in_unit(resource.used)}; the requested amount is unknown"
    return f"{in_unit(resource.used)} of {in_unit(resource.asked)} ({resource.share:.0%})"


def _cpu_time(seconds: float) -> str:
    if seconds >= 3600:
        return f"{seconds / 3600:.2f} CPU-hours"
    return f"{seconds:.0f} CPU-seconds" if seconds >= 100 else f"{seconds:.2f} CPU-seconds"


def _seconds(seconds: float) -> str:
    return format_slurm_time(round(seconds))
