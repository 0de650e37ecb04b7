"""Run the entry of a job: a function `main(world, config)`, a script as `__main__`, or an executable."""

import atexit
import ctypes
import gc
import importlib
import importlib.util
import json
import os
import runpy
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from toolkit.errors import OwnFailureError, ToolkitError
from toolkit.rank.flight_recorder import answer_requests
from toolkit.rank.missing_gpu import report_missing_gpu
from toolkit.rank.result import store_result
from toolkit.rank.torch_variables import set_for_program, set_for_script
from toolkit.rundir.arguments import continued
from toolkit.rundir.files import read_json, utc_now, write_json, write_text
from toolkit.rundir.layout import RunDirectory
from toolkit.slurm.sbatch_options import last_value_of
from toolkit.supervise.shape import shape_of_job


def end_threads() -> None:
    """Wait for threads and stop idle executor threads, as the interpreter does at shutdown."""
    threading._shutdown()  # type: ignore[attr-defined]


def run_exit_handlers() -> None:
    """Call the `atexit` handlers in reverse order, and clear them."""
    atexit._run_exitfuncs()


_OWN_FRAMES = (str(Path(__file__).parent), "<frozen runpy>")


def run_rank(environ: Mapping[str, str], rank: int) -> NoReturn:
    """Run the entry as rank `rank`, record its error, and exit the process."""
    attempt = RunDirectory(Path(environ["TOOLKIT_RUN_DIR"])).attempt(int(environ["TOOLKIT_ATTEMPT"]))
    answer_requests(attempt.flight_file(rank))
    try:
        _run_entry(environ, rank)
    except SystemExit as leave:  # the script called sys.exit()
        if leave.code:
            try:
                if not isinstance(leave.code, int):
                    record_error(leave, 1, attempt.error_file(rank), rank, environ)
            finally:
                _leave_now(leave.code if isinstance(leave.code, int) else 1)
    except BaseException as error:  # noqa: BLE001  the outermost frame of the rank records every error
        code = error.exit_code if isinstance(error, ToolkitError) else 1
        try:
            record_error(error, code, attempt.error_file(rank), rank, environ)
        finally:
            _leave_now(code)
    _leave_well()


