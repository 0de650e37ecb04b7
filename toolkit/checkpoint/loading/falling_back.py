"""Loads the newest undamaged checkpoint of a run: renames a damaged one and tries the next older one."""

from collections import defaultdict
from functools import partial
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from toolkit.checkpoint.errors import CorruptCheckpointError, load_error
from toolkit.checkpoint.folder.choice import others_beside
from toolkit.checkpoint.folder.commit import move_aside
from toolkit.checkpoint.folder.verify import open_manifest_text, verify_quickly
from toolkit.checkpoint.folder.writer_lock import refuse_others
from toolkit.checkpoint.format.layout import aside_of, committed_steps
from toolkit.checkpoint.format.manifest import Manifest
from toolkit.checkpoint.format.manifest_file import manifest_in
from toolkit.checkpoint.loading.one_checkpoint import LoadedCheckpoint, fill_on_all, load_exactly, plan_on_all
from toolkit.checkpoint.loading.planned import LoadTarget
from toolkit.checkpoint.loading.planner import is_optional, put_value
from toolkit.comm.agreement import Ranks
from toolkit.comm.rank_failure import RankFailure
from toolkit.errors import OwnFailureError, ToolkitError
from toolkit.terminal.talk import say_beside

MOST_BYTES_EACH = 1 << 20  # the size limit of one copied tensor
MOST_BYTES = 4 << 20  # the size limit of all copies together, as every load makes them
_NAMES_SHOWN = 3


class StartValues:
    """Restores target tensors that a damaged checkpoint has overwritten, in case the next checkpoint lacks them.

    It copies small tensors before the load, up to `MOST_BYTES` together: first those with `optional` keys, the smallest
    first, because only these may be missing in a checkpoint. For others it only records which ones may have been
    overwritten.
    """

    def __init__(self, wanted: LoadTarget) -> None:
        self._tensors, self._optional = wanted.tensors, wanted.optional
        flat, self._paths = wanted.flat
        self._values = {name: value for name, value in flat.items() if not isinstance(value, torch.Tensor)}
        small: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = defaultdict(list)
        copied = set()
        self._overwritten: set[str] = set()
        self._damaged: list[str] = []
        free = MOST_BYTES

        def place(name: str) -> tuple[bool, int]:
            return (False, flat[name].numel()) if is_optional(name, self._optional) else (True, 0)

        for name in sorted((name for name in flat if name not in self._values), key=place):
            local = _on_this_rank(flat[name])
            if local.layout != torch.strided or (size := local.nbytes) > MOST_BYTES_EACH:
                continue
            if size > free:
                break
            free -= size
            small[local.dtype, local.device].append(local)
            copied.add(name)
        # One copy of many tensors is ten times as fast as many copies.
        self._copies = [(of_type, torch.cat([local.reshape(-1) for local in of_type])) for of_type in small.values()]
        self._large = flat.keys() - self._values.keys() - copied

    def may_be_overwritten_by(self, folder: Path, manifest: Manifest) -> None:
        """Record that a load from `folder` failed after it may have written into tensors."""
        self._damaged.append(folder.name)
        self._overwritten |= (self._large | self._values.keys()) & (manifest.tensors.keys() | manifest.objects.keys())

    def restore(self, following: Manifest | None, *, fix: str) -> None:
        """Restore values that may have been overwritten, before `following`, if any, is loaded.

        Raises an OwnFailureError with `fix` if `following` lacks an overwritten tensor that was not copied.
        """
        if not self._damaged:
            return
        for tensors, copies in self._copies:
            for tensor, copy in zip(tensors, copies.split([tensor.numel() for tensor in tensors]), strict=True):
                tensor.copy_(copy.view(tensor.shape))
        for name in self._overwritten & self._values.keys():
            put_value(self._tensors, self._paths[name], self._values[name])
        lost = sorted(name for name in self._overwritten & self._large if self._stays(name, following))
        if lost:
            named = ", ".join(lost[:_NAMES_SHOWN])
            more = f" and {len(lost) - _NAMES_SHOWN} more" if len(lost) > _NAMES_SHOWN else ""
            after = f"step {following.step} does not contain" if following is not None else "no other checkpoint has"
            raise OwnFailureError(
                f"{named}{more} may be partly overwritten by the damaged checkpoint {' and '.join(self._damaged)}, and "
                f"{after} the original value",
                fix=fix,
            )

    def _stays(self, name: str, following: Manifest | None) -> bool:
        """Return whether the next load leaves a tensor unchanged: it is missing, but optional."""
        if following is None:
            return True
        return name not in following.tensors and is_optional(name, self._optional)


