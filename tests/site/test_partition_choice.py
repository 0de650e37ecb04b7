"""Which partition a job gets where it names none, and what is said of it."""

import json

import pytest
from fake_slurm import FakeSlurm
from slurm_of_a_site import install

from toolkit.site.partitions import Candidate

SITE = """[partitions.cpu]
max_nodes = 4
max_time = "2-00:00:00"
cpus_per_node = 32
mem_gb_per_node = 100
[partitions.debug]
max_nodes = 1
max_time = "00:30:00"
cpus_per_node = 32
[partitions.gpu]
max_nodes = 2
cpus_per_node = 64
gpus_per_node = 4
"""


@pytest.fixture
def ours(sites, tmp_path, monkeypatch):
    """A site without a default partition, a sinfo that answers for it, and a job."""
    environ = sites(ours=SITE, marked=SITE.replace("[partitions.cpu]\n", "[partitions.cpu]\ndefault = true\n"))
    install(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setenv("TOOLKIT_SITES", environ["TOOLKIT_SITES"])
    job = tmp_path / "job.toml"
    job.write_text('[job]\nentry = ["true"]\ntime = "10"\n')
    return job


def partition_of(toolkit, *words):
    said = toolkit("config", "show", *words, "--json", "--site", "ours")
    assert said.code == 0, said
    return json.loads(said.out)["job"]["partition"], said.err


def test_the_shortest_limit_that_serves_is_taken(toolkit, ours):
    name, told = partition_of(toolkit, ours)
    assert name == "debug"
    assert told == (
        "toolkit: chose partition debug of ours: 0 GPUs and 31 CPUs beyond the request, 2 nodes idle, limit 0-00:30:00; "
        "next is cpu: 0 GPUs and 31 CPUs beyond the request, 2 nodes idle, limit 2-00:00:00\n"
    )


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (["job.time=45"], "cpu"),
        (["job.nodes=2"], "cpu"),
        (["job.gpus_per_node=2"], "gpu"),
        (["job.cpus_per_rank=40", "job.ranks_per_node=1"], "gpu"),
        (["job.mem_gb_per_node=200", "job.time=45"], "gpu"),
        (["job.partition=gpu"], "gpu"),
        (["job.time="], "cpu"),  # a job without a time gets the partition's: the longest is the best
    ],
)
def test_the_request_decides(toolkit, ours, settings, name):
    assert partition_of(toolkit, ours, *(word for one in settings for word in ("--set", one)))[0] == name


def test_a_default_partition_is_taken_without_a_word_and_auto_chooses(toolkit, ours):
    said = toolkit("config", "show", ours, "--json", "--site", "marked")
    assert (json.loads(said.out)["job"]["partition"], said.err) == ("cpu", "")
    chosen = toolkit("config", "show", ours, "--json", "--site", "marked", "--set", "job.partition=auto")
    assert json.loads(chosen.out)["job"]["partition"] == "debug"
    origin = toolkit.ok("config", "show", ours, "--site", "ours", "--origin").splitlines()
    (line,) = (line for line in origin if line.startswith("job.partition "))
    assert "derived" in line and line.endswith("the best of 3 partitions")


def test_submit_and_render_choose_too(toolkit, ours):
    rendered = toolkit("render", ours, "--site", "ours", "-N", 2)
    assert "#SBATCH --partition=cpu\n" in rendered.out and "chose partition cpu of ours: " in rendered.err
    assert "#SBATCH --partition=gpu\n" in toolkit.ok(
        "submit", ours, "--site", "ours", "-p", "auto", "--gpus-per-node", 1, "--dry-run"
    )


def test_each_reason_is_named_where_none_serves(toolkit, ours):
    refused = toolkit("submit", ours, "--site", "ours", "-N", 9)
    assert refused.code == 2
    first, *each = refused.err.splitlines()
    assert first == "toolkit: job.partition: no partition of ours can run the job. Fix: see the fix for each partition"
    assert sorted(line.split(":")[1].strip() for line in each) == ["cpu", "debug", "gpu"]
    assert "9 nodes, but partition cpu of ours allows at most 4. Fix: set nodes = 4" in refused.err


