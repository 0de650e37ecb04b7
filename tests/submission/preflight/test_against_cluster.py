"""What can never run on a cluster is refused with both numbers, the place and a fix."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from toolkit.metrics.verdicts import Severity
from toolkit.runs.record.job import request_of
from toolkit.site.load import load_site
from toolkit.slurm.associations import Association, Limits, QueuedJob
from toolkit.slurm.limits import NodeShape, Reservation
from toolkit.submission.preflight.accounts import against_accounts
from toolkit.submission.preflight.checks import _of_site_file
from toolkit.submission.preflight.cluster import Accounting
from toolkit.submission.preflight.nodes import against_nodes
from toolkit.submission.preflight.partitions import against_partitions, against_reservation
from toolkit.submission.preflight.shape import against_array_limits

TYPED = '[gpu]\nrequest = "--gres=gpu:h100:{count}"\n'
OLD = "--gpus-per-node={count}"


def found(job, cluster):
    request = request_of(job)
    return [
        *against_partitions(job, request, cluster),
        *against_nodes(job, request, cluster),
        *against_reservation(job, request, cluster),
        *against_array_limits(job, cluster.settings),
        *against_accounts(job, request, cluster),
    ]


def one(job, cluster):
    findings = found(job, cluster)
    assert len(findings) == 1, findings
    return findings[0]


def test_nothing_is_found_where_nothing_is_wrong(resolved, cluster):
    job = resolved('nodes = 4\nranks_per_node = 4\ncpus_per_rank = 2\ngpus_per_node = 4\ntime = "1-00:00:00"\n'
                   'constraint = "ib&nvme"\nmem_gb_per_node = 15')  # fmt: skip
    assert found(job, cluster()) == []
    assert found(resolved('time = "UNLIMITED"'), cluster(max_time_s=None)) == []


@pytest.mark.parametrize(
    ("keys", "partition", "where", "what", "fix"),
    [
        ("nodes = 5", {}, "job.nodes", "5 nodes, but partition main has 4", "nodes = 4"),
        ("nodes = 3", {"max_nodes": 2}, "job.nodes", "3 nodes, but partition main allows at most 2", "nodes = 2"),
        ('nodes = "1-3"', {"max_nodes": 2}, "job.nodes", "up to 3 nodes, but partition main allows at most 2", 'nodes = "1-2"'),
        ("nodes = 1", {"min_nodes": 2}, "job.nodes", "1 node, but partition main requires at least 2", "nodes = 2, or another partition"),
        ('time = "2-0"', {}, "job.time", "walltime 2-00:00:00, but partition main allows at most 1-00:00:00", 'time = "1-00:00:00"'),
        ('time = "UNLIMITED"', {}, "job.time", "walltime UNLIMITED, but partition main allows at most 1-00:00:00", 'time = "1-00:00:00"'),
        ('partition = "mian"', {}, "job.partition", "this cluster has no partition 'mian'", 'partition = "main"'),
        ("", {"state": "INACTIVE"}, "job.partition", "partition main is INACTIVE and accepts no jobs", "choose another with -p"),
        ("", {"requires_reservation": True}, "job.partition", "partition main accepts no job outside a reservation (ReqResv)", "pass a reservation with --set job.sbatch=--reservation=NAME, or choose another partition with -p"),
        ("", {"is_default": False}, "job.partition", "the cluster has no default partition", "choose one of main with -p"),
        ("cpus_per_rank = 3", {"max_cpus_per_node": 2}, "job.cpus_per_rank", "3 CPUs per node, but partition main allows at most 2", "cpus_per_rank = 2"),
        ("mem_gb_per_node = 3", {"max_memory_per_node_mib": 2048.0}, "job.mem_gb_per_node", "3 GiB per node, but partition main allows at most 2", "mem_gb_per_node = 2"),
        ('account = "a"', {"allow_accounts": ("b",)}, "job.account", "partition main accepts no jobs of account a", "choose b with -A, or another partition"),
        ('qos = "a"', {"deny_qos": ("a",)}, "job.qos", "partition main accepts no jobs of qos a", "choose another with -q, or another partition"),
    ],
)  # fmt: skip
def test_the_limits_of_a_partition(resolved, cluster, keys, partition, where, what, fix):
    finding = one(resolved(keys), cluster(**partition))
    assert (finding.term, finding.what, finding.fix) == ("refusal", what, fix)
    assert finding.where.endswith(where)


@pytest.mark.parametrize(
    ("keys", "site", "where", "what", "fix"),
    [
        ("ranks_per_node = 3\ncpus_per_rank = 4", "", "job.cpus_per_rank", "3 ranks x 4 CPUs = 12 CPUs per node, but the largest node has 8", "cpus_per_rank = 2"),
        ("ranks_per_node = 9", "", "job.cpus_per_rank", "9 ranks x 1 CPU = 9 CPUs per node, but the largest node has 8", "ranks_per_node = 8"),
        ("mem_gb_per_node = 16", "", "job.mem_gb_per_node", "the job requests 16 GiB per node, but the largest node has 15.6", "mem_gb_per_node = 15"),
        ("gpus_per_node = 5", "", "job.gpus_per_node", "5 GPUs per node, but no node has more than 4", "gpus_per_node = 4"),
        ("gpus_per_node = 2", TYPED, "gpu.request", "no node of the partition has GPUs of type h100: they have a100", "use a100 in --gres=gpu:h100:2"),
        ('sbatch = ["--gres=gpu:v100:1"]', "", "job.sbatch", "no node of the partition has GPUs of type v100: they have a100", "use a100 in job.sbatch"),
        ('sbatch = ["--gres=gpu:1,fpga:2"]', "", "job.sbatch", "this cluster has no generic resource 'fpga': it has gpu (GresTypes in slurm.conf)", "remove fpga from --gres"),
        ('constraint = "gold|ib&gold"', "", "job.constraint", "no node of the partition has gold or gold with ib: they have ib, nvme", "correct -C; `sinfo -o '%N %f'` lists the features of each node"),
        ('sbatch = ["--mem-per-cpu=9G"]\ncpus_per_rank = 2', "", "job.mem_gb_per_node", "the job requests 18 GiB per node, but the largest node has 15.6", "mem_gb_per_node = 15"),
    ],
)  # fmt: skip
def test_no_node_is_so_large(resolved, cluster, keys, site, where, what, fix):
    finding = one(resolved(keys, site=site), cluster())
    assert (finding.term, finding.what, finding.fix) == ("refusal", what, fix)
    assert finding.where.endswith(where)


def test_a_partition_that_gives_no_whole_nodes(resolved, cluster):
    finding = one(resolved('sbatch = ["--exclusive"]'), cluster(max_cpus_per_node=4))
    assert finding.what == "--exclusive requests all 8 CPUs of a node, but partition main allows at most 4"
    assert found(resolved('sbatch = ["--exclusive"]'), cluster(max_cpus_per_node=8)) == []


def test_what_slurm_gives_where_nothing_is_asked_for_must_fit_too(resolved, cluster):
    finding = one(resolved("cpus_per_rank = 8"), cluster(default_memory_per_cpu_mib=2048.0))
    assert finding.what == (
        "the job requests none, and DefMemPerCPU x 8 CPUs is 16 GiB per node, but the largest node has 15.6"
    )


def test_one_node_must_have_all_of_it(resolved, cluster):
    """A node with GPUs and another one with memory are not enough."""
    lean = NodeShape(3, "g[1-3]", 8, 16000, {"": 4}, frozenset(), is_usable=True)
    large = NodeShape(1, "m1", 8, 512000, {}, frozenset(), is_usable=True)
    finding = one(resolved("gpus_per_node = 1\nmem_gb_per_node = 100"), cluster([lean, large]))
    assert finding.what == "1 node with 1 CPU, 100 GiB, 1 GPU each, but 0 such nodes exist"
    finding = one(resolved("nodes = 4\nranks_per_node = 1\ngpus_per_node = 1"), cluster([lean, large]))
    assert (finding.what, finding.fix) == (
        "4 nodes with 1 CPU, 1 GPU each, but 3 such nodes exist", "nodes = 3, or request less on each",
    )  # fmt: skip


def test_nodes_that_are_down_are_waited_for(resolved, cluster):
    up, down = (NodeShape(2, name, 8, 16000, {}, frozenset(), is_usable=up) for name, up in (("a", True), ("b", False)))
    assert found(resolved("nodes = 2"), cluster([up, down])) == []
    finding = one(resolved("nodes = 3"), cluster([up, down]))
    assert (finding.term, finding.fix) == ("warning", "nodes = 2")
    assert "but 2 of the 4 suitable ones are down, drained or reserved" in finding.what
    held = replace(down, is_usable=True, is_reserved=True)
    assert one(resolved("nodes = 3"), cluster([up, held])).severity == "warning"
    assert found(resolved('nodes = 3\nsbatch = ["--reservation=class"]'), cluster([up, held])) == []
    two = [replace(up, names="a[1-2]"), replace(down, names="b[1-2]")]
    named = one(resolved('nodelist = "b2"'), cluster(two, nodes="a[1-2],b[1-2]"))
    assert named.severity == "warning" and "node b2 is down, drained or reserved" in named.what
    assert one(resolved('nodes = 2\nexclude = "a1"'), cluster(two, nodes="a[1-2],b[1-2]")).fix == "nodes = 1"


def test_gpus_in_the_clusters_dialect(resolved, cluster):
    job = resolved("gpus_per_node = 1")
    finding = one(job, cluster(settings={"SelectType": "select/cons_res"}))
    assert finding.what == "--gpus-per-node=1 needs select/cons_tres, but this cluster uses select/cons_res"
    assert found(resolved("gpus_per_node = 1", site='[gpu]\nrequest = "--gres=gpu:{count}"\n'), cluster(settings={"SelectType": "select/cons_res"})) == []  # fmt: skip
    none = [replace(NodeShape(1, "a", 8, 1000, {}, frozenset(), is_usable=True))]
    said = [one.what for one in found(job, cluster(none, settings={"GresTypes": ""}))]
    assert said[0] == "this cluster has no GPUs (GresTypes in slurm.conf)"


def test_of_several_partitions_one_that_fits_is_enough(resolved, cluster):
    both = cluster()
    short = replace(both.partitions["main"], name="short", is_default=False, max_time_s=60)
    both = replace(both, partitions={"short": short, **both.partitions})
    assert found(resolved('partition = "short,main"\ntime = "30"'), both) == []
    assert "partition short allows at most" in one(resolved('partition = "short"\ntime = "30"'), both).what


def test_more_tasks_than_an_array_takes_are_no_hindrance(resolved, cluster):
    finding = one(resolved('array = "0-1001"'), cluster())
    assert finding.severity is Severity.INFO
    assert (
        finding.what == "the task numbers of a Slurm array must be below 1001 (MaxArraySize), but the last task is 1001"
    )
    assert finding.fix == "no action needed: `toolkit submit` splits the run into 2 arrays"
    assert found(resolved('array = "0-1000"'), cluster()) == []


def test_a_reservation_ends(resolved, cluster):
    soon = Reservation("class", datetime.now() + timedelta(minutes=10, seconds=30), 2, ())
    job = resolved('time = "20"\nnodes = 3\nsbatch = ["--reservation=class"]')
    said = {one.where.rpartition(":")[2]: one for one in found(job, replace(cluster(), reservations=[soon]))}
    assert said["job.time"].fix.startswith('time = "0-00:10:00"') and said["job.time"].severity == "warning"
    assert said["job.nodes"].what == "3 nodes, but reservation class has 2"
    over = replace(soon, end=datetime(2020, 1, 1), nodes=0)
    assert "reservation class ended at" in one(job, replace(cluster(), reservations=[over])).what
    assert one(job, replace(cluster(), reservations=[])).what == "there is no reservation class"


ENFORCED = {"AccountingStorageEnforce": "associations,limits,qos"}


def accounted(cluster, *, mine=Limits(), of_qos=Limits(), enforce=ENFORCED, **partition):  # noqa: B008
    rights = [Association("physics", "", ("normal", "long"), "normal", mine)]
    accounting = Accounting("ada", "physics", rights, {"normal": of_qos, "long": Limits(), "gold": Limits()})
    return replace(cluster(settings=enforce, **partition), accounting=accounting)


COUNT = ". SLURM_ARRAY_TASK_COUNT is then 5: pass 10 as an argument to a program that divides its input by it"


@pytest.mark.parametrize(
    ("keys", "limits", "where", "what", "fix"),
    [
        ('account = "maths"', {}, "job.account", "ada may not charge account maths", "choose one of yours with -A: physics"),
        ('qos = "gold"', {}, "job.qos", "account physics may not use QOS gold", "choose one of normal, long with -q"),
        ('qos = "lnog"', {}, "job.qos", "this cluster has no QOS lnog", "choose one of normal, long with -q"),
        ('time = "2:00:00"', {"longest_s": 3600}, "job.time", "walltime 0-02:00:00, but QOS normal allows at most 0-01:00:00", 'time = "0-01:00:00"'),
        ("nodes = 3", {"most_for_job": {"node": 2}}, "job.nodes", "3 nodes, but QOS normal allows at most 2 per job", "request less with -N, or choose another account or QOS"),
        ("nodes = 3", {"most_of_user": {"cpu": 2}}, "job.cpus_per_rank", "3 CPUs, but QOS normal allows at most 2 for all jobs of a user", "request less with -c, or choose another account or QOS"),
        ("nodes = 2\ngpus_per_node = 4\nranks_per_node = 4", {"most_of_group": {"gres/gpu": 7}}, "job.gpus_per_node", "8 GPUs, but QOS normal allows at most 7 for all its jobs together", "request less with --gpus-per-node, or choose another account or QOS"),
        ("mem_gb_per_node = 4", {"most_on_node": {"mem": 2048}}, "job.mem_gb_per_node", "4 GiB, but QOS normal allows at most 2 per node", "request less with --set job.mem_gb_per_node=, or choose another account or QOS"),
        ('array = "0-9"', {"submitted_jobs": 5}, "job.array", "10 jobs, but QOS normal allows at most 5 in the queue", "submit with -a 0-4; when these have ended, `toolkit resume RUN --set job.array=5-9`" + COUNT),
        ("", {"running_jobs": 0}, "job.account", "QOS normal allows no jobs", "choose another account (-A) or QOS (-q)"),
        ("", {"least_for_job": {"node": 2}}, "job.nodes", "1 nodes, but QOS normal requires at least 2 per job", "request more with -N"),
        ('nodes = 2\ntime = "1:00:00"', {"most_for_job_minutes": {"node": 60}}, "job.time", "120 nodes x minutes, but QOS normal allows at most 60 per job", 'time = "0-00:30:00", or request less'),
    ],
)  # fmt: skip
def test_what_accounting_allows(resolved, cluster, keys, limits, where, what, fix):
    finding = one(resolved(keys), accounted(cluster, of_qos=Limits(**limits)))
    assert (finding.term, finding.what, finding.fix) == ("refusal", what, fix)
    assert finding.where.endswith(where)


def test_jobs_that_are_in_the_queue_count(resolved, cluster):
    told = accounted(cluster, mine=Limits(submitted_jobs=12), of_qos=Limits(submitted_jobs_of_group=50))

    def said(keys, queued):
        with_them = replace(told, accounting=replace(told.accounting, queued=queued))
        return [(finding.what, finding.fix) for finding in found(resolved(keys), with_them)]

    mine = [QueuedJob("physics", "normal", "main")] * 9
    assert said('array = "0-2"', mine) == said('array = "0-9"', [QueuedJob("maths", "long", "main")] * 9) == []
    assert said('array = "0-9"', mine) == [
        ("10 jobs in addition to 9 of yours, but account physics allows at most 12 in the queue", "submit with -a 0-2; when these have ended, `toolkit resume RUN --set job.array=3-9`" + COUNT.replace("5", "3"))
    ]  # fmt: skip
    assert said("", mine[:1] * 12) == [
        ("1 job in addition to 12 of yours, but account physics allows at most 12 in the queue", "wait, or choose another account (-A) or QOS (-q)")
    ]  # fmt: skip
    assert said("", [QueuedJob("maths", "normal", "main")] * 50)[0][0].startswith(
        "1 job in addition to 50 of yours, but QOS normal"
    )


def test_the_qos_of_a_job_that_names_none(resolved, cluster):
    told = accounted(cluster, of_qos=Limits(most_for_job={"node": 2}))
    (mine,) = told.accounting.associations

    def says_normal(**changed):
        rights = [replace(mine, **changed)]
        return found(resolved("nodes = 3"), replace(told, accounting=replace(told.accounting, associations=rights)))

    assert says_normal(default_qos="") and says_normal(default_qos="", qos=("normal",))
    assert not says_normal(default_qos="long") and not says_normal(default_qos="", qos=("long",))


def test_limits_of_the_association_and_of_the_partitions_qos(resolved, cluster):
    job = resolved("nodes = 3")
    assert (
        "account physics allows at most 2 per job"
        in one(job, accounted(cluster, mine=Limits(most_for_job={"node": 2}))).what
    )
    partitioned = accounted(cluster, qos="gold")
    limited = {**partitioned.accounting.qos, "gold": Limits(most_for_job={"node": 1})}
    partitioned = replace(partitioned, accounting=replace(partitioned.accounting, qos=limited))
    assert "QOS gold allows at most 1 per job" in one(job, partitioned).what


@pytest.mark.parametrize(
    ("partition", "what"),
    [
        ({"allow_accounts": ("maths",)}, "partition main accepts no jobs of account physics"),
        ({"deny_accounts": ("physics",)}, "partition main accepts no jobs of account physics"),
        ({"allow_qos": ("gold",)}, "partition main accepts no jobs of qos normal"),
        ({"deny_qos": ("normal",)}, "partition main accepts no jobs of qos normal"),
    ],
)
def test_the_account_and_the_qos_that_a_job_is_given_count_as_those_that_it_names(resolved, cluster, partition, what):
    assert what == one(resolved(), accounted(cluster, **partition)).what
    assert found(resolved(), cluster(**partition)) == [], "without accounting nobody knows them"


def test_default_memory_beyond_the_partitions(resolved, cluster):
    told = cluster(default_memory_per_cpu_mib=2000.0, max_memory_per_node_mib=4000.0)
    said = one(resolved("cpus_per_rank = 4"), told)
    assert "DefMemPerCPU x 4 CPUs is 7.8 GiB per node, but partition main allows at most 3.9" in said.what
    assert said.fix == "mem_gb_per_node = 3" and found(resolved("cpus_per_rank = 2"), told) == []
    whole = one(resolved('sbatch = ["--exclusive"]'), told)
    assert "DefMemPerCPU x 8 CPUs is 15.6 GiB per node, but partition main allows at most 3.9" in whole.what


def test_of_a_limit_that_several_have_the_first_counts(resolved, cluster):
    """The partition's QOS, the job's, the user's; and a QOS may go past the partition."""
    job = resolved('nodes = 3\ntime = "2:00:00"')
    told = accounted(
        cluster, mine=Limits(most_for_job={"node": 1}), of_qos=Limits(most_for_job={"node": 3}), qos="gold"
    )
    assert found(job, told) == []

    def with_qos(**limits):
        return replace(told, accounting=replace(told.accounting, qos={**told.accounting.qos, **limits}))

    tight = Limits(most_for_job={"node": 2})
    assert "QOS gold allows at most 2 per job" in one(job, with_qos(gold=tight)).what
    over = Limits(most_for_job={"node": 3}, flags=frozenset({"OverPartQOS"}))
    assert found(job, with_qos(gold=tight, normal=over)) == []
    short = accounted(
        cluster, of_qos=Limits(flags=frozenset({"PartitionTimeLimit", "PartitionMaxNodes"})), max_time_s=60, max_nodes=1
    )
    assert found(job, short) == []


