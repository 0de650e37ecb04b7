"""A metric that the job's script does not measure is refused before it is submitted, where the script can be read."""

import pytest

from toolkit.config.amend import amend_job
from toolkit.config.request import resolve_job
from toolkit.config.shipped import shipped_jobs
from toolkit.errors import ToolkitError
from toolkit.site.load import load_site

IMPORT = "from toolkit.train.state.saves import Saves\n"


@pytest.fixture
def with_best(tmp_path):
    """Resolve a job whose script is `script`, with `checkpoint.best = "accuracy"`."""

    def resolve(script: str, entry: str = "fit.py:main"):
        (tmp_path / "fit.py").write_text(script)
        job = tmp_path / "job.toml"
        job.write_text(f'[job]\nentry = "{entry}"\n[checkpoint]\nbest = "accuracy"\n')
        return resolve_job(job, site=None, environ={})

    return resolve


def test_the_shipped_job_measures_its_loss_alone():
    job = shipped_jobs()["train_lm"]
    with pytest.raises(ToolkitError) as refused:
        resolve_job(job, site=None, environ={}, settings=["checkpoint.best=los"])
    said = f"--set checkpoint.best=los:checkpoint.best: {job.with_suffix('.py')} does not measure 'los', only loss. Fix: write 'loss', "
    assert str(refused.value).startswith(said)
    recorded = resolve_job(job, site=None, environ={}, settings=["checkpoint.best=loss", "checkpoint.keep_best=1"])
    with pytest.raises(ToolkitError, match="does not measure 'los'"):
        amend_job(recorded, site=load_site("local"), settings=["checkpoint.best=los"])


def test_a_trainer_measures_its_validation_where_it_validates():
    job, best = shipped_jobs()["train_lm"], "checkpoint.best=validation_loss"
    assert resolve_job(job, site=None, environ={}, settings=[best, "train.validate_every=5"]).checkpoint.best
    with pytest.raises(ToolkitError, match="does not measure 'validation_loss', only loss") as refused:
        resolve_job(job, site=None, environ={}, settings=[best])
    assert refused.value.fix.endswith("or set train.validate_every")


@pytest.mark.parametrize(
    ("call", "only"),
    [
        ("Saves(world, state, checkpointer, config)", "loss"),
        ("Saves(world, state, checkpointer, config, {'perplexity': measure})", "loss, perplexity"),
        ("Saves(world, state, checkpointer, config, measures={'a': f, 'b': g})", "loss, a, b"),
    ],
)
@pytest.mark.parametrize("module", ["toolkit.train.state.saves", "toolkit.train.saves"])
def test_what_a_script_measures_is_named(with_best, call, only, module):
    with pytest.raises(
        ToolkitError, match=rf"job.toml:4:checkpoint.best: .*fit.py does not measure 'accuracy', only {only}\. "
    ):
        with_best(f"from {module} import Saves\ndef main(world, config):\n    saves = {call}\n")


@pytest.mark.parametrize(
    "script",
    [
        f"{IMPORT}def main(w, c): Saves(w, s, k, c, {{'accuracy': f}})",
        f"{IMPORT}def main(w, c): Saves(w, s, k, c, measures)",
        f"{IMPORT}def main(w, c): Saves(w, s, k, c, {{**measures}})",
        f"{IMPORT}def main(w, c): Saves(w, s, k, c, {{name: f}})",
        f"{IMPORT}def main(w, c): Saves(*everything)",
        f"{IMPORT}def main(w, c): Saves(w, s, k, c, **more)",
        f"{IMPORT}def main(w, c): Saves(w, s, k, c) if quick else Saves(w, s, k, c, measures)",
        "from own import Saves\ndef main(w, c): Saves(w, s, k, c)",
        "def main(w, c): train(w, c)",
    ],
)
def test_what_a_script_does_not_say_is_left_to_the_ranks(with_best, script):
    assert with_best(script).checkpoint.best == "accuracy"


def test_a_script_that_is_no_python_of_ours_is_left_to_the_ranks(with_best):
    assert with_best("def main(:", entry="fit.py").checkpoint.best == "accuracy"
