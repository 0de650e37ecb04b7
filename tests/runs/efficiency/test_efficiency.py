"""What a run used of what it asked for, from its files and from accounting; each number with the flag that changes it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from toolkit.config.request import resolve_job
from toolkit.metrics.checkpoints import SaveRecord
from toolkit.metrics.training import TrainRecord
from toolkit.rundir.claims import claim_attempt
from toolkit.rundir.files import write_json
from toolkit.rundir.layout import make_task
from toolkit.rundir.task_files import keep_the_end
from toolkit.runs.efficiency import count
from toolkit.runs.efficiency.count import steps_made, usage_of
from toolkit.runs.efficiency.rendering import _cpu_time, _line
from toolkit.runs.efficiency.report import Share
from toolkit.runs.record.job import request_of
from toolkit.site.load import load_site
from toolkit.slurm.accounted_usage import AccountedLife

SAMPLES = Path(__file__).parents[3] / "docs" / "samples"
GIB = 2**30


def sample(name, **changed):
    return {**json.loads((SAMPLES / f"{name}.json").read_text()), **changed}


def at(second):
    return f"2026-11-20T14:{second // 60:02}:{second % 60:02}.000Z"


@pytest.fixture
def lived(toolkit):
    """A run as it lies there after its starts: `(begin, end)` in seconds, the first state of all, and its usage."""

    def make(*, keys="", starts=((0, 600),), usage=(), state="completed"):
        job = toolkit.folder / "work.toml"
        job.write_text(f'[job]\nentry = ["true"]\n{keys}')
        toolkit.ok("render", job)
        (path,) = toolkit.runs.glob("work/*")
        run = toolkit.run(path.name)
        for number, (begin, end) in enumerate(starts):
            of_job = {"start": number, "job_id": "local-1"}
            run.start(number).mkdir()
            write_json(run.start(number) / "claim.json", sample("claim", **of_job, claimed=at(begin)))
            write_json(run.start(number) / "end.json", sample("end", state=state, exit_code=0, time=at(end)))
            attempt = run.attempt(number)
            attempt.path.mkdir()
            attempt.make_folders()
            last = number == len(starts) - 1
            write_json(attempt.start_file, sample("attempt_start", **of_job, nodes=1, ranks=2, time=at(begin)))
            write_json(attempt.exit_file, sample("attempt_exit", final=last, state=state, step=None, time=at(end)))
        for rank, told in enumerate(usage):
            write_json(attempt.usage_file(2 * rank), sample("usage", **{"ranks": 2, "gpus": None, **told}))
        return run

    return make


def test_of_its_own_samples(lived, toolkit):
    keys = "ranks_per_node = 2\ncpus_per_rank = 4\nmem_gb_per_node = 16\ntime = '1:00:00'\n"
    lived(keys=keys, usage=[{"cpu_s": 480.0, "memory_peak_bytes": 2 * GIB}])
    told = json.loads(toolkit.ok("efficiency", "last", "--json"))
    assert (told["state"], told["source"]) == ("completed", "own samples")
    assert told["walltime_s"] == {"used": 600.0, "asked": 3600, "share": 600 / 3600}
    assert told["cpu_s"] == {"used": 480.0, "asked": 4800.0, "share": 0.1}
    assert told["memory_bytes"] == {"used": 2.0 * GIB, "asked": 16.0 * GIB, "share": 0.125}
    assert (told["gpus"], told["steps"]) == (None, None)
    assert [one["flag"] for one in told["advice"]] == ["-t 0-00:15:00", "--set job.mem_gb_per_node=3", "-c 1"]
    words = toolkit.ok("efficiency")
    assert "walltime  0-00:10:00 of 0-01:00:00 (17%)" in words and "memory    2.00 GiB of 16.00 GiB" in words
    for one in told["advice"]:  # each can be given as it stands
        toolkit.ok("render", toolkit.folder / "work.toml", *shlex.split(one["flag"]))


def test_nothing_is_advised_where_it_fits(lived, toolkit):
    keys = "ranks_per_node = 2\nmem_gb_per_node = 4\ntime = '15'\n"
    lived(keys=keys, usage=[{"cpu_s": 1100.0, "memory_peak_bytes": 3 * GIB}])
    assert "change    nothing" in toolkit.ok("efficiency")


def test_memory_that_is_almost_used_up(lived, toolkit):
    lived(keys="mem_gb_per_node = 4\n", usage=[{"memory_peak_bytes": int(3.9 * GIB)}])
    (advice,) = json.loads(toolkit.ok("efficiency", "--json"))["advice"]
    assert (
        advice["flag"] == "--set job.mem_gb_per_node=6" and "a job that exceeds its memory is killed" in advice["why"]
    )


def test_no_shorter_walltime_for_a_run_that_needed_several(lived, toolkit):
    lived(keys="time = '1:00:00'\n", starts=((0, 300), (400, 500)))
    told = json.loads(toolkit.ok("efficiency", "--json"))
    assert told["walltime_s"]["used"] == 300 and told["node_hours"] == pytest.approx(400 / 3600)
    assert told["advice"] == []


def test_each_start_is_measured_by_what_was_asked_for_it(lived, toolkit):
    run = lived(keys="time = '1:00:00'\ncpus_per_rank = 4\n", starts=((0, 2400), (2500, 2600)), usage=[{"cpu_s": 90.0}])
    record = json.loads(run.record.read_text())
    record["job"]["job"] |= {"time": "0-00:10:00", "cpus_per_rank": 1}
    write_json(run.resumed(1), record)
    told = json.loads(toolkit.ok("efficiency", "--json"))
    assert told["walltime_s"] == {"used": 2400, "asked": 3600, "share": 2400 / 3600}
    assert told["cpu_s"]["asked"] == 2400 * 4 + 100 * 1


def test_ranks_that_the_sampler_did_not_see_count_as_the_others(lived, toolkit):
    lived(keys="ranks_per_node = 2\n", usage=[{"ranks": 1, "cpu_s": 10.0, "memory_peak_bytes": GIB}])
    told = json.loads(toolkit.ok("efficiency", "--json"))
    assert (told["cpu_s"]["used"], told["memory_bytes"]["used"]) == (20.0, 2.0 * GIB)


def gpu(utilisation, used=70):
    memory = {"memory_peak_bytes": used * GIB, "memory_bytes": 80 * GIB}
    return {"uuid": "GPU-1", "utilisation": utilisation, "utilisation_peak": 0.95, **memory}


def test_gpus_that_were_never_busy(lived, toolkit):
    keys = "gpus_per_node = 4\nranks_per_node = 4\n"
    lived(keys=keys, usage=[{"ranks": 4, "gpus": [gpu(0.9), gpu(0.7), gpu(0.0), gpu(0.0)]}])
    told = json.loads(toolkit.ok("efficiency", "--json"))
    assert (told["gpus"]["count"], told["gpus"]["idle"], told["gpus"]["utilisation"]) == (4, 2, pytest.approx(0.4))
    assert "--gpus-per-node 2" in [one["flag"] for one in told["advice"]]
    assert "40% busy (at most 95%), 2 of 4 never; memory at most 70.0 of 80.0 GiB" in toolkit.ok("efficiency")


def test_accounting_comes_before_what_the_run_wrote(lived, toolkit, monkeypatch):
    lived(keys="mem_gb_per_node = 16\n", usage=[{"cpu_s": 10.0, "memory_peak_bytes": GIB}])
    life = AccountedLife("7", "COMPLETED", 1200, 3600, 2, 8, 4, 16 * GIB, 999.0, GIB)
    monkeypatch.setattr(count, "uses_slurm", lambda job: True)
    monkeypatch.setattr(count, "accounted_usage", lambda slurm, ids: [life])
    told = json.loads(toolkit.ok("efficiency", "--json"))
    assert (told["source"], told["walltime_s"]["used"], told["walltime_s"]["asked"]) == ("sacct", 1200, 3600)
    assert told["cpu_s"] == {"used": 999.0, "asked": 9600, "share": 999 / 9600}
    assert told["memory_bytes"]["asked"] == 8 * GIB  # on each of the two nodes
    assert (told["node_hours"], told["gpu_hours"]) == (pytest.approx(2 / 3), pytest.approx(4 / 3))


def train_line(step, attempt):
    return TrainRecord(step, 100, 1.0, "0x1p+0", 0.1, 1.0, step, step, 0.1, 10.0, at(step), attempt, 1).to_line() + "\n"


def test_steps_that_were_made_again(lived):
    """Attempt 0 came to 25 and saved at 20; attempt 1 went on from there to 60."""
    run = lived(starts=((0, 100), (100, 200)))
    for number, step in ((0, 25), (1, 60)):
        write_json(
            run.attempt(number).exit_file, sample("attempt_exit", final=number == 1, state="completed", step=step)
        )
    lines = [*(train_line(step, 0) for step in range(1, 26)), *(train_line(step, 1) for step in range(21, 61))]
    (run.metrics / "train.jsonl").write_text("".join(lines))
    save = SaveRecord(20, "every_steps", 0.1, 0.1, 9, None, None, at(20), 0)
    (run.metrics / "checkpoints.jsonl").write_text(save.to_line() + "\n")
    made = steps_made(run)
    assert (made.made, made.useful) == (65, 60)
    (run.metrics / "train.jsonl").unlink()
    assert steps_made(run) is None  # nobody knows from where the second attempt went on


def test_an_attempt_that_tells_few_steps_and_saves_before_the_first(lived):
    """`log_every` is 10; attempt 1 went on from 20, and saved at 25 before it told step 30."""
    run = lived(starts=((0, 100), (100, 200)))
    for number, step in ((0, 28), (1, 60)):
        write_json(
            run.attempt(number).exit_file, sample("attempt_exit", final=number == 1, state="completed", step=step)
        )
    lines = [train_line(10, 0), train_line(20, 0), *(train_line(step, 1) for step in range(30, 61, 10))]
    (run.metrics / "train.jsonl").write_text("".join(lines))
    saves = [
        SaveRecord(step, "every_steps", 0.1, 0.1, 9, None, None, at(step), number)
        for step, number in ((20, 0), (25, 1))
    ]
    (run.metrics / "checkpoints.jsonl").write_text("".join(save.to_line() + "\n" for save in saves))
    made = steps_made(run)
    assert (made.made, made.useful) == (28 + 40, 60)


def test_a_run_that_has_not_begun(toolkit):
    toolkit.ok("render", toolkit.job("true"))
    (path,) = toolkit.runs.glob("work/*")
    said = toolkit("efficiency", path.name)
    assert (
        said.code == 1
        and f"run {path.name} was rendered but not submitted, and it has never started. Fix: `toolkit preflight"
        in said.err
    )


def test_half_a_sample_of_a_lost_node_is_left_out(lived, toolkit):
    run = lived(usage=[{"memory_peak_bytes": GIB}, {}])
    run.attempt(0).usage_file(2).write_text('{"host": "no')
    said = toolkit("efficiency", "--json")
    assert said.code == 0 and "rank-00002.json: invalid JSON" in said.err
    assert json.loads(said.out)["memory_bytes"]["used"] == 1.0 * GIB


@pytest.fixture
def array(toolkit, monkeypatch):
    """The run of an array whose tasks are done, without accounting; `(cpu_s, GiB)` of each, in 100 s on 4 CPUs."""

    def make(*tasks):
        job = toolkit.folder / "work.toml"
        job.write_text('[job]\nentry = ["true"]\ncpus_per_rank = 4\nmem_gb_per_node = 16\ntime = "5"\n')
        toolkit.ok("render", job, "-a", f"0-{len(tasks) - 1}", "--site", "devcluster")
        (path,) = toolkit.runs.glob("work/*")
        run = toolkit.run(path.name)
        for number, used in enumerate(tasks):
            task = make_task(run, number)
            attempt = claim_attempt(task)
            of_job = {"start": 0, "job_id": f"7_{number}"}
            task.start(0).mkdir()
            write_json(task.start(0) / "claim.json", sample("claim", **of_job, claimed=at(0)))
            write_json(task.start(0) / "end.json", sample("end", state="completed", exit_code=0, time=at(100)))
            write_json(attempt.start_file, sample("attempt_start", **of_job, nodes=1, ranks=1, time=at(0)))
            write_json(
                attempt.exit_file, sample("attempt_exit", final=True, state="completed", step=None, time=at(100))
            )
            if used:
                counts = {"cpu_s": used[0], "memory_peak_bytes": int(used[1] * GIB), "ranks": 1, "gpus": None}
                write_json(attempt.usage_file(0), sample("usage", **counts))
            keep_the_end(task, attempt, 0, pytest.fail)
            assert not attempt.usage.exists()
        return run

    monkeypatch.setattr(count, "_accounted", lambda run, job: [])
    return make


def test_an_array_of_which_few_tasks_need_what_all_are_given(array, toolkit):
    """What most tasks need is advised for them alone, and nothing that would end the two."""
    small = (40.0, 0.5)
    run = array(small, small, (390.0, 14.0), small, small, (380.0, 9.0), small, small)
    told = json.loads(toolkit.ok("efficiency", run.run_id, "--json"))
    assert told["cpu_s"] == {"used": 1010.0, "asked": 3200.0, "share": 1010 / 3200}
    assert told["memory_bytes"]["used"] == 14.0 * GIB and told["node_hours"] == pytest.approx(800 / 3600)
    assert [one["cpu_share"] for one in told["tasks"]][1:3] == [0.1, 0.975]
    flags = [one["flag"] for one in told["advice"]]
    assert flags == ["-a 0-1,3-4,6-7 --set job.mem_gb_per_node=1", "-a 0-1,3-4,6-7 -c 1"]
    for flag in flags:
        toolkit.ok("render", toolkit.folder / "work.toml", "--site", "devcluster", *shlex.split(flag))
    words = toolkit.ok("efficiency", run.run_id)
    assert "median of 8 tasks 10%; maximum 98%, in task 2" in words
    assert "median of 8 tasks 0.50 GiB; maximum 14.00 GiB, in task 2" in words


def test_what_no_task_of_an_array_needs(array, toolkit):
    run = array((40.0, 0.5), (90.0, 1.0))
    told = json.loads(toolkit.ok("efficiency", run.run_id, "--json"))
    assert [one["flag"] for one in told["advice"]] == ["--set job.mem_gb_per_node=2", "-c 2"]
    of_task = json.loads(toolkit.ok("efficiency", f"{run.run_id}_1", "--json"))
    assert (of_task["cpu_s"]["used"], of_task["tasks"]) == (90.0, [])


def test_a_task_that_nobody_sampled_lowers_no_share(array, toolkit):
    run = array((300.0, 10.0), None)
    said = toolkit("efficiency", run.run_id, "--json")
    assert said.code == 0 and "no samples for 1 task: CPU time and memory are unknown" in said.err
    told = json.loads(said.out)
    assert told["cpu_s"]["share"] == 0.75 and told["walltime_s"]["used"] == 100.0


@pytest.mark.parametrize("usage", [7, [7], [{"cpu_s": 1.0}]])
def test_a_damaged_end_of_a_task_is_named(array, toolkit, usage):
    run = array((40.0, 0.5), (90.0, 1.0))
    path = run.task(1).attempt(0).exit_file
    path.write_text(json.dumps({**json.loads(path.read_text()), "usage": usage}))
    said = toolkit("efficiency", run.run_id)
    assert said.code == 2 and f"{path}: " in said.err and "restore the file" in said.err


def test_each_node_of_a_heterogeneous_job_is_counted_with_its_own_ranks(lived):
    run = lived(usage=[{"first_rank": 0, "ranks": 1, "cpu_s": 10.0}, {"first_rank": 1, "ranks": 1, "cpu_s": 10.0}])
    shapes = [{"nodes": 1, "ranks_per_node": 1}, {"nodes": 1, "ranks_per_node": 4}]
    write_json(run.start(0) / "job.json", {"job": {}, "resolved_components": [{"job": shape} for shape in shapes]})
    assert [one["cpu_s"] for one in usage_of(run.attempt(0))] == [10.0, 40.0]


def test_accounting_has_a_life_for_each_component(tmp_path):
    (tmp_path / "work.toml").write_text('[job]\nentry = ["true"]\n[[component]]\n[[component]]\nranks_per_node = 4\n')
    (tmp_path / "here.toml").write_text('name = "here"\n')
    job = resolve_job(tmp_path / "work.toml", site=load_site(str(tmp_path / "here.toml"), {}), environ={})
    requests = [request_of(one) for one in job.components]
    lives = [AccountedLife(f"7+{number}", "COMPLETED", 60, None, 1, 4, 0, None, 1.0, GIB) for number in (0, 1)]
    assert count._memory([], lives, [], requests).used == 4 * GIB


def test_short_times_have_digits_enough_for_their_share():
    assert _line(Share(0.22, 1.0), _cpu_time) == "0.22 CPU-seconds of 1.00 CPU-seconds (22%)"
    assert _line(Share(120.4, 7200.0), _cpu_time) == "120 CPU-seconds of 2.00 CPU-hours (2%)"
