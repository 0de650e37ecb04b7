"""A job with GPUs that runs on the CPU says so in the log of rank 0 and in `status`; a job without GPUs says nothing."""

import pytest

NOTE = "no GPU found, rank 0 computes on the CPU"


@pytest.mark.parametrize("entry", ['"work.py"', '["true"]'])
def test_a_job_with_gpus_on_a_node_without_any(toolkit, entry):
    (toolkit.folder / "work.py").write_text("print('works')\n")
    job = f'[job]\nentry = {entry}\ngpus_per_node = {{}}\n[env.vars]\nCUDA_VISIBLE_DEVICES = ""\nROCR_VISIBLE_DEVICES = ""\n'
    (toolkit.folder / "job.toml").write_text(job.format(1))
    toolkit.ok("run", toolkit.folder / "job.toml")
    assert NOTE in toolkit.ok("logs", "last", "--rank", "0")
    assert NOTE in toolkit.ok("status", "last")
    (toolkit.folder / "job.toml").write_text(job.format(0))
    toolkit.ok("run", toolkit.folder / "job.toml")
    assert NOTE not in toolkit.ok("logs", "last", "--rank", "0") + toolkit.ok("status", "last")