def test_whose_a_reservation_is(resolved, cluster, monkeypatch):
    monkeypatch.setattr("getpass.getuser", lambda: "ada")
    job = resolved('time = "20"\naccount = "chem"\nsbatch = ["--reservation=class"]')
    later = datetime.now() + timedelta(hours=1)

    def of(**whose):
        return found(job, replace(cluster(), reservations=[Reservation("class", later, 2, (), **whose)]))

    (refusal,) = of(users=("bob", "eve"))
    assert (refusal.term, refusal.what) == ("refusal", "reservation class is only for bob, eve, but you are ada")
    (warning,) = of(users=("bob",), accounts=("physics",))
    assert warning.severity == "warning" and "not for account chem" in warning.what
    for whose in (
        {"users": ("ada",)},
        {"accounts": ("chem",)},
        {"users": ("-bob",)},
        {"users": ("bob",), "groups": ("g",)},
    ):
        assert of(**whose) == []


def test_a_reservation_that_jobs_may_outlast(resolved, cluster):
    soon = Reservation("class", datetime.now() + timedelta(minutes=10), 1, ("FLEX", "SPEC_NODES"))
    assert (
        found(
            resolved('time = "20"\nnodes = 2\nsbatch = ["--reservation=class"]'),
            replace(cluster(), reservations=[soon]),
        )
        == []
    )


