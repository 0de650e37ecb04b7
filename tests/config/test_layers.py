"""The order of the layers, and that each value says where it came from."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.config.amend import amend_job
from toolkit.config.document import Flag, Origin
from toolkit.config.request import resolve_job
from toolkit.config.resolved import ResolvedJob
from toolkit.config.texts import read_text
from toolkit.errors import ToolkitError
from toolkit.site.load import load_site

LAYERS = ["built-in", "site", "job", "SBATCH_*", "TOOLKIT_*", "flag"]


@given(st.sets(st.sampled_from(LAYERS[1:])))
def test_the_highest_layer_that_says_something_wins(tmp_path_factory, present):
    """`qos` is the one key that every layer can set."""
    folder = tmp_path_factory.mktemp("layers")
    (folder / "job.toml").write_text(
        '[job]\nentry = ["true"]\naccount = "a"\n' + ('qos = "job"\n' if "job" in present else "")
    )
    site = _site(folder, 'qos = "site"' if "site" in present else "")
    environ = {}
    if "SBATCH_*" in present:
        environ["SBATCH_QOS"] = "SBATCH_*"
    if "TOOLKIT_*" in present:
        environ["TOOLKIT_JOB_QOS"] = "TOOLKIT_*"
    flags = {"job.qos": Flag("flag", "-q")} if "flag" in present else {}
    resolved = resolve_job(folder / "job.toml", site=site, environ=environ, flags=flags)
    winner = max(["built-in", *present], key=LAYERS.index)
    assert resolved.job.qos == ("" if winner == "built-in" else winner)
    assert resolved.origin("job.qos").layer == winner


def _site(folder, line):
    from toolkit.site.load import load_site

    path = folder / "s.toml"
    path.write_text(f'name = "s"\n[partitions.p]\ndefault = true\n{line}\n')
    return load_site(str(path))


def test_origins_name_the_line_the_variable_and_the_flag(tmp_path, resolve, site):
    resolved = resolve(
        'account = "a"\ntime = "90:00"',
        "[train]\nlr = 1\n[args]\nwidth = 8",
        site=site,
        environ={"SBATCH_TIMELIMIT": "30", "TOOLKIT_TRAIN_STEPS": "7", "SBATCH_NO_REQUEUE": "1"},
        settings=["args.depth=3"],
        flags={"job.nodes": Flag(2, "-N")},
    )
    job = tmp_path / "job.toml"
    assert resolved.origin("job.account") == Origin("job", f"{job}:3")
    assert resolved.origin("args.width") == Origin("job", f"{job}:8")
    assert resolved.origin("job.time") == Origin("SBATCH_*", "SBATCH_TIMELIMIT")
    assert resolved.origin("job.requeue") == Origin("SBATCH_*", "SBATCH_NO_REQUEUE")
    assert resolved.origin("train.steps") == Origin("TOOLKIT_*", "TOOLKIT_TRAIN_STEPS")
    assert resolved.origin("args.depth") == Origin("flag", "--set args.depth=3")
    assert resolved.origin("job.nodes") == Origin("flag", "-N 2")
    assert resolved.origin("job.constraint") == Origin("site", f"{tmp_path}/sites/cluster.toml:10")
    assert resolved.origin("train.batch") == Origin("built-in")
    assert (resolved.job.time_s, resolved.job.requeue, resolved.train.lr) == (1800, False, 1.0)


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ('"a b"', "a b"), ("'a b'", "a b"), ('"a\\tb"', "a\tb"), ("a b", "a b"), ('"a" "b"', '"a" "b"'), ('"', '"'),
        ("'a\"", "'a\""), ('""', ""),
    ],
)  # fmt: skip
def test_a_text_may_stand_in_quotes_as_in_a_file(typed, read):
    assert read_text(("job", "partition"), typed, where="--set") == read
    assert read_text(("env", "vars", "NAME"), typed, where="--set") == typed


def test_quotes_of_one_text_of_a_list_are_not_part_of_it():
    assert read_text(("job", "sbatch"), '"--hold"', where="--set") == ["--hold"]
    assert read_text(("job", "entry"), "'fit.py:main'", where="--set") == "fit.py:main"


def test_texts_are_read_by_the_type_of_their_key(resolve):
    resolved = resolve(
        settings=[
            "job.nodes=2-4",
            'job.entry=["a.out", "-x"]',
            "job.requeue=false",
            'data.paths=["a", "b"]',
            "env.pass=HF_HOME",
            "train.lr=1e-3",
            "env.vars.FLAG=1",
            "args.text=hello there",
            "args.number=0.5",
            "args.table.inner=[1, 2]",
        ]
    )
    assert (resolved.job.min_nodes, resolved.job.max_nodes) == (2, 4)
    assert resolved.job.entry == ["a.out", "-x"]
    assert resolved.job.requeue is False
    assert resolved.data.paths == ["a", "b"]
    assert resolved.env.passed == ["HF_HOME"]
    assert resolved.train.lr == 1e-3
    assert resolved.env.vars == {"FLAG": "1"}
    assert resolved.args == {"text": "hello there", "number": 0.5, "table": {"inner": [1, 2]}}


def test_a_later_value_takes_the_place_of_a_whole_table(resolve):
    resolved = resolve("", "[args]\nshape = { width = 8, depth = 2 }", settings=["args.shape=3"])
    assert resolved.args == {"shape": 3}
    resolved = resolve("", "[args]\nshape = 3", settings=["args.shape.width=8"])
    assert resolved.args == {"shape": {"width": 8}}


def test_variables_that_belong_to_others_are_left_alone(resolve):
    resolve(environ={"TOOLKIT_SITE": "x", "TOOLKIT_RUNS": "/r", "TOOLKIT_SITES": "/s", "TOOLKIT_TRAIN": "x"})


OF_PARTITIONS = """
name = "kinds"
[gpu]
request = "--gres=gpu:{count}"
[env]
modules = ["cuda/12"]
[network]
interface = "ib0"
vars = { NCCL_IB_HCA = "mlx5" }
[launcher]
kind = "srun"
mpi = "pmix"
[partitions.old]
default = true
[partitions.new]
gpus_per_node = 4
gpu_request = "--gpus-per-node=h100:{count}"
modules = []
interface = "hsn0"
launcher = "mpirun"
"""


def test_keys_of_a_partition_replace_those_of_the_site(resolve, tmp_path):
    path = tmp_path / "kinds.toml"
    path.write_text(OF_PARTITIONS)
    site = load_site(str(path))

    def kinds(job):
        return job.gpu.request, job.site_env.modules, job.network.interface, job.launcher.kind

    of_site, of_partition = (
        ("--gres=gpu:{count}", ["cuda/12"], "ib0", "srun"),
        ("--gpus-per-node=h100:{count}", [], "hsn0", "mpirun"),
    )
    new = resolve('partition = "new"', site=site)
    assert (kinds(resolve("", site=site)), kinds(new)) == (of_site, of_partition)
    assert (new.launcher.mpi, new.network.vars) == ("pmix", {"NCCL_IB_HCA": "mlx5"})
    assert new.origin("launcher.kind").detail == f"{path}:20"
    other = {"job.partition": Flag("old", "-p")}
    assert kinds(amend_job(ResolvedJob.from_json(new.to_json()), site=site, flags=other)) == of_site
    assert kinds(amend_job(ResolvedJob.from_json(new.to_json()), site=site)) == of_partition


def test_each_component_requests_the_gpus_of_its_partition(resolve, tmp_path):
    (tmp_path / "kinds.toml").write_text(
        OF_PARTITIONS.replace("mpirun", "auto").replace("default = true", "default = true\ngpus_per_node = 2")
    )
    parts = '[[component]]\npartition = "new"\n[[component]]\npartition = "old"\ngpus_per_node = 1'
    job = resolve("", parts, site=load_site(str(tmp_path / "kinds.toml")))
    assert [one.gpu.request for one in job.components] == ["--gpus-per-node=h100:{count}", "--gres=gpu:{count}"]
    assert (job.network.interface, job.launcher.kind) == ("hsn0", "auto")


def test_what_is_not_given_follows_from_the_partition(resolve, site):
    resolved = resolve('account = "a"', site=site)
    job = resolved.job
    assert (job.partition, job.constraint, job.qos) == ("gpu", "a100", "regular")
    assert (job.gpus_per_node, job.ranks_per_node, job.cpus_per_rank) == (4, 4, 16)
    assert resolved.partition_limits == site.partitions["gpu"]
    job = resolve('partition = "cpu"', site=site).job
    assert (job.gpus_per_node, job.ranks_per_node, job.cpus_per_rank, job.constraint) == (0, 1, 1, "")
    job = resolve('account = "a"\ngpus_per_node = 2\nranks_per_node = 1', site=site).job
    assert (job.ranks_per_node, job.cpus_per_rank) == (1, 32)
    job = resolve('account = "a"\nranks_per_node = 2', site=site).job
    assert (job.gpus_per_node, job.cpus_per_rank) == (2, 16)


@pytest.mark.parametrize(("shard", "zero"), [(1, 0), (4, 3)])
def test_zero_follows_shard(resolve, shard, zero):
    assert resolve("ranks_per_node = 4", f"[parallel]\nshard = {shard}").parallel.zero == zero


def test_zero_of_the_job_counts(resolve):
    assert resolve("ranks_per_node = 4", "[parallel]\nshard = 4\nzero = 1").parallel.zero == 1


def test_the_name_is_the_files_when_none_is_given(resolve):
    assert resolve().job.name == "job"
    assert resolve('name = "mine"').job.name == "mine"


def test_a_resolved_job_survives_json(tmp_path, resolve, site):
    resolved = resolve(
        'account = "a"\nnodes = "2-4"',
        '[env]\nvars = { A = "b\\nc" }\npass = ["HOME"]\n[args]\ndeep = { list = [1, 2.5, "x", true] }',
        site=site,
        argv=["--flag", "a b"],
    )
    assert ResolvedJob.from_json(resolved.to_json()) == resolved
    assert resolved.job_directory == tmp_path
    with pytest.raises(ToolkitError, match=r"^train: not a resolved job of this version of toolkit: .*Fix: submit"):
        ResolvedJob.from_json(resolved.to_json().replace('"train"', '"tarin"', 1))


def test_dates_in_args_reach_json_as_text(resolve):
    resolved = resolve("", "[args]\nday = 2026-01-02")
    assert ResolvedJob.from_json(resolved.to_json()).args == {"day": "2026-01-02"}


def test_reading_a_resolved_job_imports_neither_torch_nor_click():
    """The compute half reads it on every rank, so it must be light."""
    code = "import sys, toolkit.config.resolved; print({'torch', 'click', 'numpy'} & set(sys.modules))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "set()"


def test_a_source_is_the_same_folder_for_every_later_start(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    job = tmp_path / "job.toml"
    job.write_text('[job]\nentry = ["true"]\n[checkpoint]\nsource = "old/step-00000005"\n')
    monkeypatch.chdir(tmp_path / "elsewhere")
    resolved = resolve_job(job, site=None, environ={})
    assert resolved.job_directory / resolved.checkpoint.source == tmp_path / "old" / "step-00000005"
    flags = {"checkpoint.source": Flag("../new/step-00000007", "--set")}
    given_here = resolve_job(job, site=None, environ={}, flags=flags).checkpoint.source
    assert given_here == str(tmp_path / "elsewhere" / "../new/step-00000007")
