"""The series of a run: their values, what is absent, and that no name or value makes the text invalid."""

from __future__ import annotations

import json
import math
import re
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_runs import record_all, record_steps
from step_windows import NOW_S, same, window

from toolkit.metrics.verdicts import VerdictKind
from toolkit.observe.readings import RunReadings
from toolkit.observe.series import data_file, records_of, text_of
from toolkit.rundir.attempt_records import AttemptRecord
from toolkit.rundir.claims import claim_attempt
from toolkit.rundir.layout import RunDirectory
from toolkit.rundir.states import Cause, Next, RunState

ENDED = AttemptRecord(Cause.CRASHED, Next.END, True, RunState.FAILED, 7, "exit code 7", "end")
NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\[\\"n])*"'
SAMPLE = re.compile(rf"({NAME})\{{((?:{LABEL},?)*)\}} (NaN|[+-]Inf|[-+0-9.e]+)")


def parsed(text: str) -> dict[tuple[str, str], float]:
    """The samples of a text by name and labels. Checks the format: each series is declared once, before its samples."""
    assert text == "" or text.endswith("\n")
    found: dict[tuple[str, str], float] = {}
    declared: set[str] = set()
    current = ""
    for line in text.split("\n")[:-1]:
        if line.startswith("# HELP "):
            current = line.split(" ")[2]
            assert current not in declared and len(line.split(" ", 3)[3]) > 0
            declared.add(current)
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name == current and kind in ("gauge", "counter", "summary")
            assert (kind == "counter") == name.endswith("_total"), name
        else:
            match = SAMPLE.fullmatch(line)
            assert match, line
            assert match[1].removesuffix("_sum").removesuffix("_count") == current.removesuffix("_sum"), line
            labels = re.findall(LABEL, match[2])
            assert len({one.partition("=")[0] for one in labels}) == len(labels), "a label twice"
            assert (match[1], match[2]) not in found, "a sample twice"
            found[match[1], match[2]] = float(match[3])
    return found


def text(run: RunDirectory, *, end: AttemptRecord | None = None, ranks: int = 16) -> str:
    readings = RunReadings(run)
    readings.update()
    return text_of([({"run_id": "R", "job_name": "J"}, records_of(readings, end, ranks))])


def samples(run: RunDirectory, **how) -> dict[str, float]:
    """The samples without the labels of the run."""
    return {
        f"{name}{{{labels.partition(',')[2].partition(',')[2]}}}": value
        for (name, labels), value in parsed(text(run, **how)).items()
    }


def promtool(metrics: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["promtool", "check", "metrics"], input=metrics.encode("utf-8", "replace"), capture_output=True
    )


def test_every_series_has_the_values_that_were_recorded(run_directory):
    record_all(run_directory)
    (run_directory.metrics / "alerts.jsonl").write_text(
        '{"rule": "slow", "state": "pending", "severity": "warning"}\n{"rule": "slow", "state": "firing", "severity": "warning"}\n'
        '{"rule": "hot", "state": "firing", "severity": "critical"}\ndamaged\n{"rule": "torn"'
    )
    found = samples(run_directory)
    expected = {
        "toolkit_step{}": 100, "toolkit_planned_steps{}": 100, "toolkit_steps_total{}": 100, "toolkit_loss{}": 2.5,
        "toolkit_tokens_total{}": 256, "toolkit_mfu_ratio{}": 0.4, 'toolkit_step_seconds{quantile="0.95"}': 0.2,
        "toolkit_step_seconds_count{}": 100, "toolkit_step_seconds_sum{}": 20, 'toolkit_phase_seconds{phase="data"}': 0.01,
        "toolkit_efficiency_ratio{}": 0.1035 / 0.2, 'toolkit_user_metric{name="reward_mean"}': 0.5,
        'toolkit_validation{name="top_1"}': 0.75, 'toolkit_rank_work_seconds{host="n1",rank="7"}': 0.107,
        'toolkit_rank_sent_bytes{host="n1",rank="7"}': 4096,
        'toolkit_node_memory_used_bytes{host="n0",pool="host"}': 4e9,
        'toolkit_node_memory_free_bytes{host="n1",pool="host"}': 4e9, 'toolkit_gpu_busy_ratio{host="n0",gpu="0"}': 0.9,
        'toolkit_gpu_ecc_errors_total{host="n0",gpu="0"}': 3, 'toolkit_link_errors_total{host="n0",device="mlx5_0/1"}': 7,
        'toolkit_verdicts{kind="straggler",severity="warning",host="n0"}': 1,
        'toolkit_verdict_cost_ratio{kind="straggler",severity="warning",host="n0"}': 0.1, "toolkit_saves_total{}": 2,
        "toolkit_failed_saves_total{}": 1, "toolkit_save_bytes_total{}": 1000, "toolkit_unreadable_files{}": 0,
        'toolkit_alerts{state="firing",severity="warning"}': 1, 'toolkit_alerts{state="firing",severity="critical"}': 1,
    }  # fmt: skip
    assert {name: found.get(name) for name in expected} == pytest.approx(expected)
    names = {name.partition("{")[0].removesuffix("_sum").removesuffix("_count") for name in found}
    assert names == set(json.loads(data_file("series.json"))) - {"toolkit_exit_code", "toolkit_run_seconds"}


def test_the_ranks_with_the_most_work_are_shown_or_all(run_directory):
    record_all(run_directory, ranks=20)

    def ranks(**how) -> list[int]:
        return sorted(
            int(name.split('rank="')[1].rstrip('"}')) for name in samples(run_directory, **how) if "rank_work_s" in name
        )

    assert ranks() == list(range(4, 20))
    assert ranks(ranks=1000) == list(range(20))


def test_after_the_end_nothing_describes_ranks_and_nodes(run_directory):
    record_all(run_directory)
    found = samples(run_directory, end=ENDED)
    assert found['toolkit_exit_code{state="failed"}'] == 7
    assert (found["toolkit_step{}"], found["toolkit_saves_total{}"], found["toolkit_steps_total{}"]) == (4, 2, 100)
    gone = ("rank_", "node_", "gpu_", "link_", "toolkit_verdict", "quantile", "phase", "efficiency", "user_metric")
    assert [name for name in found if any(part in name for part in gone)] == []


def test_what_was_not_recorded_has_no_sample_and_the_script_s_loss_counts(run_directory):
    attempt = claim_attempt(run_directory)
    assert samples(run_directory) == {"toolkit_unreadable_files{}": 0}
    from toolkit.metrics.window_file import WindowFile

    WindowFile(attempt.windows_file(0), "n0").append([window(0, 0, loss=3.0)])
    found = samples(run_directory)
    assert (found["toolkit_loss{}"], found["toolkit_step{}"]) == (3.0, 50)
    assert not any("mfu" in name or "phase" in name or "tokens" in name for name in found)


def test_a_loss_that_is_not_finite_is_a_sample(run_directory):
    record_steps(claim_attempt(run_directory), loss=math.nan)
    assert math.isnan(samples(run_directory)["toolkit_loss{}"])


def test_a_long_log_is_read_to_its_end(run_directory, monkeypatch):
    monkeypatch.setattr("toolkit.metrics.records._MOST_NEW", 2000)
    record_steps(claim_attempt(run_directory), steps=50)
    assert samples(run_directory)["toolkit_step{}"] == 50


def test_the_text_passes_the_check_of_prometheus(run_directory):
    record_all(run_directory)
    for end in (None, ENDED):
        done = promtool(text(run_directory, end=end))
        assert (done.returncode, done.stdout + done.stderr) == (0, b"")


VALUES = st.floats(allow_nan=True, allow_infinity=True)
NAMES = st.text(st.characters(exclude_categories=()), max_size=12)
HOSTILE = st.builds(
    lambda hosts, metrics, means, losses: {
        "ranks": [{"host": host, "rank": rank, "work_s": value} for rank, (host, value) in enumerate(hosts)],
        "windows": metrics, "means": means, "losses": [{"loss": value} for value in losses],
        "GpuSample": [{"host": host, "gpu": gpu, "busy": value} for gpu, (host, value) in enumerate(hosts)],
        "LinkSample": [{"host": host, "device": f"{host}/{at}", "errors": 1} for at, (host, _) in enumerate(hosts)],
    },
    st.lists(st.tuples(NAMES, VALUES), max_size=4), st.dictionaries(NAMES, VALUES, max_size=20),
    st.dictionaries(NAMES, VALUES, max_size=20), st.lists(VALUES, max_size=1),
)  # fmt: skip


def hostile_text(records: dict, run_id: str, folder: RunDirectory) -> str:
    readings = RunReadings(folder)
    readings.attempt = 0
    from toolkit.metrics.validation import ValidationRecord

    metrics = {name: same(value) for name, value in records.pop("windows").items()}
    readings.windows = {0: [window(0, 0, **{name: value for name, value in metrics.items() if name.isidentifier()})]}
    readings.windows[0][0] = type(readings.windows[0][0])(0, run_id, NOW_S, 10, 1, 5, 5, metrics)
    readings.validations = [ValidationRecord(1, 1, records.pop("means"), False, "", 0)]
    found = dict(records_of(readings, None, 16))
    return text_of([({"run_id": run_id, "job_name": run_id}, found | records), ({"run_id": "other"}, found)])


@given(HOSTILE, NAMES)
def test_no_name_or_value_makes_the_text_invalid(tmp_path_factory, records, run_id):
    found = parsed(hostile_text(dict(records), run_id or "x", RunDirectory(tmp_path_factory.getbasetemp())))
    assert sum(name == "toolkit_user_metric" for name, _ in found) <= 2 * 16


@pytest.mark.evidence
@settings(max_examples=300)
@given(HOSTILE, NAMES)
def test_prometheus_accepts_every_name_and_value(tmp_path_factory, records, run_id):
    done = promtool(hostile_text(dict(records), run_id or "x", RunDirectory(tmp_path_factory.getbasetemp())))
    assert done.returncode == 0, done


def test_labels_are_names_of_the_table_only(run_directory):
    record_all(run_directory)
    used = {name for _, labels in parsed(text(run_directory)) for name in re.findall(r'(\w+)="', labels)}
    assert used == {
        "run_id", "job_name", "host", "rank", "phase", "quantile", "name", "kind", "severity", "gpu", "device", "pool",
        "state",
    }  # fmt: skip
    assert VerdictKind.STRAGGLER in text(run_directory) and "is slow" not in text(run_directory)


def test_a_mean_of_values_too_large_to_add_is_infinite():
    """`statistics.fmean` raises OverflowError for them, which would end every answer of the server."""
    text = text_of([({"run_id": "r"}, {"validation": [{"name": "a", "value": 9e307}] * 2})])
    assert 'toolkit_validation{run_id="r",name="a"} +Inf' in text
