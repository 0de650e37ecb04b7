"""The page on alerts: its job file is valid, and it names what the code knows."""

import re
from pathlib import Path
from typing import get_args

from toolkit.config.alerts import RuleTable
from toolkit.config.request import resolve_job
from toolkit.metrics.alert_rules import parse_condition
from toolkit.metrics.alerts import AlertState
from toolkit.supervise.channels import CHANNELS

PAGE = (Path(__file__).parents[2] / "docs" / "alerts.md").read_text()


def test_the_rules_of_the_page_are_valid(tmp_path):
    blocks = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "job.toml").write_text("\n".join(["[job]\nentry = ['true']", *blocks]))
    job = resolve_job(tmp_path / "job.toml", site=None, environ={})
    assert job.alerts.rules["slow"].channels == ["log", "team"] and job.observe.metrics == ["reward", "acc:mean"]


def test_each_condition_of_the_page_can_be_parsed():
    table = PAGE[PAGE.index("## Conditions") : PAGE.index("## States")]
    conditions = [
        one for row in re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE) for one in re.findall("`(.*?)`", row)
    ]
    assert len([parse_condition(one) for one in conditions if one != "when"]) == 6


def test_every_channel_action_and_state_is_on_the_page():
    actions = [one for one in get_args(RuleTable.model_fields["action"].annotation) if one]
    states = [state.value for state in AlertState if state is not AlertState.INACTIVE]
    missing = [one for one in (*actions, *states) if not re.search(rf'[`"]{one}[`"]', PAGE)]
    assert missing + [kind for kind in CHANNELS if f"`{kind}" not in PAGE] == []