def _on_this_rank(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


_START_AGAIN = "start the job again; the damaged checkpoint was renamed, so that the next attempt does not load it"


class Candidates:
    """The checkpoints in one folder with steps later than `after`, which a load may try. Used on rank 0 only."""

    def __init__(self, directory: Path, attempt: int, *, after: int) -> None:
        self._directory, self._attempt, self._after = directory, attempt, after
        self._passed: set[Path] = set()

    def newest(self) -> tuple[Path, str] | None:
        """Return the newest checkpoint with the text of its manifest, which is not checked; skips those without one."""
        while True:
            steps = committed_steps(self._directory)  # list again, because another process may have removed some
            tried = (step for step, folder in steps.items() if step > self._after and folder not in self._passed)
            step = max(tried, default=None)
            if step is None:
                return None
            try:
                return steps[step], open_manifest_text(steps[step])
            except CorruptCheckpointError as error:
                self.pass_over(steps[step], f"{Path(error.where).name}: {error.message}")

    def pass_over(self, folder: Path, reason: str) -> bool:
        """Skip a damaged checkpoint, and rename it if this process may. Return whether it is gone from its path."""
        self._passed.add(folder)
        if folder not in committed_steps(self._directory).values():  # the process that saves here removed this one
            say_beside(f"checkpoint {folder.name} was removed while it was read")
            return True
        try:
            refuse_others(self._directory, self._attempt)
            aside = move_aside(folder, "bad", self._attempt)
        except (OSError, ToolkitError) as error:
            say_beside(f"checkpoint {folder.name} is damaged: {reason}; it could not be renamed: {error}")
            return False
        say_beside(f"checkpoint {folder.name} is damaged and was renamed to {aside}: {reason}")
        return True

    def refuse_to_forget(self) -> None:
        """Raise an error if only damaged checkpoints exist: only the user may decide to start from step 0."""
        aside = {path: aside_of(path) for path in sorted(self._directory.glob("step-*"))}
        bad = [
            path for path, parts in aside.items() if path in self._passed or (parts is not None and parts[1] == "bad")
        ]
        if bad:
            raise CorruptCheckpointError(
                f"all checkpoints are damaged: {', '.join(path.name for path in bad)}",
                where=str(self._directory),
                fix=f"{others_beside(bad[-1])}, or remove the damaged checkpoints to start from step 0",
            )


def _good_manifest(folder: Path, text: str, *, checks_folder: bool) -> Manifest:
    """Return the manifest in `text`. Raises CorruptCheckpointError if it is damaged, or the folder does not match it.

    Only one rank checks the folder, that is, its step and its files: a failure of one rank is a failure on all.
    """
    if not checks_folder:
        return manifest_in(folder, text)
    manifest, problems = verify_quickly(folder, text)
    if manifest is None or problems:
        raise CorruptCheckpointError("; ".join(map(str, problems)))
    return manifest


class FallingBack:
    """Loads the newest undamaged checkpoint of a folder on all ranks."""

    def __init__(self, ranks: Ranks, directory: Path, attempt: int, wanted: LoadTarget, *, after: int = -1) -> None:
        self._ranks, self._directory, self._wanted = ranks, directory, wanted
        self._candidates = Candidates(directory, attempt, after=after)
        self._fix = _START_AGAIN
        self._start: StartValues | None = None  # on this rank; none before its first load

    def load_newest(self) -> LoadedCheckpoint | None:
        """Fill the tensors. Returns None if there is no undamaged checkpoint.

        Raises an OwnFailureError if a damaged checkpoint may have overwritten a tensor that the next one lacks and that
        was too large to copy beforehand.
        """
        # Ranks parse the manifest at the same time, which takes less time than to send the parsed one.
        while (newest := self._ranks.from_rank_zero(self._candidates.newest)) is not None:
            folder, text = newest
            read = partial(_good_manifest, folder, text, checks_folder=self._ranks.rank == 0)
            plan = None
            try:
                plan = plan_on_all(self._ranks, folder, read, self._wanted, self._restore)
                return fill_on_all(self._ranks, folder, plan, self._wanted)
            except CorruptCheckpointError as error:
                reason = str(error)
            is_gone = self._ranks.from_rank_zero(partial(self._candidates.pass_over, folder, reason))
            if plan is None:  # no tensor was overwritten
                continue
            assert self._start is not None
            self._start.may_be_overwritten_by(folder, plan.manifest)
            if not is_gone:
                self._fix = f"rename {folder.name} by hand, because this process could not, and start the job again"
        return None

    def load_instead(self, source: Path) -> LoadedCheckpoint:
        """Fill the tensors from a folder that the user named, after `load_newest` found no checkpoint."""
        return load_exactly(self._ranks, source, self._wanted, before=self._restore)

    def load_nothing(self, *, may_forget: bool) -> None:
        """Restore the tensors to their values before `load_newest`, which found no checkpoint.

        Raises a CorruptCheckpointError if there are damaged checkpoints, unless the run `may_forget` them.
        """
        if not may_forget:
            self._ranks.from_rank_zero(self._candidates.refuse_to_forget)
        try:
            self._ranks.together(lambda: self._restore(None))
        except RankFailure as failure:
            raise load_error(self._directory, failure) from failure

    def _restore(self, following: Manifest | None) -> None:
        """Copy this rank's values before its first load, and restore them before later ones."""
        if self._start is None:
            self._start = StartValues(self._wanted)
        self._start.restore(following, fix=self._fix)
