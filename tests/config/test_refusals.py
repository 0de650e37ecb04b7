"""Every mistake in a job file is one line: the place, what is wrong with the value, and the fix."""

import pytest

from toolkit.config.checks import check_request
from toolkit.config.document import Flag
from toolkit.errors import NotFoundError, ToolkitError
from toolkit.site.load import load_site


def message_of(tmp_path, call):
    with pytest.raises(ToolkitError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(f"{tmp_path}/", "")


# Lines are counted in the file that `resolve` writes: [job] is 1, entry is 2, the first line of ours is 3.
@pytest.mark.parametrize(
    ("job", "more", "message"),
    [
        ("nodse = 2", "", "job.toml:3:job.nodse: unknown key 'nodse' in [job]. Fix: write 'nodes'"),
        ("steps = 2", "", "job.toml:3:job.steps: unknown key 'steps' in [job]. Fix: move steps to [train]"),
        ("", "[trian]\nsteps = 2", "job.toml:4:trian: unknown key or table 'trian'. Fix: write 'train'"),
        (
            "",
            "[restart]\nzzzz = 2",
            "job.toml:5:restart.zzzz: unknown key 'zzzz' in [restart]. "
            "Fix: remove zzzz, or use one of crashes, walltimes, blind_requeues, progress, argv, out_of_memory, steps_must_succeed, preemptions, warn_s, stall_s, collective_timeout_s, "
            "health",
        ),
        (
            "",
            "[train]\n\nsteps = 'ten'",
            "job.toml:6:train.steps: 'ten' is rejected: input should be a valid integer. "
            "Fix: use a whole number, at least 1",
        ),
        (
            "",
            "[train]\nsteps = 0",
            "job.toml:5:train.steps: 0 is rejected: input should be greater than or equal to 1. "
            "Fix: use a whole number, at least 1",
        ),
        (
            "",
            "[train]\ndeterministic = 1",
            "job.toml:5:train.deterministic: 1 is rejected: input should be a valid boolean. Fix: use true or false",
        ),
        (
            "",
            '[train]\nprecision = "fp8"',
            "job.toml:5:train.precision: 'fp8' is rejected: input should be 'auto', 'fp32', 'bf16' or 'fp16'. "
            'Fix: use one of "auto", "fp32", "bf16", "fp16"',
        ),
        (
            'name = "my job"',
            "",
            "job.toml:3:job.name: 'my job' is not a valid job name. Fix: use 1 to 64 of the characters A-Z a-z 0-9 . _ -, a letter or digit first",
        ),
        (
            f'name = "{"a" * 65}"',
            "",
            f"job.toml:3:job.name: '{'a' * 65}' is not a valid job name. Fix: use 1 to 64 of the characters A-Z a-z 0-9 . _ -, a letter or digit first",
        ),
        (
            'name = ".."',
            "",
            "job.toml:3:job.name: '..' is not a valid job name. Fix: use 1 to 64 of the characters A-Z a-z 0-9 . _ -, a letter or digit first",
        ),
        (
            'account = "a\\nrm -rf"',
            "",
            "job.toml:3:job.account: contains the control character '\\n'. Fix: use a string",
        ),
        (
            'sbatch = ["--mail-type=END", "--x\\u2028y"]',
            "",
            "job.toml:3:job.sbatch: contains the control character '\\u2028'. "
            'Fix: use a list of options such as ["--mail-type=END"]',
        ),
        (
            'nodes = "4-2"',
            "",
            "job.toml:3:job.nodes: expected a number or a range of nodes, got '4-2'. "
            'Fix: use a whole number from 1, or a range such as "2-4"',
        ),
        (
            "nodes = 0",
            "",
            'job.toml:3:job.nodes: expected a number of nodes from 1 to 1000000, got 0. Fix: use a whole number from 1, or a range such as "2-4"',
        ),
        (
            'time = "2h"',
            "",
            "job.toml:3:job.time: '2h' is not a valid Slurm time. Fix: use "
            '"MM", "MM:SS", "HH:MM:SS", "D-HH", "D-HH:MM", "D-HH:MM:SS" or "UNLIMITED"',
        ),
        (
            "",
            '[env]\npass = ["A B"]',
            "job.toml:5:env.pass: 'A B' is not a valid variable name or pattern such as HF_*. "
            'Fix: use a list of variable names and patterns such as ["HF_HOME", "WANDB_*"]',
        ),
        (
            "",
            "[env.vars]\nA = 1",
            "job.toml:5:env.vars.A: 1 is rejected: input should be a valid string. "
            'Fix: use a table of strings such as { FLAG = "1" }',
        ),
        (
            "",
            "[[train]]\nsteps = 2",
            "job.toml:4:train: expected a table, got [{'steps': 2}]. Fix: write [train] and its keys below it",
        ),
    ],
)
def test_a_wrong_value(tmp_path, resolve, job, more, message):
    assert message_of(tmp_path, lambda: resolve(job, more)) == message


def lines_of(call):
    with pytest.raises(ToolkitError) as caught:
        call()
    return [str(one) for one in (caught.value, *caught.value.others)]


def test_every_mistake_has_a_line(resolve):
    wrong = [f"{key} = 'x'" for key in ("steps", "batch", "lr", "seed", "log_every", "clip_norm")]
    lines = lines_of(lambda: resolve("", "\n".join(["[train]", *wrong[:3]])))
    assert [line.rpartition("job.toml:")[2].split(": ")[0] for line in lines] == [
        "5:train.steps", "6:train.batch", "7:train.lr",
    ]  # fmt: skip
    lines = lines_of(lambda: resolve("", "\n".join(["[train]", *wrong])))
    assert len(lines) == 6


@pytest.mark.parametrize(
    ("text", "fix"), [('[job]\nentyr = ["true"]\n', "write 'entry'"), ('[jbo]\nentry = ["true"]\n', "write 'job'")]
)
def test_a_misspelt_key_is_not_called_a_missing_one(resolve, text, fix):
    (line,) = lines_of(lambda: resolve(text=text))
    assert line.endswith(f"Fix: {fix}")


def test_unknown_keys_come_first(resolve):
    lines = lines_of(lambda: resolve("nodes = 0\ntiem = 5"))
    assert ["tiem" in line for line in lines] == [True, False]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[job]\nname = train\n",
            "job.toml:2: invalid TOML: Invalid value. Fix: fix that line; strings need quotes, see toml.io",
        ),
        ("[job]\nname = '''", "job.toml:2: invalid TOML: "),
        ("", "job.toml:1:job.entry: required key not found. Fix: add entry = "),
        ("job = 5\n", "job.toml:1:job: expected a table, got 5. Fix: write [job] and its keys below it"),
        (
            "steps = 5\n[job]\nentry = ['a']\n",
            "job.toml:1:steps: unknown key or table 'steps'. Fix: move steps to [train]",
        ),
    ],
)
def test_a_wrong_file(tmp_path, resolve, text, message):
    assert message_of(tmp_path, lambda: resolve(text=text)).startswith(message)


