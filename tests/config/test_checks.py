"""Impossible requests are refused before Slurm sees them, with the numbers and one that works."""

import pytest

from toolkit.errors import ToolkitError
from toolkit.site.load import load_site


@pytest.mark.parametrize(
    ("job", "more", "message"),
    [
        (
            "nodes = 9",
            "",
            "job.toml:4:job.nodes: 9 nodes, but partition gpu of cluster allows at most 8. Fix: set nodes = 8",
        ),
        (
            'time = "2-00"',
            "",
            "job.toml:4:job.time: 2-00 is 2-00:00:00, but partition gpu of cluster allows at most 1-00:00:00. "
            'Fix: set time = "1-00:00:00"',
        ),
        (
            'time = "UNLIMITED"',
            "",
            "job.toml:4:job.time: UNLIMITED is UNLIMITED, but partition gpu of cluster allows at most 1-00:00:00. "
            'Fix: set time = "1-00:00:00"',
        ),
        (
            "gpus_per_node = 8",
            "",
            "job.toml:4:job.gpus_per_node: 8 GPUs per node, but partition gpu of cluster has 4. Fix: set gpus_per_node = 4",
        ),
        (
            "cpus_per_rank = 17",
            "",
            "job.toml:4:job.cpus_per_rank: 4 ranks x 17 CPUs = 68 CPUs per node, but partition gpu of cluster has 64. "
            "Fix: set cpus_per_rank = 16",
        ),
        (
            "ranks_per_node = 65",
            "",
            "job.toml:4:job.ranks_per_node: 65 ranks x 1 CPU = 65 CPUs per node, but partition gpu of cluster has 64. "
            "Fix: set ranks_per_node = 64",
        ),
        (
            "mem_gb_per_node = 600",
            "",
            "job.toml:4:job.mem_gb_per_node: 600 GiB per node, but partition gpu of cluster has 512. "
            "Fix: set mem_gb_per_node = 512",
        ),
        (
            'nodelist = "n[1-3]"\nexclude = "n3,n9"',
            "",
            "job.toml:5:job.exclude: n3 cannot be both in nodelist n[1-3] and in exclude. "
            "Fix: remove it from one of the two",
        ),
        (
            'partition = "gpus"',
            "",
            "job.toml:4:job.partition: partition 'gpus' not found at site cluster. Fix: write 'gpu'",
        ),
        (
            'partition = "cpu,gpus"',
            "",
            "job.toml:4:job.partition: partition 'gpus' not found at site cluster. Fix: write 'gpu'",
        ),
        (
            'partition = "xyzzy"',
            "",
            "job.toml:4:job.partition: partition 'xyzzy' not found at site cluster. Fix: write 'gpu' or 'cpu'",
        ),
        (
            'time = "0:02:00"',
            "[restart]\nwarn_s = 120",
            "job.toml:6:restart.warn_s: a warning 120 s before the walltime would be at or before the start of the job: job.time is 120 s. "
            "Fix: set a longer time, or warn_s = 30",
        ),
        (
            'time = "1:30"',
            "",
            "restart.warn_s: a warning 120 s before the walltime would be at or before the start of the job: job.time is 90 s, since Slurm reads 1:30 as "
            'minutes. Fix: set time = "1:30:00" if you mean hours, or warn_s = 22',
        ),
        (
            'time = "2"',
            "",
            "restart.warn_s: a warning 120 s before the walltime would be at or before the start of the job: job.time is 120 s, since Slurm reads 2 as "
            'minutes. Fix: set time = "2:00:00" if you mean hours, or warn_s = 30',
        ),
        (
            "nodes = 3",
            "[parallel]\nshard = 4\ntp = 2",
            "job.toml:6:parallel.shard: pp x shard x cp x tp = 1 x 4 x 1 x 2 = 8 does not divide "
            "12 ranks (3 nodes x 4). Fix: request 8 or 16 ranks, or change [parallel]",
        ),
        (
            "nodes = 2",
            "[parallel]\nreplicate = 4",
            "job.toml:6:parallel.replicate: replicate x pp x shard x cp x tp = 4 x 1 x 1 x 1 x 1 = 4 is not equal to "
            "8 ranks (2 nodes x 4). Fix: request 4 ranks, or change [parallel]",
        ),
        (
            "nodes = 2",
            "[parallel]\nshard = 4\nep = 3",
            "job.toml:7:parallel.ep: shard x cp = 4 x 1 = 4 is not divisible by ep = 3. Fix: set ep = 4",
        ),
        (
            "nodes = 2",
            "[parallel]\nzero = 2",
            "job.toml:6:parallel.zero: zero = 2 has no effect with shard = 1. Fix: set shard = 8, or zero = 0",
        ),
        (
            "nodes = 2",
            "[parallel]\nshard = 4\nzero = 0",
            "job.toml:7:parallel.zero: shard = 4 has no effect with zero = 0. "
            "Fix: set zero = 1, 2 or 3, or set shard = 1 and replicate = 4",
        ),
        (
            "nodes = 2",
            '[parallel]\nshard = 2\nreduction = "measured"',
            "job.toml:7:parallel.reduction: 'measured' requires a whole model on every rank, but 2 ranks share each "
            'model. Fix: set reduction = "auto"',
        ),
        (
            "nodes = 1",
            '[parallel]\nreduction = "hierarchical"',
            "job.toml:6:parallel.reduction: a hierarchical reduction requires two or more nodes with two or more ranks each, got "
            '1 node with 4 ranks each. Fix: set reduction = "auto"',
        ),
        (
            "nodes = 2",
            '[parallel]\nshard = 2\n[train]\noptimizer = "adamw_8bit"',
            "job.toml:8:train.optimizer: adamw_8bit cannot be combined with shard = 2: the scales of its moments belong to blocks "
            'of whole parameters. Fix: use optimizer = "adamw"',
        ),
        (
            "nodes = 2",
            "[parallel]\ntp = 2\n[train]\ncompile = true",
            "job.toml:8:train.compile: tp = 2 cannot be combined with torch.compile: its communication causes graph breaks. "
            "Fix: set train.compile = false, or tp = 1",
        ),
        (
            "nodes = 2",
            '[parallel]\nshard = 2\n[train]\nlr_reference_batch = 8\nlr_scaling = "adaptive"',
            "job.toml:9:train.lr_scaling: AdaScale needs the whole gradient of each micro-batch, but ranks that share a "
            'model have only parts of it. Fix: use "linear" or "square_root", or set shard, tp, pp and cp to 1',
        ),
        (
            "nodes = 2",
            '[train]\nbatch = 64\nlr_reference_batch = 128\nlr_scaling = "adaptive"',
            "job.toml:7:train.lr_reference_batch: AdaScale requires a batch of at least lr_reference_batch = 128, got "
            "64. Fix: set lr_reference_batch to 64 or less",
        ),
        (
            "nodes = 1\nranks_per_node = 1",
            '[train]\nbatch = 8\nlr_reference_batch = 8\nlr_scaling = "adaptive"',
            "job.toml:9:train.lr_scaling: AdaScale requires two or more micro-batches per step, but one rank with one micro-batch has only one. "
            "Fix: use two or more ranks, or micro_batch = 4 or less",
        ),
        (
            "nodes = 2",
            "[train]\nsteps = 4\nprofile_steps = 2",
            "train.profile_from: profiling starts at step 10, but the last step of the run is 4. Fix: set profile_from = 3",
        ),
        (
            "nodes = 3",
            "[train]\nbatch = 64",
            "job.toml:6:train.batch: a batch of 64 samples is not divisible by 12 data ranks. Fix: set batch = 60 or 72",
        ),
        (
            "nodes = 2",
            "[train]\nbatch = 64\nmicro_batch = 3",
            "job.toml:7:train.micro_batch: 8 samples per data rank (batch 64) are not divisible by micro_batch = 3. Fix: set micro_batch = 2",
        ),
    ],
)
def test_an_impossible_request(tmp_path, resolve, site, job, more, message):
    with pytest.raises(ToolkitError) as caught:
        resolve(f'account = "a"\n{job}', more, site=site)
    assert str(caught.value).replace(f"{tmp_path}/", "") == message