def _job_of(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the resolved job; {} if it is not readable."""
    try:
        job: dict[str, Any] = read_json(Path(environ["TOOLKIT_RESOLVED_JOB"]))
    except (OSError, ToolkitError):
        return {}
    return job


def record_error(error: BaseException, code: int, path: Path, rank: int, environ: Mapping[str, str]) -> None:
    """Log an error of a rank and write it to the error file of the rank, with the values of secrets hidden.

    The log has only the last line of an error after which the next attempt halves the micro-batch.
    """
    from toolkit.supervise.ending import halves_again
    from toolkit.supervise.secrets import hide

    job = _job_of(environ)
    secrets = [environ[name] for name in (job.get("env") or {}).get("secrets") or () if name in environ]
    lines = [hide(line, secrets) for line in _lines_of(error)]
    reason, fix = _reason_and_fix(error)
    is_expected = halves_again(job.get("restart") or {}, reason, int(environ.get("TOOLKIT_HALVINGS") or 0))
    _say("\n".join(lines[-1:] if is_expected else lines))
    try:
        write_json(
            path,
            {"rank": rank, "host": socket.gethostname(), "kind": _kind(error), "reason": hide(reason, secrets),
             "exit_code": code, "fix": hide(fix, secrets), "traceback": lines, "time": utc_now()},
        )  # fmt: skip
    except OSError as problem:  # the guard then tries to write a short error record
        _say(f"toolkit: cannot write {path}: {problem.strerror}")


def _reason_and_fix(error: BaseException) -> tuple[str, str]:
    """Return the message of an error, and the fix of an error of toolkit.

    DCP raises an exception on all ranks whose message contains the traceback of the failed rank; its last line counts.
    """
    if isinstance(error, ToolkitError):
        return error.message, error.fix
    if isinstance(error, SystemExit):
        return f"exit code 1: {error.code}", ""
    reason = traceback.format_exception_only(error)[-1].strip()
    if "Traceback (most recent call last)" not in reason:
        return reason, ""
    last = reason.splitlines()[-1].strip()
    cause, _, fix = last.partition(". Fix: ") if last.startswith("toolkit.errors.") else (last, "", "")
    return f"{type(error).__name__}: {cause}", fix


def _say(text: str) -> None:
    """Write to the log of the rank; ignore a full disk, so that the rank can exit."""
    with suppress(OSError):
        sys.stderr.write(text + "\n")


def _kind(error: BaseException) -> str:
    """Return the kind of the error record: "failed" if a retry may succeed, "refused" if it cannot."""
    if isinstance(error, SystemExit):
        return "exit"
    if isinstance(error, OwnFailureError):
        return "failed"
    return "refused" if isinstance(error, ToolkitError) else "exception"


def _leave_well() -> NoReturn:
    """Exit a completed rank: finish threads, exit handlers and MPI, but skip the teardown of the interpreter.

    Threads of gloo release Python objects late, and a release during the teardown would abort the process.
    """
    end_threads()
    run_exit_handlers()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
    _flush()
    # MPICH disconnects from its launcher only in exit() of the C library; otherwise Hydra kills all ranks.
    # PyDLL keeps the GIL, because DTensor caches release Python objects in exit() and would abort without it.
    ctypes.PyDLL(None).exit(0)
    raise AssertionError("exit() returned")


def _leave_now(exit_code: int) -> NoReturn:
    """Exit a failed rank without the finalizers of MPI and NCCL, which would wait for the other ranks."""
    try:
        _flush()
    finally:
        os._exit(exit_code & 0xFF)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # a full disk only loses log lines
            stream.flush()


def _lines_of(error: BaseException) -> list[str]:
    """Return the log lines of an error: a traceback that starts in user code, or the one line of a ToolkitError."""
    if isinstance(error, ToolkitError):
        return [f"toolkit: {error}"]
    if isinstance(error, SystemExit):
        return str(error.code).splitlines()
    frame = error.__traceback__
    while frame is not None and frame.tb_next and frame.tb_frame.f_code.co_filename.startswith(_OWN_FRAMES):
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(error), error, frame)).splitlines()


def _run_entry(environ: Mapping[str, str], rank: int) -> None:
    # Read plain JSON: only functions receive a ResolvedJob, so that other entries start without importing pydantic.
    job: dict[str, Any] = read_json(Path(environ["TOOLKIT_RESOLVED_JOB"]))
    entry = job["job"]["entry"]
    directory = Path(job.get("code_directory") or job["job_directory"])
    argv = [str(word) for word in [*(job["job"].get("argv") or []), *(job.get("argv") or [])]]
    if more := json.loads(environ.get("TOOLKIT_RESTART_ARGV") or "[]"):
        options = [str(word) for word in entry[1:]] if isinstance(entry, list) else []
        argv = continued([*options, *argv], more, where="restart.argv")
        entry = entry[:1] if isinstance(entry, list) else entry
    if job["job"].get("once"):
        run_batch_script(RunDirectory(Path(environ["TOOLKIT_RUN_DIR"])).batch_script, argv, job["job"]["sbatch"])
    if rank == 0:
        report_missing_gpu(job, RunDirectory(Path(environ["TOOLKIT_RUN_DIR"])).attempt(int(environ["TOOLKIT_ATTEMPT"])))
    if isinstance(entry, list):
        # Without a limit, each rank starts a thread per core of the node. `prepare` sets it for Python entries.
        cpus = shape_of_job(job).component_of(rank).cpus_per_rank
        os.environ.setdefault("OMP_NUM_THREADS", str(cpus or 1))
        set_for_program(rank, _interface(job))
        run_executable([*map(str, entry), *argv], directory)
    if ":" in entry:
        run_function(entry, directory, argv, Path(environ["TOOLKIT_RESOLVED_JOB"]), job)
    else:
        run_script(directory / entry, argv, job)


def _interface(job: Mapping[str, Any]) -> str:
    return str((job.get("network") or {}).get("interface") or "")


def run_function(entry: str, directory: Path, argv: Sequence[str], resolved_job: Path, job: Mapping[str, Any]) -> None:
    """Call the function of the entry as `main(world, config)`, with the process group initialized."""
    with _imports_uncollected():
        from toolkit.rank.preparation import prepare
        from toolkit.world.discover import discover

        world = discover()
        world.stop_watch.install()
        prepare(world, job)

        import torch.distributed as dist

        from toolkit.config.resolved import ResolvedJob
        from toolkit.world.rendezvous import start_groups

        config = ResolvedJob.from_json(resolved_job.read_text(encoding="utf-8"))
        start_groups(world, interface=_interface(job), timeout_s=float(config.restart.collective_timeout_s))
        sys.argv = [entry, *argv]
        main = load_function(entry, directory)
    value = None
    try:
        value = main(world, config)
    except SystemExit as leave:
        if leave.code:
            raise  # exit codes 0 and None mean success, even after `should_stop`
    except ToolkitError as error:
        config.placed(error)
        raise
    finally:
        world.stop_watch.tell_last_step()
    _await_saves()
    stopped = world.stop_watch.stop_agreed
    if world.rank == 0 and world.run_dir is not None and not stopped:
        store_result(RunDirectory(world.run_dir), value, world.attempt)
    if dist.is_initialized():  # `main` may have destroyed the group
        dist.barrier()  # rank 0 must not close the store while another rank uses it
        dist.destroy_process_group()
    if stopped and world.run_dir is not None:
        attempt = RunDirectory(world.run_dir).attempt(world.attempt)
        write_text(attempt.done_marker(world.rank), "stopped\n")


@contextmanager
def _imports_uncollected() -> Iterator[None]:
    """Import without cyclic garbage collection, and exempt what was imported from it.

    torch and its compiler allocate millions of objects that stay: collections in between took a fifth of the import.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(0)  # not gc.disable(): a module that calls it at import keeps its choice
    try:
        yield
    finally:
        gc.freeze()
        gc.set_threshold(*thresholds)


def _await_saves() -> None:
    """Wait for background saves, since they need the process group, and since a failed save fails the job."""
    background = sys.modules.get("toolkit.checkpoint.saving.background")
    if background is not None:
        background.wait_for_all()


def load_function(entry: str, directory: Path) -> Any:
    """Return the function of the entry `file.py:name` (relative to `directory`) or `package.module:name`."""
    module_name, _, function_name = entry.rpartition(":")
    sys.path.insert(0, str(directory))
    if module_name.endswith(".py"):
        path = directory / module_name
        _require_file(path)
        specification = importlib.util.spec_from_file_location(path.stem, path)
        assert specification is not None and specification.loader is not None  # any .py has a loader
        module = importlib.util.module_from_spec(specification)
        sys.modules[path.stem] = module
        specification.loader.exec_module(module)
    else:
        module = _import(module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ToolkitError(
            f"{module_name} has no function {function_name!r}", where="job.entry", fix="define it, or fix job.entry"
        )
    return function


def _require_file(path: Path) -> None:
    if not path.is_file():
        raise ToolkitError(
            f"file not found on {socket.gethostname()}",
            where=str(path),
            fix="correct job.entry, or move the job folder to a file system that all nodes share",
        )


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists, but one of its own imports failed
        raise ToolkitError(
            f"module {error.name!r} not found on {socket.gethostname()}",
            where="job.entry",
            fix=f"install this module for {sys.executable}, or correct job.entry",
        ) from error


def run_script(path: Path, argv: Sequence[str], job: Mapping[str, Any]) -> None:
    """Run a script as torchrun does: with its variables set, so that the script can initialize from `env://`."""
    _require_file(path)
    from toolkit.rank.preparation import prepare
    from toolkit.world.discover import discover

    world = discover()
    prepare(world, job)
    store = set_for_script(world, _interface(job))
    sys.argv = [str(path), *argv]
    sys.path.insert(0, str(path.parent))
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as leave:
        if leave.code:
            raise
    _await_saves()
    del store  # the store of rank 0 must exist until the script ends


def run_executable(argv: Sequence[str], directory: Path) -> NoReturn:
    """Replace this process by a program; a name with a slash is relative to the job file."""
    program = argv[0]
    if "/" in program and not program.startswith("/"):
        program = str(directory / program)
    try:
        os.execvp(program, [program, *argv[1:]])
    except OSError as error:
        raise ToolkitError(
            f"cannot run {program}: {error.strerror}",
            where="job.entry",
            fix="set job.entry to a path that exists and is executable on the nodes",
        ) from error


# The variables that toolkit adds for its own processes; users may set others, such as TOOLKIT_SITE.
_OF_TOOLKIT = (
    "ATTEMPT", "DEFAULT_LOG", "FOREIGN", "LAUNCHER", "LAUNCHER_PID", "LC_CTYPE", "OUTPUTS", "RANK", "RESOLVED_JOB", "RESTART_ARGV", "RUN_DIR", "SIGNAL", "START",
    "STEP_SIGNAL",
)  # fmt: skip


def run_batch_script(script: Path, argv: Sequence[str], options: Sequence[str]) -> NoReturn:
    """Replace this process by the interpreter in the `#!` line, as the kernel does; `options` are those of the script."""
    environment = dict(os.environ)
    environment["LC_CTYPE"] = environment.get("TOOLKIT_LC_CTYPE", "")  # Python may have set it
    for name in (*(f"TOOLKIT_{name}" for name in _OF_TOOLKIT), *([] if environment["LC_CTYPE"] else ["LC_CTYPE"])):
        environment.pop(name, None)
    if not last_value_of(options, "open-mode"):  # srun would use ours
        environment.pop("SLURM_OPEN_MODE", None)
    if "SLURM_TASK_PID" in environment:
        environment["SLURM_TASK_PID"] = str(os.getpid())
    if folder := environment.pop("TOOLKIT_CHDIR", ""):
        _change_folder(folder, script)
    with script.open("rb") as stream:
        interpreter, *rest = stream.readline().removeprefix(b"#!").strip().split(maxsplit=1)
    try:
        os.execve(interpreter, [interpreter, *rest, os.fsencode(script), *map(os.fsencode, argv)], environment)
    except OSError as error:
        raise ToolkitError(
            f"cannot run {os.fsdecode(interpreter)!a}: {error.strerror}",
            where=f"{script}:1",
            fix="correct the `#!` line of the script",
        ) from error


def _change_folder(folder: str, script: Path) -> None:
    try:
        os.chdir(folder)
    except OSError as error:
        raise ToolkitError(
            f"cannot change to the folder {folder}: {error.strerror}",
            where=f"{script}, --chdir",
            fix="create the folder",
        ) from error