def test_a_partition_that_is_down_is_passed_by(toolkit, ours, tmp_path):
    sinfo = tmp_path / "bin/sinfo"
    sinfo.write_text(sinfo.read_text().replace("debug up", "debug down"))
    assert partition_of(toolkit, ours)[0] == "cpu"
    silence = "sinfo: error: Unable to contact slurm controller\n"
    FakeSlurm(tmp_path / "bin").respond("sinfo", stderr=silence, code=1)
    name, told = partition_of(toolkit, ours)
    assert name == "debug" and "; idle nodes are unknown: sinfo: Unable to contact slurm controller" in told


@pytest.mark.parametrize("words", [[], ["-p", "auto"]])
def test_an_allocation_has_its_partition(toolkit, ours, monkeypatch, words):
    """Nine nodes are more than any partition has, and are here."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "9")
    monkeypatch.setenv("TOOLKIT_SITE", "ours")
    monkeypatch.setattr(
        "toolkit.cli.submit.live_here", lambda run, job, start: print(job.job.nodes, repr(job.job.partition))
    )
    said = toolkit("run", ours, *words)
    assert (said.out, said.err) == ("9 ''\n", "")


def test_another_clusters_sinfo_counts_for_nothing(toolkit, ours, tmp_path):
    """Its partition of the same name is down, and not ours."""
    sinfo = tmp_path / "bin/sinfo"
    sinfo.write_text(sinfo.read_text().replace("debug up", "debug down").replace('"gpu up', '"other up'))
    name, told = partition_of(toolkit, ours)
    assert name == "debug" and "idle nodes are unknown: sinfo here does not list partition gpu" in told


def test_the_table(toolkit, ours):
    said = toolkit.ok("site", "partitions", ours, "--site", "ours", "-N", 2)
    assert [line.split()[:2] for line in said.splitlines()[1:]] == [
        ["cpu", "best"],
        ["gpu", "can"],
        ["debug", "cannot"],
    ]
    assert "  8 GPUs would be idle beyond those on cpu; 8 GPUs and" in said.splitlines()[2]
    assert said.splitlines()[3].endswith("2 nodes, but partition debug of ours allows at most 1")
    rows = json.loads(toolkit.ok("site", "partitions", ours, "--site", "ours", "--json"))
    assert rows[0]["name"] == "debug" and rows[0]["idle_nodes"] == 2
    assert [row["behind"] for row in rows[:2]] == ["", "its time limit is longer than the limit of debug"]
    all_of_debug = toolkit.ok("site", "partitions", ours, "--site", "ours", "-N", 2, "-t", "45").splitlines()[-1]
    assert "allows at most 1; " in all_of_debug and "00:30:00" in all_of_debug, "each limit that is in the way is told"


@pytest.mark.parametrize(
    ("one", "best", "why"),
    [
        ({"idle_cpus": 9}, {"idle_cpus": 8}, "1 CPU would be idle beyond those on best"),
        ({"idle_nodes": 1}, {"idle_nodes": 9}, "1 of 4 nodes would be free now, compared to 4 on best"),
        (
            {"limit_s": 60, "time_given": False},
            {"limit_s": 90, "time_given": False},
            "its time limit is shorter than the limit of best",
        ),
        ({"idle_nodes": 7}, {"idle_nodes": 9}, "it has the same score as best, which is first in the site file"),
    ],
)
def test_why_one_is_behind_the_best(one, best, why):
    assert Candidate("one", nodes=4, **one).why_not_best(Candidate("best", nodes=4, **best)) == why


def test_a_site_that_names_none_has_none_to_choose(toolkit, ours):
    refused = toolkit("site", "partitions", ours, "--site", "local")
    assert refused.code == 2 and "site local does not list partitions to choose from" in refused.err


def test_what_is_wrong_everywhere_is_said_once(toolkit, ours):
    refused = toolkit("submit", ours, "--site", "ours", "--set", "restart.warn_s=700")
    assert len(refused.err.splitlines()) == 1 and "restart.warn_s" in refused.err


def test_a_partition_with_too_few_nodes_cannot_serve_though_no_limit_says_so(toolkit, ours):
    """The file lets `gpu` have 99 nodes, and sinfo counts fewer."""
    site = next(ours.parent.rglob("ours.toml"))
    site.write_text(site.read_text().replace("max_nodes = 2\n", "max_nodes = 99\n"))
    rows = toolkit.ok("site", "partitions", ours, "--site", "ours", "-N", 60).splitlines()
    (line,) = (row for row in rows if row.startswith("gpu"))
    assert line.split()[1] == "cannot" and "the job needs 60 nodes, but sinfo reports" in line
