"""Sweeps: which tasks they have, what each task runs, and what is refused when they are submitted."""

import json
import time

import pytest
from queued_runs import claim, end_attempt, states_of

from toolkit.rundir.claims import end_start
from toolkit.rundir.files import write_json
from toolkit.rundir.layout import RunDirectory, make_task
from toolkit.rundir.sweep import common_values, read_sweep
from toolkit.submission.sweep.rows import split_values
from toolkit.supervise.start import job_of_task

pytestmark = pytest.mark.usefixtures("dev_cluster_conf")


@pytest.fixture
def rendered(toolkit):
    """Render a job with a sweep; its run, the script, and the job of each task."""
    job = toolkit.job("true", name="swept", more="[train]\nlr = 0.5\n[args]\nlayers = 1\n")

    def render(*argv, tasks=None):
        script = toolkit.ok("render", job, "--site", "devcluster", *argv)
        run = RunDirectory(max(toolkit.runs.glob("swept/*")))
        whole = json.loads(next(line for line in script.splitlines() if line.startswith('{"schema')))
        numbers = range(len(read_sweep(run).tasks)) if tasks is None else tasks
        return run, script, [job_of_task(whole, task) for task in numbers]

    render.job = job
    return render


def values(jobs, table, key):
    return [job[table].get(key) for job in jobs]


def test_every_combination_is_a_task(rendered):
    run, script, jobs = rendered("--sweep", "train.lr=1e-3,3e-4", "--sweep", "args.layers=2,4")
    assert "#SBATCH --array=0-3\n" in script
    assert values(jobs, "train", "lr") == [1e-3, 1e-3, 3e-4, 3e-4]
    assert values(jobs, "args", "layers") == [2, 4, 2, 4]
    assert read_sweep(run).tasks[2] == {"train.lr": 3e-4, "args.layers": 2}
    assert all("sweep" not in job for job in jobs)


def test_what_follows_from_a_swept_value_follows_in_its_task(rendered):
    """`zero` is 3 where the model is sharded."""
    _, _, jobs = rendered("--sweep", "parallel.shard=1,2", "--ntasks-per-node", "2")
    assert values(jobs, "parallel", "zero") == [0, 3]


def test_a_variable_of_the_ranks_is_swept_as_text(rendered):
    _, _, jobs = rendered("--sweep", "env.vars.SEED=1,02")
    assert [job["env"]["vars"]["SEED"] for job in jobs] == ["1", "02"]


def test_what_a_program_is_not_told_of_is_said(toolkit):
    job, sweep = toolkit.job("true"), ("--site", "devcluster", "--sweep", "args.layers=2,4")
    said = toolkit("render", job, *sweep, "--sweep", "env.vars.SEED=1,2")
    (warned,) = (line for line in said.err.splitlines() if "TOOLKIT_RESOLVED_JOB" in line)
    assert warned.startswith("toolkit: warning: --sweep args.layers=2: ")
    assert warned.endswith("Fix: sweep an argument or a variable instead, argv.layers or env.vars.LAYERS")
    assert "TOOLKIT_RESOLVED_JOB" not in toolkit("render", "train_lm", *sweep).err


def test_the_newest_file_of_all_tasks_is_refused(toolkit):
    job = toolkit.job("true", more='[restart]\nargv = "lightning"\n')
    said = toolkit("render", job, "--site", "devcluster", "--sweep", "env.vars.SEED=1,2")
    assert said.code == 2
    assert "restart.argv: {newest} may be a file of another task" in said.err


def test_a_limit_alone_is_for_all_tasks_and_numbers_choose_some(rendered):
    assert "#SBATCH --array=0-2%1\n" in rendered("--sweep", "args.layers=2,4,8", "-a", "%1")[1]
    assert "#SBATCH --array=0,2\n" in rendered("--sweep", "args.layers=2,4,8", "-a", "0,2", tasks=[0, 2])[1]