def test_a_file_that_is_not_utf8(tmp_path, resolve):
    path = tmp_path / "job.toml"

    def read():
        from toolkit.config.document import read_document

        path.write_bytes(b"[job]\nname = '\xff'\n")
        read_document(path)

    assert message_of(tmp_path, read) == "job.toml:2: byte 0xff is not UTF-8. Fix: save the file as UTF-8"


def test_no_file(tmp_path):
    from toolkit.config.request import resolve_job

    with pytest.raises(NotFoundError, match="file not found") as caught:
        resolve_job(tmp_path / "none.toml", site=None, environ={})
    assert caught.value.exit_code == 4


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"settings": ["train.step=5"]}, "--set train.step=5: unknown key 'train.step'. Fix: write train.steps"),
        ({"settings": ["tarin.steps=5"]}, "--set tarin.steps=5: unknown key 'tarin.steps'. Fix: write train"),
        (
            {"settings": ["train.steps=ten"]},
            "--set train.steps=ten:train.steps: 'ten' is not a valid value for this key. Fix: use a whole number, at least 1",
        ),
        (
            {"settings": ["train.steps=0"]},
            "--set train.steps=0:train.steps: 0 is rejected: input should be greater than or equal to 1. "
            "Fix: use a whole number, at least 1",
        ),
        ({"settings": ["env.vars={SLURM_JOB_ID='1'}"]}, "--set env.vars={SLURM_JOB_ID='1'}:env.vars"),
        ({"settings": ["env.vars.SLURM_JOB_ID=1"]}, "--set env.vars.SLURM_JOB_ID=1:env.vars.SLURM_JOB_ID: "),
        (
            {"settings": ['train.steps="5"']},
            '--set train.steps="5":train.steps: \'"5"\' is not a valid value for this key. Fix: use a whole number, at least 1',
        ),
        ({"settings": ["steps"]}, "--set: expected TABLE.KEY=VALUE, got 'steps'. Fix: write --set train.steps=100"),
        (
            {"environ": {"TOOLKIT_TRAIN_STEP": "5"}},
            "TOOLKIT_TRAIN_STEP: unknown key 'train.step'. Fix: write train.steps",
        ),
        ({"environ": {"SBATCH_TIMELIMIT": "2h"}}, "SBATCH_TIMELIMIT:job.time: '2h' is not a valid Slurm time"),
        (
            {"environ": {"SBATCH_GPUS_PER_NODE": "a100:4"}},
            "SBATCH_GPUS_PER_NODE:job.gpus_per_node: 'a100:4' is not a valid value for this key. Fix: use a whole number, at least 0",
        ),
        (
            {"flags": {"job.nodes": Flag("x", "-N")}},
            "-N x:job.nodes: expected a number or a range of nodes, got 'x'. Fix: ",
        ),
    ],
)
def test_a_wrong_value_of_another_layer_names_it(tmp_path, resolve, layers, message):
    assert message_of(tmp_path, lambda: resolve(**layers)).startswith(message)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ('"trian.py:main"', 'job.toml:2:job.entry: file trian.py not found. Fix: write "train.py"'),
        ('"other/x.py"', "job.toml:2:job.entry: file other/x.py not found. Fix: create it, or use a path relative to "),
        (
            '"train.py:2main"',
            "job.toml:2:job.entry: '2main' is not a valid function name. Fix: write \"train.py:main\"",
        ),
        (
            '"train"',
            'job.toml:2:job.entry: \'train\' is not a valid entry. Fix: write "file.py:main", "file.py", '
            '"package.module:main", or a list such as ["./a.out"]',
        ),
        ("[]", "job.toml:2:job.entry: [] is not a valid entry: the program is empty. Fix: use "),
        ('["", "a"]', "job.toml:2:job.entry: ['', 'a'] is not a valid entry: the program is empty. Fix: use "),
        ("5", "job.toml:2:job.entry: 5 is not a valid value for this key. Fix: use "),
    ],
)
def test_a_wrong_entry(tmp_path, resolve, entry, message):
    (tmp_path / "train.py").touch()
    assert message_of(tmp_path, lambda: resolve(text=f"[job]\nentry = {entry}\n")).startswith(message)


