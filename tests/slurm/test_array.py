"""An array's tasks are those that Slurm makes of the same text, and what Slurm would read otherwise is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.slurm.array import array_variables, parse_array, write_array


@pytest.mark.parametrize(
    ("text", "tasks", "at_once"),
    [
        ("0-9%2", range(10), 2),
        ("0-15:4", [0, 4, 8, 12], None),
        ("1,3,5-7", [1, 3, 5, 6, 7], None),
        ("5", [5], None),
        ("1-9:4%0", [1, 5, 9], None),
        ("07", [7], None),
        ("0-4:2,1-3:2%1000", [0, 2, 4, 1, 3], 1000),
    ],
)
def test_forms(text, tasks, at_once):
    array = parse_array(text)
    assert (list(array), len(array), array.at_once) == (list(tasks), len(tasks), at_once)


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("0-10:4", "3 0 8 4"),
        ("7,3,1%2", "3 1 7 1"),
        ("0,5-9:2", "4 0 9 2"),
        ("0-3:1,4-8:2", "7 0 8 1"),
        ("6", "1 6 6 1"),
    ],
)  # as printed by Slurm 22.05
def test_tasks_see_count_minimum_maximum_and_step_of_the_array(text, seen):
    names = [f"SLURM_ARRAY_TASK_{name}" for name in ("COUNT", "MIN", "MAX", "STEP")]
    assert array_variables(text) == dict(zip(names, seen.split(), strict=True))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected a number or a range"),
        ("%2", "expected a number or a range"),  # Slurm runs task 0
        ("1,,2", "expected a number or a range"),
        ("[0-3]", "expected a number or a range"),
        ("0x1", "expected a number or a range"),
        ("٣", "expected a number or a range"),
        ("-1", "expected a number or a range"),
        ("1-3:2:2", "expected a number or a range"),
        ("3-1", "is empty"),
        ("0-3:0", "is empty"),
        ("1,1", "twice"),
        ("0-9:3,6", "twice"),
        ("0-3%", "after %"),
        ("0-3%2,5", "after %"),
        ("0-10000000", "largest task number in Slurm is 4000000"),
        ("0-99999999999999999999", "expected a number or a range"),
    ],
)
def test_others_are_refused(text, said):
    with pytest.raises(ValueError, match=said):
        parse_array(text)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20), st.integers(1, 7)), min_size=1, max_size=4))
def test_a_task_stands_once(terms):
    text = ",".join(f"{first}-{first + more}:{step}" for first, more, step in terms)
    named = [task for first, more, step in terms for task in range(first, first + more + 1, step)]
    if len(set(named)) == len(named):
        assert list(parse_array(text)) == named
    else:
        with pytest.raises(ValueError, match="twice"):
            parse_array(text)


def test_from_the_job_file_to_the_script(toolkit):
    job = toolkit.job("true", more="")
    job.write_text(job.read_text() + 'array = "0-3"\n')
    script = toolkit.ok("render", job, "--site", "devcluster", "-a", "0-9%2")
    assert "#SBATCH --array=0-9%2\n" in script
    assert "/slurm-%A_%a.out\n" in script
    assert "#SBATCH --array=0-3\n" in toolkit.ok("render", job, "--site", "devcluster")
    assert "--array" not in toolkit.ok("render", job, "--set", "job.array=")


def test_refusals_name_place_and_fix(toolkit):
    job = toolkit.job("true")
    for words, said in [
        (["-a", "0-3"], "-a 0-3:job.array: site 'local' has no scheduler to run the tasks of an array. Fix: use --site"),
        (["-a", "1,1"], "-a 1,1:job.array: '1,1' contains a task twice: '1' repeats it. Fix: use \"0-9\""),
        (["--set", 'job.sbatch=["--array=0-3"]'], "'--array=0-3' would override another key. Fix: write array ="),
    ]:  # fmt: skip
        refused = toolkit("submit", job, *words)
        assert (refused.code, said in refused.err) == (2, True), refused


@given(st.sets(st.integers(0, 50), min_size=1))
def test_numbers_are_written_as_they_are_read(numbers):
    assert list(parse_array(write_array(sorted(numbers)))) == sorted(numbers)


def test_neighbours_become_a_range():
    assert write_array([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