def test_memory_as_it_is_asked_for(resolved, cluster):
    tight = {"default_memory_per_cpu_mib": 9000.0}
    for option in ("--mem=0", "--mem-per-gpu=1G"):  # then the default of each CPU counts no more
        assert found(resolved(f'cpus_per_rank = 8\nsbatch = ["{option}"]'), cluster(**tight)) == []
    assert found(resolved("cpus_per_rank = 8\ngpus_per_node = 1"), cluster(gives_memory_by_gpu=True, **tight)) == []
    assert one(
        resolved('gpus_per_node = 2\nranks_per_node = 2\nsbatch = ["--mem-per-gpu=9G"]'), cluster()
    ).what.startswith("the job requests 18 GiB")


def test_what_slurm_does_not_enforce_is_not_refused(resolved, cluster):
    job = resolved('nodes = 3\naccount = "physics"\nqos = "gold"')
    tight = Limits(most_for_job={"node": 2})
    assert found(job, accounted(cluster, mine=tight, enforce={"AccountingStorageEnforce": "none"})) == []
    assert found(job, accounted(cluster, mine=tight, enforce={"AccountingStorageEnforce": "associations"})) == []


def test_who_has_no_account_is_told_whom_to_ask(resolved, cluster):
    nobody = accounted(cluster)
    nobody = replace(nobody, accounting=replace(nobody.accounting, default_account="", associations=[]))
    finding = one(resolved(""), nobody)
    assert finding.what == "the job sets no account, and ada has no default account"
    assert finding.fix == "ask help@here for an account"


