"""`restart.argv`: what is refused, and what the name of a preset stands for."""

import pytest

from toolkit.config.amend import amend_job
from toolkit.config.presets import presets
from toolkit.errors import ToolkitError
from toolkit.site.load import load_site

JOB = "[job]\nentry = {entry}\nargv = ['--lr=1', '--lr=2']\n[restart]\n{restart}\n"


@pytest.fixture
def of_program(resolve):
    def of(restart, entry="['true', '--a=1']", **more):
        return resolve(text=JOB.format(entry=entry, restart=restart), site=load_site("local"), **more)

    return of


@pytest.mark.parametrize(
    ("entry", "restart", "message"),
    [
        ("'train.py:main'", "argv = ['--x']",
         "job.toml:5:restart.argv: has no effect for a function, which receives no arguments. "
         "Fix: remove argv; a function calls toolkit.is_restart()"),
        ("['true']", "argv = ['--x={newest}']",
         "job.toml:5:restart.argv: {newest} has no path without restart.progress, whose newest match it is. "
         'Fix: set progress to a pattern such as "out/step-*.pt"'),
        ("['true']", "progress = 'a'\nargv = ['{latest}']",
         "job.toml:6:restart.argv: expected no name in braces but {newest}, got {latest}. Fix: write {newest}"),
        ("['true']", "argv = ['--lr=3']",
         "job.toml:5:restart.argv: lr occurs 2 times in the arguments: --lr=1 --lr=2. Fix: write it once in the arguments"),
        ("['true', '--a', 'b']", "argv = ['--a=3']",
         "job.toml:5:restart.argv: --a b in the arguments: b may be a value of --a or not. "
         "Fix: write --a=b, or write what is not its value before --a"),
        ("['true', '--a=1', '--a=2']", "argv = ['--a=3']",
         "job.toml:5:restart.argv: a occurs 2 times in the arguments: --a=1 --a=2. Fix: write it once in the arguments"),
    ],
)  # fmt: skip
def test_what_could_not_take_effect_is_refused(of_program, entry, restart, message):
    with pytest.raises(ToolkitError) as caught:
        of_program(restart, entry)
    assert str(caught.value).endswith(message)


@pytest.mark.parametrize("argv", ["'hf'", "['--from', '{newest}']"])
def test_the_newest_file_of_all_tasks_is_refused(resolve, site, argv):
    job = f"account = 'a'\narray = '0-1'\nentry = 'train.py'\n[restart]\nprogress = '*/step-*'\nargv = {argv}\n"
    with pytest.raises(
        ToolkitError, match=r"job\.toml:7:restart\.argv: \{newest\} may be a file of another task: .* Fix: "
    ):
        resolve(text=f"[job]\n{job}", site=site)
    assert resolve(text=f"[job]\n{job}".replace(argv, "['--resume']"), site=site).job.array == "0-1"


def test_braces_of_other_programs_are_arguments(of_program):
    assert of_program("""argv = ['--set={"a": 1}', '{}']""").restart.argv == ['--set={"a": 1}', "{}"]


def test_a_preset_also_names_its_files_and_a_resume_keeps_them(of_program):
    job = of_program("argv = 'nanogpt'")
    assert (job.restart.argv, job.restart.progress) == (["--init_from=resume"], "out*/ckpt.pt")
    assert job.origin("restart.progress") == job.origin("restart.argv")
    again = amend_job(job, site=load_site("local"), settings=["restart.crashes=5"])
    assert (again.restart.argv, again.restart.progress) == (["--init_from=resume"], "out*/ckpt.pt")


def test_another_preset_at_a_resume_names_its_own_files(of_program):
    job, to_litgpt = of_program("argv = 'nanogpt'"), ["restart.argv=litgpt"]
    amended = amend_job(job, site=load_site("local"), settings=to_litgpt)
    assert (amended.restart.argv, amended.restart.progress) == (["--resume=true"], presets()["litgpt"].progress)
    back = amend_job(amended, site=load_site("local"), settings=["restart.argv=nanogpt"])
    assert back.restart.progress == "out*/ckpt.pt"


def test_files_that_the_job_names_stay(of_program):
    job = of_program("argv = 'nanogpt'\nprogress = 'a/*.pt'")
    amended = amend_job(job, site=load_site("local"), settings=["restart.argv=litgpt"])
    assert job.restart.progress == amended.restart.progress == "a/*.pt"


def test_an_unknown_preset_is_refused(of_program):
    with pytest.raises(ToolkitError, match=r"expected a list, or a preset of .*nanogpt.*, got 'nanogtp'"):
        of_program("argv = 'nanogtp'")


@pytest.mark.parametrize("name", [name for name, preset in presets().items() if preset.argv])
def test_every_preset_is_valid(of_program, name):
    assert of_program(f"argv = '{name}'").restart.argv == presets()[name].argv


@pytest.mark.parametrize(
    ("name", "saved"),
    [
        ("nanogpt", "out-owt/ckpt.pt"),
        ("megatron", "checkpoints/iter_0000100"),
        ("litgpt", "out/pretrain/step-00000100/lit_model.pth"),
        ("litgpt", "out/finetune/full/step-000100/lit_model.pth"),
        ("lightning", "lightning_logs/version_0/checkpoints/epoch=0-step=100.ckpt"),
        ("hf", "trainer_output/checkpoint-100"),
        ("deepspeed", "checkpoints/global_step100"),
    ],
)
def test_a_preset_searches_the_folder_of_output_only(tmp_path, name, saved):
    """What a link to large data contains is not searched, although its names would match."""
    for path in (tmp_path / saved, tmp_path / "data" / "a" / saved):
        path.mkdir(parents=True)
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.glob(presets()[name].progress)] == [saved]