@pytest.mark.parametrize(
    "entry", ['"train.py"', '"train.py:main"', '"package.module:main"', '["a.out", "-x"]', '["./a.out", "-x"]']
)
def test_a_right_entry(resolve, tmp_path, entry):
    (tmp_path / "a.out").touch(0o755)
    assert resolve(text=f"[job]\nentry = {entry}\n").job.entry


def test_a_program_beside_the_job_file_is_there_and_executable(tmp_path, resolve):
    text = '[job]\nentry = ["./nope.sh"]\n'
    message = message_of(tmp_path, lambda: resolve(text=text))
    assert message.startswith("job.toml:2:job.entry: file nope.sh not found. Fix: create it")
    (tmp_path / "nope.sh").touch(0o644)
    message = message_of(tmp_path, lambda: resolve(text=text))
    assert message == "job.toml:2:job.entry: nope.sh is not executable. Fix: chmod +x nope.sh"


@pytest.mark.parametrize(
    "source",
    [
        "def start(world, config): ...",
        "if True:\n    async def start(world, config): ...",
        "from elsewhere import start",
        "from elsewhere import go as start",
        "from elsewhere import *",
        "start = print",
        "def set():\n    global start\n    start = print",
        "globals()['start'] = print",
    ],
)
def test_a_function_that_may_be_there(tmp_path, resolve, source):
    (tmp_path / "own.py").write_text(source)
    assert resolve(text='[job]\nentry = "own.py:start"\n')


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "def strat(world, config): ...",
            "job.toml:2:job.entry: function 'start' not found in own.py. Fix: write \"own.py:strat\"",
        ),
        ("class A:\n    def start(self): ...\n", "job.toml:2:job.entry: function 'start' not found in own.py. "),
        ("import os\n", "job.toml:2:job.entry: function 'start' not found in own.py. Fix: define it there"),
        ("x = 1\ndef start(:\n", "own.py:2: invalid Python: "),
    ],
)
def test_a_function_that_is_not_there(tmp_path, resolve, source, message):
    (tmp_path / "own.py").write_text(source)
    assert message_of(tmp_path, lambda: resolve(text='[job]\nentry = "own.py:start"\n')).startswith(message)


@pytest.mark.parametrize(
    ("option", "key"),
    [
        ("-N 4", "nodes = "), ("--nodes=4", "nodes = "), ("-n8", "ranks_per_node = "), ("--ntasks-per-node 2", "ranks_per_node = "),
        ("-c2", "cpus_per_rank = "), ("--time=1", "time = "), ("-t 1", "time = "), ("-pshort", "partition = "),
        ("-A x", "account = "), ("--qos=x", "qos = "), ("-a 0-3", "array = "), ("-J x", "name = "), ("--requeue", "requeue = true"),
        ("--no-requeue", "requeue = false"), ("--signal=B:USR1@60", "warn_s = "), ("--open-mode=truncate", "remove the option"),
        ("--partit=short", "partition = "), ("--acco x", "account = "), ("--no-req", "requeue = false"),
    ],
)  # fmt: skip
def test_an_sbatch_option_that_another_key_sets_is_refused_with_that_key(tmp_path, resolve, option, key):
    said = message_of(tmp_path, lambda: resolve(f'sbatch = ["--hold", "{option}"]'))
    assert said.startswith(f"job.toml:3:job.sbatch: {option!r} would override ")
    assert key in said


