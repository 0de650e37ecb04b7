"""`toolkit site check` before any rank begins: what is probed, and what Slurm does not take proves nothing."""

import json
from types import SimpleNamespace

import pytest
from slurm_of_a_site import install

from toolkit.rundir.states import RunState
from toolkit.runs.follow.follow import Follower
from toolkit.site.findings import Finding, Probe
from toolkit.site.load import load_site
from toolkit.upkeep import site_check
from toolkit.upkeep.site_check import _Begun, _judge

SITE = """[network]
interface = "ib0"
[partitions.cpu]
max_nodes = 2
[partitions.gpu]
gpus_per_node = 4
account_required = true
[partitions.gone]
[partitions.away]
"""


@pytest.fixture
def ours(toolkit, sites, tmp_path, monkeypatch):
    """A site whose sbatch refuses every job."""
    environ = sites(ours=SITE)
    refusal = "sbatch: error: Batch job submission failed: Invalid qos specification\n"
    install(tmp_path / "bin").respond("sbatch", stderr=refusal, code=1)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setenv("TOOLKIT_SITES", environ["TOOLKIT_SITES"])
    monkeypatch.delenv("SLURM_CONF", raising=False)
    return tmp_path


def check(toolkit, *words):
    said = toolkit("site", "check", *words, "--json")
    found = json.loads(said.out)["partitions"] if said.out else {}
    return said, {name: {one["check"]: one for one in findings} for name, findings in found.items()}


def test_a_probe_that_slurm_does_not_take_proves_nothing(toolkit, ours):
    said, found = check(toolkit, "ours")
    assert said.code == 1
    assert {name: {check: one["state"] for check, one in checks.items()} for name, checks in found.items()} == {
        "cpu": {"limits": "passed", "ranks": "unknown"},
        "gpu": {"limits": "passed", "ranks": "unknown"},
        "gone": {"limits": "passed", "ranks": "unknown"},
        "away": {"limits": "failed"},
    }
    assert found["cpu"]["ranks"]["detail"] == "not submitted: sbatch: Invalid qos specification"
    assert (
        "allows at" not in found["gpu"]["ranks"]["detail"] and "requires an account" in found["gpu"]["ranks"]["detail"]
    )
    assert found["gpu"]["ranks"]["fix"].startswith('set account = "..."')
    proof = json.loads((ours / "sites/ours.proof.json").read_text())
    assert set(proof["partitions"]) == {"away"}
    assert not list(toolkit.runs.glob("site_probe/*"))


def test_one_partition_alone_and_an_account(toolkit, ours):
    said, found = check(toolkit, "ours", "--partition", "gpu", "-A", "astro")
    assert set(found) == {"gpu"} and found["gpu"]["ranks"]["detail"].endswith("Invalid qos specification")
    assert "no probe ran; nothing was checked" in said.err
    assert not list((ours / "sites").glob("*.json"))


def test_the_table_names_each_fix(toolkit, ours):
    said = toolkit("site", "check", "ours", "--partition", "away")
    assert said.code == 1
    assert said.out.splitlines() == [
        "PARTITION  CHECK   STATE   DETAIL",
        "away       limits  failed  the partition does not exist in Slurm",
        "fix away, limits: remove [partitions.away] from the site file",
    ]


def test_a_site_file_without_partitions_is_probed_where_slurm_is_open(toolkit, ours, sites):
    sites(bare="")
    assert set(check(toolkit, "bare")[1]) == {"cpu", "debug", "gpu"}


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (
            ["ours", "--partition", "cpus"],
            4,
            "partition 'cpus' not found at site ours. Fix: use --partition cpu or gpu",
        ),
        (["local"], 2, "site local has no scheduler to check. Fix: `toolkit run mpi_hello` tests this host"),
    ],
)
def test_what_cannot_be_probed_is_refused(toolkit, ours, words, code, told):
    said = toolkit("site", "check", *words)
    assert said.code == code and told in said.err


def test_a_probe_that_runs_out_of_time_proves_nothing_and_is_given_more(run_directory):
    begun = _Begun(Probe("gpu", 2, 2, 0, "token", "/"), run_directory, Follower(run_directory), 60)
    (found,) = _judge(load_site("local"), begun, SimpleNamespace(state=RunState.TIMEOUT))
    assert found.state == "unknown"
    assert found.detail == "only 0 of 4 ranks had reported at the time limit of the probe, 0-00:01:00"
    assert found.fix == "allow more time: `toolkit site check local --partition gpu -t 10`"


def test_the_walltime_of_the_probes_is_the_users(toolkit, ours):
    said, found = check(toolkit, "ours", "--partition", "cpu", "-t", "2x")
    assert said.code == 1 and "'2x' is not a valid Slurm time" in found["cpu"]["ranks"]["detail"]


@pytest.mark.parametrize("again", ["through", "preempted"])
def test_a_preempted_probe_runs_again_when_the_others_are_through(toolkit, ours, monkeypatch, again):
    """Only a cluster preempts: here `cpu` is taken beside another probe, and then by nobody of ours, or by others' jobs."""
    turns = []

    def await_all(site, begun, wanted, tell):
        turns.append(begun)
        passed = [Finding("ranks", "passed", "4 ranks")]
        taken = len(begun) > 1 or again == "preempted"
        return [(name, None if name == "cpu" and taken else passed) for name in begun]

    monkeypatch.setattr(site_check, "_begin", lambda site, wanted, live, findings, tell: live.name)
    monkeypatch.setattr(site_check, "_await_all", await_all)
    said, found = check(toolkit, "ours", "--partition", "gpu", "--partition", "cpu")
    assert turns == [["gpu", "cpu"], ["cpu"]]
    assert (said.code, found["cpu"]["ranks"]["state"]) == ((0, "passed") if again == "through" else (1, "unknown"))
    if again == "preempted":
        assert found["cpu"]["ranks"]["fix"].endswith("`toolkit site check ours --partition cpu`")


def test_what_was_preempted_is_not_judged_and_a_fix_names_the_file_of_a_site_that_has_no_other_name(
    toolkit, run_directory, tmp_path
):
    begun = _Begun(Probe("gpu", 2, 2, 0, "token", "/"), run_directory, Follower(run_directory), 60)
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\nextends = "local"\n')
    assert _judge(load_site(str(path)), begun, SimpleNamespace(state=RunState.PREEMPTED)) is None
    (found,) = _judge(load_site(str(path)), begun, SimpleNamespace(state=RunState.TIMEOUT))
    assert found.fix == f"allow more time: `toolkit site check {path} --partition gpu -t 10`"