def test_a_qos_goes_past_the_time_limit_that_the_site_file_names_too(resolved, tmp_path):
    site = '[partitions.main]\ndefault = true\nmax_time = "1:00:00"\nmax_nodes = 1\n[partitions.other]\n'
    job = resolved('time = "2:00:00"\nnodes = 2', site=site)
    loaded = load_site(str(tmp_path / "here.toml"), {})
    for past_time, keys in ((False, ["job.nodes", "job.time"]), (True, ["job.nodes"])):
        beyond = _of_site_file(job, loaded, [], past_time=past_time)
        assert sorted(one.where.rpartition(":")[2] for one in beyond) == keys
    assert resolved('partition = "main,other"\ntime = "2:00:00"', site=site).partition_limits is None


@pytest.mark.parametrize(
    ("keys", "where", "what", "fix"),
    [
        ('nodelist = "n[4-5]"', "job.nodelist", "this cluster has no node 'n5'", "choose from n1, n2, n3, n4 with -w"),
        ('nodelist = "n2,m1"', "job.nodelist", "node m1 is not in a partition of the job", "choose from n1, n2, n3, n4 with -w, or another partition with -p"),
        ('nodelist = "n[1-2]"', "job.nodelist", "-w lists 2 nodes, but the job uses 1", "nodes = 2, or list fewer with -w"),
        ('exclude = "n9"', "job.exclude", "this cluster has no node 'n9'", "choose from n1, n2, n3, n4 with -x"),
        ('exclude = "n[1-4]"', "job.exclude", "-x n[1-4] leaves none of n1, n2, n3, n4, but the job needs 1", "list fewer with -x"),
        ('sbatch = ["-x n[2-4]"]\nnodes = 2', "job.exclude", "-x n[2-4] leaves 1 node of n1, n2, n3, n4, but the job needs 2", "list fewer with -x, or nodes = 1"),
    ],
)  # fmt: skip
def test_nodes_that_are_named_are_there(resolved, cluster, keys, where, what, fix):
    here = cluster(nodes="n[1-4]")
    here = replace(
        here,
        partitions={
            **here.partitions,
            "other": replace(here.partitions["main"], name="other", is_default=False, nodes="m1"),
        },
    )
    finding = one(resolved(keys), here)
    assert (finding.term, finding.what, finding.fix) == ("refusal", what, fix)
    assert finding.where.endswith(where)