@pytest.mark.parametrize(
    "option",
    ["--time-min=1", "--nodefile=x", "--nodelist=n1", "-w n1", "-x n1", "--exclude=n1", "-C gpu", "--comment=a", "--mem=500M",
     "--requeue-not-known=1", "--ntasks-per-core=1", "-H", "-o x", "-d afterok:5", "-vv", "--gres gpu:1", "--comment=a b - c",
     "--nice=-5", "--comment 'a --time=5'",
     "--comment=try -x --time=5"],
)  # fmt: skip
def test_other_sbatch_options_are_passed_on(resolve, option):
    assert resolve(f'sbatch = ["{option}"]').job.sbatch == [option]


@pytest.mark.parametrize(
    "text", ["--exclusive --time=2-0 --nodes=9", "--exclusive -N 9", "--gres gpu:1 -t5", "-H -N9", "-HN9"]
)  # fmt: skip
def test_a_second_option_in_one_text_would_pass_every_check_and_is_refused(tmp_path, resolve, text):
    said = message_of(tmp_path, lambda: resolve(f'sbatch = ["{text}"]'))
    assert said.startswith(
        f"job.toml:3:job.sbatch: {text!r} contains more than one option. Fix: write each option as its own string"
    )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ('take = "weights"', 'checkpoint.take: "weights" requires a checkpoint to load the weights from. Fix: set checkpoint.source'),
        ('aggregate = "node"\ncompression = "gzip"', 'checkpoint.compression: compression requires one shard file per rank. Fix: set checkpoint.aggregate to "rank"'),
        ("keep_best = 2", "checkpoint.keep_best: 2 has no effect without a metric. Fix: set checkpoint.best, for example best = \"loss\""),
        ('best_mode = "max"', "checkpoint.best_mode: 'max' has no effect without a metric. Fix: set checkpoint.best, for example best = \"loss\""),
        ("best_every_steps = 7", "checkpoint.best_every_steps: 7 has no effect without a metric. Fix: set checkpoint.best, for example best = \"loss\""),
        ('when_busy = "skip"', "checkpoint.when_busy: 'skip' has no effect without background saves. Fix: set checkpoint.background to true"),
        ('source = "/old"\nwithout = ["head"]', 'checkpoint.without: has no effect unless take = "weights". Fix: set checkpoint.take to "weights"'),
    ],
)  # fmt: skip
def test_keys_of_checkpoint_that_do_not_go_together(tmp_path, resolve, keys, message):
    text = f'[job]\nentry = ["env"]\n[checkpoint]\n{keys}\n'
    assert message_of(tmp_path, lambda: resolve(text=text)).endswith(message)


def test_keys_of_checkpoint_that_go_together_and_defaults_that_are_written_out(resolve):
    together = (
        'best = "loss"\nkeep_best = 2\nbest_mode = "max"\nbest_every_steps = 7\nbackground = true\nwhen_busy = "skip"'
    )
    defaults = 'keep_best = 0\nbest_mode = "min"\nbest_every_steps = 100\nwhen_busy = "wait"'
    for keys in (together, defaults):
        resolve(text=f'[job]\nentry = ["env"]\n[checkpoint]\n{keys}\n')


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["(?P<step>"], "pattern 1, '(?P<step>', is not a regular expression: missing ), unterminated subpattern at position 0"),
        ([r"step (\d+)"], r"pattern 1, 'step (\\d+)', has no named group. Fix: write a group such as (?P<step>\d+)"),
        ([r"loss (?P<loss>\S+)"], "no pattern has the group `step`"),
        ([r"(?P<step>\d+) (?P<step_s>\S+)"], "toolkit measures step_s itself. Fix: use another name for the group step_s"),
        ([r"(?P<step>\d+)", *(f"(?P<m{number}>a)" for number in range(17))], "expected up to 16 metrics with those in metrics, got 17: m0,"),
    ],
)  # fmt: skip
def test_a_wrong_pattern_of_lines(tmp_path, resolve, patterns, message):
    more = f"[observe]\nstep_line = {patterns!r}".replace("\\\\", "\\")
    assert message_of(tmp_path, lambda: resolve(more=more)).startswith(f"job.toml:5:observe.step_line: {message}")


def test_patterns_of_lines_have_no_effect_on_a_function(tmp_path, resolve):
    text = "[job]\nentry = 'train.py:main'\n[observe]\nstep_line = 'nanogpt'\n"
    site = load_site("local")
    message = message_of(tmp_path, lambda: check_request(resolve(text=text, site=site), site))
    assert "observe.step_line: has no effect for a function, which reports its steps" in message