@pytest.mark.parametrize(
    ("name", "text", "tasks"),
    [
        ("grid.toml", "[train]\nlr = [0.1, 0.2]\n[args]\nlayers = [2, 4]\n",
         [{"train.lr": 0.1, "args.layers": 2}, {"train.lr": 0.1, "args.layers": 4},
          {"train.lr": 0.2, "args.layers": 2}, {"train.lr": 0.2, "args.layers": 4}]),
        ("rows.toml", "[[task]]\ntrain.lr = 0.1\n[[task]]\nargs.day = 1979-05-27\n",
         [{"train.lr": 0.1}, {"args.day": "1979-05-27"}]),
        ("rows.csv", '\ufefftrain.lr,args.layers\r\n1e-3,2\r\n,"[1,2]"\r\n',
         [{"train.lr": 1e-3, "args.layers": 2}, {"args.layers": [1, 2]}]),
        ("rows.jsonl", '{"train.lr": 0.1}\n\n{"train": {"lr": 0.2}, "args.layers": 4}\n',
         [{"train.lr": 0.1}, {"train.lr": 0.2, "args.layers": 4}]),
    ],
)  # fmt: skip
def test_a_file_has_the_values(rendered, toolkit, name, text, tasks):
    (toolkit.folder / name).write_text(text)
    run, _, jobs = rendered("--grid", toolkit.folder / name)
    assert list(read_sweep(run).tasks) == tasks
    assert values(jobs, "train", "lr") == [task.get("train.lr", 0.5) for task in tasks]