@pytest.mark.parametrize(
    "keys", ['nodelist = "n[1-4]"\nnodes = 4', 'exclude = "n[1-3],m1"', 'nodelist = "/a/file"', 'exclude = "n[1-"']
)
def test_nodes_that_may_be_named(resolved, cluster, keys):
    here = cluster(nodes="n[1-4],m1")
    assert found(resolved(keys), here) == []


def test_what_no_partition_takes_is_told_where_the_named_one_is_not_there(resolved, cluster):
    here = cluster()
    large = replace(here.partitions["main"], name="large", is_default=False, total_nodes=6)
    here = replace(here, partitions={"large": large, **here.partitions})
    job = resolved('partition = "nope"\nnodes = 5\ntime = "2-0"\ncpus_per_rank = 9')
    assert [(finding.what, finding.fix) for finding in found(job, here)] == [
        ("this cluster has no partition 'nope'", 'partition = "large" or "main"'),
        ("walltime 2-00:00:00, but partition main allows at most 1-00:00:00, and no other partition accepts it", 'time = "1-00:00:00"'),
        ("9 CPUs per node, but the largest node has 8", "cpus_per_rank = 8"),
    ]  # fmt: skip


def test_a_qos_that_is_not_there_is_told_beside_a_foreign_account(resolved, cluster):
    accounting = Accounting(
        "me", "mine", [Association("mine", "", ("normal",), "normal", Limits())], {"normal": Limits()}
    )
    here = replace(cluster(settings={"AccountingStorageEnforce": "associations,limits,qos"}), accounting=accounting)
    told = found(resolved('account = "theirs"\nqos = "fast"'), here)
    assert [(finding.what, finding.fix) for finding in told] == [
        ("me may not charge account theirs", "choose one of yours with -A: mine"),
        ("this cluster has no QOS 'fast'", "choose one of normal with -q, or omit it"),
    ]
    assert [finding.check for finding in found(resolved('account = "theirs"\nqos = "normal"'), here)] == ["account"]
