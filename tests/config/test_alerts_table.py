"""The tables [alerts] and [notify.channels]: what submit rejects, and where."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.config.request import resolve_job
from toolkit.config.resolved import ResolvedJob
from toolkit.errors import ToolkitError

RULE = '[alerts.rules.slow]\nwhen = "step_s > 2"\n'


def resolved(folder: Path, text: str, *settings: str, defaults: str = "") -> ResolvedJob:
    (folder / ".config/toolkit").mkdir(parents=True, exist_ok=True)
    (folder / ".config/toolkit/config.toml").write_text(defaults)
    (folder / "work.toml").write_text(f"[job]\nentry = ['true']\n{text}")
    return resolve_job(folder / "work.toml", site=None, environ={"HOME": str(folder)}, settings=settings)


@pytest.mark.parametrize(
    ("text", "place", "problem"),
    [
        ('[alerts.rules.slow]\nwhen = "step_s => 2"\n', ":4:alerts.rules.slow.when", "'step_s => 2' is not a valid condition. Fix: use a condition such as"),
        ('[alerts.rules.slow]\nwhen = "verdict:slow"\n', ":4:alerts.rules.slow.when", "'verdict:slow' is not a valid condition"),
        ('[alerts.rules.slow]\nwhen = "verdict:stal"\n', ":4:alerts.rules.slow.when", "expected stall, got 'stal'"),
        ('[alerts.rules.slow]\nwhen = "verdict:stall >= critcal"\n', ":4:alerts.rules.slow.when", "expected critical, got 'critcal'"),
        ('[observe]\nmetrics = ["acc:mean"]\n[alerts.rules.slow]\nwhen = "acc:mean > 0.5"\n', ":6:alerts.rules.slow.when", "write acc;"),
        ('[alerts.rules.slow]\nwhen = "reward.p99 > 1"\n', ":4:alerts.rules.slow.when", "'reward.p99' not found. Fix: use reward, with .mean, .min, .max or .p95"),
        ('[observe]\nmetrics = ["reward"]\n[alerts.rules.slow]\nwhen = "reward.median > 1"\n', ":6:alerts.rules.slow.when", "Fix: use reward, with .mean"),
        (RULE + 'for = "60"\n', ":5:alerts.rules.slow.for", "expected a duration such as"),
        (RULE + 'cooldown = "1 week"\n', ":5:alerts.rules.slow.cooldown", "got '1 week'"),
        (RULE + 'severity = "fatal"\n', ":5:alerts.rules.slow.severity", "'fatal'"),
        (RULE + 'action = "kill"\n', ":5:alerts.rules.slow.action", '"exclude_node"'),
        (RULE + 'channels = ["log", "team"]\n', ":5:alerts.rules.slow.channels", "channel 'team' not found"),
        (RULE + 'chanels = ["log"]\n', ":5:alerts.rules.slow.chanels", "write 'channels'"),
        ("[alerts.rules.slow]\n", ":3:alerts.rules.slow.when", "required key not found"),
        ('[alerts.rules."a b"]\nwhen = "x > 2"\n', ":3:alerts.rules.a b", "a b"),
        ('[notify.channels]\nteam = "https://T0SECRET"\n', ":4:notify.channels.team", "not a valid value"),
        ('[notify.channels]\nteam = "slack:T0SECRET"\n', ":4:notify.channels.team", "not a valid value"),
        ('[notify.channels]\nme = "mail:two words"\n', ":4:notify.channels.me", "not a valid value"),
        ('[notify]\nsmtp = "smtp://ada:T0SECRET@host"\n', ":4:notify.smtp", "not a valid value"),
        ('[notify]\nsender = "me"\n', ":4:notify.sender", "'me'"),
    ],
)  # fmt: skip
def test_wrong_values_are_rejected_with_their_place(tmp_path, text, place, problem):
    with pytest.raises(ToolkitError) as caught:
        resolved(tmp_path, text)
    assert place in str(caught.value) and problem in str(caught.value) and "T0SECRET" not in str(caught.value)


def test_rules_of_the_user_and_of_the_job_are_merged_and_flags_override_them(tmp_path):
    defaults = RULE + '[notify]\nsmtp = "smtps://mail.example.org"\n[notify.channels]\nteam = "slack:env:TEAM"\n'
    job = resolved(tmp_path, '[alerts.rules.slow]\nfor = "60s"\nchannels = ["team"]\n', defaults=defaults)
    rule = job.alerts.rules["slow"]
    assert (rule.when, rule.for_, rule.channels) == ("step_s > 2", "60s", ["team"])
    assert job.notify.variables == ["TEAM"] and job.notify.references == {"channels.team": "env:TEAM"}
    job = resolved(
        tmp_path, RULE, "alerts.rules.slow.when=loss > 9", "alerts.rules.slow.channels=log", "alerts.dry_run=true"
    )
    assert job.alerts.rules["slow"].when == "loss > 9" and job.alerts.dry_run
    with pytest.raises(ToolkitError, match="'loss' is not a valid condition"):
        resolved(tmp_path, RULE, "alerts.rules.slow.when=loss")
    with pytest.raises(ToolkitError, match=r"alerts\.rules\.slow\.whne"):
        resolved(tmp_path, RULE, "alerts.rules.slow.whne=loss > 3")


def test_the_standard_channels_need_no_table(tmp_path):
    text = (
        '[notify]\nmail = ["me@example.org"]\nwebhook = "env:HOOK"\n' + RULE + 'channels = ["log", "mail", "webhook"]\n'
    )
    assert resolved(tmp_path, text).alerts.rules["slow"].channels == ["log", "mail", "webhook"]