def test_a_missing_account(resolve, site):
    with pytest.raises(ToolkitError) as caught:
        resolve(site=site)
    assert str(caught.value) == (
        "job.account: partition gpu of cluster requires an account. "
        'Fix: set account = "..." in [job], use -A ACCOUNT, or export SBATCH_ACCOUNT'
    )
    resolve(site=site, environ={"SBATCH_ACCOUNT": "a"})


@pytest.mark.parametrize("micro_batch", [2, 5, 64])
def test_a_batch_that_is_proposed_is_taken(resolve, site, micro_batch):
    train = f"[train]\nbatch = {{}}\nmicro_batch = {micro_batch}"
    with pytest.raises(ToolkitError, match="is not divisible") as caught:
        resolve('account = "a"\nnodes = 3', train.format(64), site=site)
    for batch in caught.value.fix.removeprefix("set batch = ").split(" or "):
        resolve('account = "a"\nnodes = 3', train.format(batch), site=site)


@pytest.mark.parametrize(
    ("job", "more"),
    [
        ('nodes = 8\ntime = "1-00:00:00"', ""),
        ('nodes = "2-9"', ""),
        ("nodes = 2", "[parallel]\nshard = 4\nep = 2\n[train]\nbatch = 64\nmicro_batch = 4"),
        # tp ranks see the same data: 8 ranks are 4 data ranks.
        ("nodes = 2", "[parallel]\ntp = 2\n[train]\nbatch = 4"),
        # Three nodes would not divide, two or four do.
        ('nodes = "2-4"', "[parallel]\nshard = 8"),
        # A foreign script has no [train]; the default batch says nothing about it.
        ("nodes = 3", ""),
        ('partition = "cpu"\nranks_per_node = 128', ""),
    ],
)
def test_a_possible_request(resolve, site, job, more):
    resolve(f'account = "a"\n{job}', more, site=site)


