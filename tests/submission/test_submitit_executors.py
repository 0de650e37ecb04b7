"""The private names of submitit that toolkit overrides still do in submitit what toolkit expects of them."""

from pathlib import Path
from typing import Any

import pytest
from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from toolkit.submission.submitit_executors import SlurmScriptExecutor


def test_submitit_submits_its_command_by_the_names_that_toolkit_overrides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = []

    class Probe(SlurmExecutor):
        @property
        def _submitit_command_str(self) -> str:
            return "python -m program"

        def _submit_command(self, command: str) -> SlurmJob[Any]:
            commands.append(command)
            return SlurmJob(folder=self.folder, job_id="12", tasks=[0])

    monkeypatch.setattr(SlurmExecutor, "affinity", classmethod(lambda cls: 1))  # as on a host that has srun
    assert Probe(tmp_path).submit(print).job_id == "12"
    assert commands == ["python -m program"]
    own = {"_internal_process_submissions", "_submit_command", "_submitit_command_str"}
    assert own <= vars(SlurmScriptExecutor).keys() and own <= set(dir(SlurmExecutor))