def test_a_file_and_an_option_are_combined(rendered, toolkit):
    (toolkit.folder / "rows.csv").write_text("train.lr\n0.1\n0.2\n")
    run, _, _ = rendered("--sweep", "args.layers=2,4", "--grid", toolkit.folder / "rows.csv")
    assert [tuple(task.values()) for task in read_sweep(run).tasks] == [(0.1, 2), (0.1, 4), (0.2, 2), (0.2, 4)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--sweep", "train.lr=1e-3,x"], ("'x' is not a valid value", "use a number")),
        (["--sweep", "train.lr=1,"], ("empty value",)),
        (["--sweep", "train.lrr=1"], ("write train.lr",)),
        (["--sweep", "trian.lr=1"], ("write train",)),
        (["--sweep", "lr"], ("write --sweep train.lr=",)),
        (["--sweep", "job.nodes=1,2"], ("same for all tasks", "--set job.nodes=VALUE")),
        (["--sweep", "restart.warn_s=1,2"], ("same for all tasks",)),
        (["--sweep", "train.lr=1", "--sweep", "train.lr=2"], ("is swept twice, first by",)),
        (["--sweep", "args.a={x=1}", "--sweep", "args.a.x=2"], ("is swept twice, first by",)),
        (["--sweep", "parallel.shard=1,3"], ("task 1 (parallel.shard=3)", "does not divide 1 rank")),
        (["--sweep", "train.batch=2,0"], ("task 1 (train.batch=0)", "--sweep train.batch=0", "at least 1")),
        (["--sweep", "train.lr=1,2", "-a", "0-2"], ("the sweep has 2 tasks", "from 0 to 1")),
        (["--sweep", "args.a=" + ",".join(map(str, range(400))), "--sweep", "args.b=" + ",".join(map(str, range(400)))],
         ("160000 tasks",)),
        (["--grid", "none.csv"], ("no such file",)),
        (["--grid", "rows.txt"], ("'.txt'",)),
    ],
)  # fmt: skip
def test_a_wrong_sweep_is_refused_with_its_place(rendered, toolkit, options, said):
    refused = toolkit("submit", rendered.job, "--site", "devcluster", *options)
    assert refused.code in (2, 4)
    assert all(words in refused.err for words in said), refused.err
    assert not toolkit.runs.exists()


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("g.csv", "train.lr\n1,2\n", "g.csv:2: expected 1 cells, one per key in the first line, got 2"),
        ("g.csv", "args.a,args.a.b\n1,2\n", "g.csv:1: sets both args.a.b and args.a, but one contains the other"),
        ("g.jsonl", '{"train.lr": 1, "train": {"lr": 2}}', "g.jsonl:1: has two values for train.lr"),
        ("g.jsonl", '{"train.lr": 1, "train.lr": 2}', "g.jsonl:1: not valid JSON: 'train.lr' occurs twice"),
        ("g.jsonl", '{"args..x": 1}', "g.jsonl:1: expected table.key, got 'args..x'"),
        ("g.toml", '"args.a" = [1]\nargs.a.b = [2]\n', "g.toml: sets both args.a.b and args.a"),
        ("g.csv", "train.lr\nx\n", "g.csv:2:train.lr: 'x' is not a valid value for this key"),
        ("g.csv", "lr\n1\n", "g.csv:1: expected table.key, got 'lr'"),
        ("g.csv", "train.lr\n", "expected at least one task, got none"),
        ("g.csv", 'train.lr\n"1', "not valid CSV"),
        (
            "g.jsonl",
            '{"train.lr": 1}\n{bad',
            "g.jsonl:2: not valid JSON: Expecting property name enclosed in double quotes: column 2.",
        ),
        ("g.jsonl", '{"train.lr": 1}\n[1]', "g.jsonl:2: task without values"),
        ("g.jsonl", '{"lr": 1}', "write train.lr or args.lr"),
        ("g.toml", "train.lr = 3\n", "g.toml:1:train.lr: expected a list of values, got 3"),
        ("g.toml", "args.x = [1]\n[[task]]\nargs.y = 1\n", "expected only [[task]] tables or only lists, got both"),
        ("g.toml", "", "expected at least one task, got none"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(rendered, toolkit, name, text, said):
    (toolkit.folder / name).write_text(text)
    refused = toolkit("render", rendered.job, "--site", "devcluster", "--grid", toolkit.folder / name)
    assert (refused.code, said in refused.err) == (2, True), refused.err


def test_commas_inside_brackets_and_quotes_part_no_values():
    assert split_values("""[1,2],{a=1, b=2},'x,y',"z,",4""") == ["[1,2]", "{a=1, b=2}", "'x,y'", '"z,"', "4"]


def test_a_thousand_tasks_are_resolved_in_no_time(rendered):
    began = time.process_time()
    run, _, _ = rendered("--sweep", "train.lr=" + ",".join(f"{n}e-5" for n in range(1, 1001)))
    assert len(read_sweep(run).tasks) == 1000
    assert time.process_time() - began < 3


def test_tasks_are_named_by_their_values(rendered, toolkit, squeue):
    run, _, _ = rendered("--sweep", "train.lr=1e-3,3e-4,9", "--sweep", "args.layers=2,4")
    write_json(run.submitted(0), {"job_id": "7", "start": 0, "time": "2026-11-21T02:48:01.000Z"})
    for number in range(6):
        task = make_task(run, number)
        claim(task, job_id=f"7_{number}")
        failed = {"state": "failed", "cause": "crashed", "exit_code": 3}
        end_attempt(task, **(failed if number > 3 else {"state": "completed", "cause": "completed", "exit_code": 0}))
    told = json.loads(toolkit.ok("status", run.run_id, "--json"))
    assert states_of(told)["7_4"] == "failed"
    assert told["tasks"][3]["values"] == {"train.lr": 3e-4, "args.layers": 4}
    of_task = json.loads(toolkit.ok("status", f"{run.run_id}_1", "--json"))
    assert of_task["values"] == {"train.lr": 1e-3, "args.layers": 4}
    assert "train.lr=0.001, args.layers=4" in toolkit.ok("status", f"{run.run_id}_1")
    rows = toolkit.ok("status", run.run_id, "--tasks").splitlines()
    assert "train.lr=9.0, args.layers=4" in rows[6]
    explained = toolkit.ok("explain", run.run_id)
    assert "all 2 failed tasks have train.lr=9.0, and no completed task has" in explained
    assert "task 4 (train.lr=9.0, args.layers=2)" in explained
    assert "with train.lr=9.0, args.layers=2 failed" in toolkit.ok("explain", f"{run.run_id}_4")


def test_values_that_a_good_task_has_too_explain_nothing():
    bad = [{"a": 1, "b": 1}, {"a": 1, "b": 2}]
    assert common_values(bad, [{"a": 2, "b": 1}]) == {"a": 1}
    assert common_values(bad, [{"a": 1, "b": 1}]) == {}
    assert common_values(bad[:1], [{"a": 2}]) == {}


def test_a_resume_keeps_each_tasks_values(rendered, toolkit, squeue, sbatch):
    run, _, _ = rendered("--sweep", "train.lr=1e-3,3e-4")
    write_json(run.submitted(0), {"job_id": "7", "start": 0, "time": "2026-11-21T02:48:01.000Z"})
    squeue(("7_0", "FAILED", "None"), ("7_1", "FAILED", "None"))
    refused = toolkit("resume", run.run_id, "--set", "train.lr=1")
    assert (refused.code, "train.lr is swept" in refused.err) == (2, True)
    refused = toolkit("resume", run.run_id, "--set", "job.array=5")
    assert (refused.code, "the sweep has 2 tasks" in refused.err) == (2, True)
    toolkit.ok("resume", f"{run.run_id}_1", "--set", "train.steps=7")
    line = next(line for line in run.script(1).read_text().splitlines() if line.startswith('{"schema'))
    job = job_of_task(json.loads(line), 1)
    assert (job["train"]["lr"], job["train"]["steps"], job["job"]["array"]) == (3e-4, 7, "1")


def test_diff_tells_each_task_as_its_own_last_start_had_it(toolkit, squeue, sbatch, project):
    """Tasks 0 and 1 were done in start 0; task 2 failed, and was done in start 1, with mended code. None keeps `job.json`."""
    script = project / "train.sh"
    for text, mode in (("#!/bin/sh\n", 0o755), ("#!/bin/sh\ntrue\n", None)):
        script.write_text(text)
        if mode is not None:
            script.chmod(mode)
            (project / "work.toml").write_text('[job]\nentry = ["./train.sh"]\n')
            toolkit.ok(
                "render", project / "work.toml", "--site", "devcluster", "--sweep", "env.vars.SEED=1,2,3", "-a", "%3"
            )
    run = RunDirectory(next(toolkit.runs.glob("work/*")))
    write_json(run.submitted(0), {"job_id": "7", "start": 0, "time": "2026-11-21T02:48:01.000Z"})
    for number, state in enumerate(("completed", "completed", "failed")):
        claim(make_task(run, number), job_id=f"7_{number}")
        end_start(run.task(number), 0, state=state, exit_code=0)
        end_attempt(run.task(number), state=state, exit_code=0)
    squeue()
    toolkit.ok("resume", run.run_id, "--set", "train.steps=7")

    def told(a, b):
        found = json.loads(toolkit.ok("diff", f"{run.run_id}_{a}", f"{run.run_id}_{b}", "--json"))
        return [{row["key"]: (row["a"], row["b"]) for row in found[part]} for part in ("configuration", "code")]

    seeds = "env.vars.SEED"
    assert told(0, 1) == [{seeds: ("1", "2")}, {}]
    assert told(0, 2) == [{seeds: ("1", "3")}, {}]  # the resume has not begun
    claim(run.task(2), job_id="8_2", number=1)
    configuration, code = told(0, 2)
    assert configuration == {
        seeds: ("1", "3"),
        "train.steps": (1000, 7),
        "job.array": ("0-2%3", "2%3"),
    } and code.keys() == {"train.sh"}
    assert told(0, 1) == [{seeds: ("1", "2")}, {}]


def test_a_damaged_file_of_values_is_refused_by_name(rendered, toolkit, squeue):
    run, _, _ = rendered("--sweep", "train.lr=1e-3,3e-4")
    write_json(run.submitted(0), {"job_id": "7", "start": 0, "time": "2026-11-21T02:48:01.000Z"})
    run.sweep.write_text('{"keys": ["train.lr"], "tasks": [1, 2]}')
    refused = toolkit("status", run.run_id)
    assert (refused.code, "sweep.json" in refused.err) == (2, True)


def test_an_argument_is_swept_in_the_job_file_and_after_the_dashes(toolkit):
    job = toolkit.folder / "argv.toml"
    job.write_text('[job]\nentry = ["true"]\nargv = ["--lr", "1", "--seed=2"]\n')
    sweep = ("--sweep", "argv.lr=0.1,0.2", "--sweep", "argv.steps=5", "--sweep", "argv.new=6")
    script = toolkit.ok("render", job, "--site", "devcluster", *sweep, "--", "--steps", "3")
    whole = json.loads(next(line for line in script.splitlines() if line.startswith('{"schema')))
    task = job_of_task(whole, 1)
    assert task["job"]["argv"] == ["--lr", "0.2", "--seed=2"]
    assert task["argv"] == ["--steps", "5", "--new=6"]
    assert whole["job"]["argv"] == ["--lr", "1", "--seed=2"]


def test_an_argument_that_occurs_twice_is_refused_at_submission(toolkit):
    job = toolkit.job("true")
    said = toolkit("render", job, "--site", "devcluster", "--sweep", "argv.lr=1,2", "--", "--lr=3", "lr=4")
    assert said.code == 2
    assert "lr occurs 2 times in the arguments: --lr=3 lr=4" in said.err