def test_a_short_walltime_moves_the_default_warning(resolve, site):
    job = resolve('account = "a"\ntime = "0:01:30"', site=site)
    assert (job.restart.warn_s, job.origin("restart.warn_s").layer) == (22, "derived")
    assert resolve('account = "a"\ntime = "0:03:00"', site=site).restart.warn_s == 45
    assert resolve('account = "a"\ntime = "0:08:00"', site=site).restart.warn_s == 120


def test_gpus_on_a_partition_without(tmp_path, resolve, site):
    with pytest.raises(ToolkitError, match="1 GPU per node, but partition cpu of cluster has 0"):
        resolve('partition = "cpu"\ngpus_per_node = 1', site=site)


def test_one_machine_is_one_node(resolve):
    from toolkit.site.load import load_site

    with pytest.raises(ToolkitError, match=r"job.nodes: the job needs 2 nodes, but site 'local' is a single machine"):
        resolve("nodes = 2", site=load_site("local", {}))
    # Partitions belong to clusters; a job file keeps its own when it runs on a laptop.
    assert resolve('partition = "gpu"', site=load_site("local", {})).partition_limits is None


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("nodes = 3\nranks_per_node = 4\nranks = 10", ""),
        ("nodes = 3\nranks_per_node = 4\nranks = 2", "3 nodes x 4 have 3 to 12 ranks, got 2"),
        ("nodes = 2\nranks_per_node = 4\nranks = 9", "2 nodes x 4 have 2 to 8 ranks, got 9"),
        ('nodes = "2-3"\nranks_per_node = 4\nranks = 8', "ranks requires a fixed number of nodes"),
    ],
)
def test_ranks_that_do_not_fill_the_nodes_need_all_of_them(resolve, lines, message):
    file = f'[job]\nentry = ["true"]\n{lines}\n'
    if not message:
        assert resolve(text=file, site=load_site("devcluster")).rank_counts == range(10, 11)
        return
    with pytest.raises(ToolkitError, match=message):
        resolve(text=file, site=load_site("devcluster"))
