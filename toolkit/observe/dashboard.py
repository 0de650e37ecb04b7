"""The dashboard for Grafana of the series in `data/series.json`."""

from typing import Any

__all__ = ["dashboard"]

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_RUN = 'job_name=~"$job_name",run_id=~"$run_id"'
_WIDTH, _HEIGHTS = 24, {"row": 1, "stat": 4}  # other panels have a height of 8

# Type, title, unit and width of each panel, and the legends of its expressions. "RUN" is the choice of runs; the legend ""
# is the run id.
_PANELS: tuple[tuple[str, str, str, int, dict[str, str]], ...] = (
    ("row", "Verdicts", "", 24, {}),
    ("table", "Raised verdicts", "short", 8, {"toolkit_verdicts{RUN}": "{{kind}} {{severity}} {{host}}"}),
    ("timeseries", "Time that verdicts cost", "percentunit", 8,
     {"sum by (run_id, kind) (toolkit_verdict_cost_ratio{RUN})": "{{run_id}} {{kind}}"}),
    ("timeseries", "Alerts", "short", 8, {"toolkit_alerts{RUN}": "{{run_id}} {{state}} {{severity}}"}),
    ("row", "Progress", "", 24, {}),
    ("stat", "Step", "short", 4, {"toolkit_step{RUN}": ""}),
    ("stat", "Done", "percentunit", 4, {"toolkit_step{RUN} / on (run_id, job_name) toolkit_planned_steps{RUN}": ""}),
    ("stat", "Time to the end", "s", 4,
     {"(toolkit_planned_steps{RUN} - on (run_id, job_name) toolkit_step{RUN})"
      ' * on (run_id, job_name) toolkit_step_seconds{RUN,quantile="0.5"}': ""}),
    ("stat", "Tokens per second", "short", 4, {"toolkit_tokens_per_second{RUN}": ""}),
    ("stat", "MFU", "percentunit", 4, {"toolkit_mfu_ratio{RUN}": ""}),
    ("stat", "Efficiency", "percentunit", 4, {"toolkit_efficiency_ratio{RUN}": ""}),
    ("timeseries", "Loss", "short", 12,
     {"toolkit_loss{RUN}": "{{run_id}} loss", "toolkit_validation{RUN}": "{{run_id}} validation {{name}}"}),
    ("timeseries", "Gradient norm", "short", 6, {"toolkit_grad_norm{RUN}": ""}),
    ("timeseries", "Learning rate", "short", 6, {"toolkit_learning_rate{RUN}": ""}),
    ("timeseries", "Metrics of the program", "short", 12, {"toolkit_user_metric{RUN}": "{{run_id}} {{name}}"}),
    ("timeseries", "Tokens per second, mean of 5 minutes", "short", 12, {"rate(toolkit_tokens_total{RUN}[5m])": ""}),
    ("row", "Steps and ranks", "", 24, {}),
    ("timeseries", "Time of a step", "s", 12, {"toolkit_step_seconds{RUN}": "{{run_id}} {{quantile}}"}),
    ("timeseries", "Phases of a step", "s", 12, {"toolkit_phase_seconds{RUN}": "{{run_id}} {{phase}}"}),
    ("timeseries", "Work of the ranks with the most", "s", 12, {"toolkit_rank_work_seconds{RUN}": "rank {{rank}} {{host}}"}),
    ("timeseries", "CPU time of work", "s", 12, {"toolkit_rank_work_cpu_seconds{RUN}": "rank {{rank}} {{host}}"}),
    ("timeseries", "Communication and data of ranks", "s", 12,
     {"toolkit_rank_communication_seconds{RUN}": "rank {{rank}} communication",
      "toolkit_rank_data_seconds{RUN}": "rank {{rank}} data"}),
    ("timeseries", "Memory of ranks", "bytes", 12,
     {"toolkit_rank_memory_bytes{RUN}": "rank {{rank}} host", "toolkit_rank_device_memory_bytes{RUN}": "rank {{rank}} GPU"}),
    ("row", "Nodes", "", 24, {}),
    ("timeseries", "Memory of nodes", "bytes", 12,
     {"toolkit_node_memory_used_bytes{RUN}": "{{host}} {{pool}} used",
      "toolkit_node_memory_free_bytes{RUN}": "{{host}} {{pool}} free"}),
    ("timeseries", "GPUs busy", "percentunit", 12, {"toolkit_gpu_busy_ratio{RUN}": "{{host}} {{gpu}}"}),
    ("timeseries", "Temperature of GPUs", "celsius", 12, {"toolkit_gpu_temperature_celsius{RUN}": "{{host}} {{gpu}}"}),
    ("timeseries", "Errors of GPUs and links in an hour", "short", 12,
     {"increase(toolkit_gpu_ecc_errors_total{RUN}[1h])": "{{host}} GPU {{gpu}}",
      "increase(toolkit_link_errors_total{RUN}[1h])": "{{host}} {{device}}",
      "increase(toolkit_link_downs_total{RUN}[1h])": "{{host}} {{device}} down"}),
    ("row", "Saves", "", 24, {}),
    ("stat", "Saves", "short", 6, {"toolkit_saves_total{RUN}": ""}),
    ("stat", "Failed saves", "short", 6, {"toolkit_failed_saves_total{RUN}": ""}),
    ("stat", "Time of a save", "s", 6,
     {"toolkit_save_seconds_total{RUN} / on (run_id, job_name) toolkit_saves_total{RUN}": ""}),
    ("stat", "Age of the last save", "s", 6, {"time() - toolkit_last_save_timestamp_seconds{RUN}": ""}),
)  # fmt: skip


def dashboard() -> dict[str, Any]:
    """Return the dashboard as JSON for Grafana: panels from left to right, in rows as wide as a screen."""
    panels: list[dict[str, Any]] = []
    x = y = height = 0
    for number, (kind, title, unit, width, queries) in enumerate(_PANELS, start=1):
        if x + width > _WIDTH:
            x, y = 0, y + height
        height = _HEIGHTS.get(kind, 8)
        place = {"h": height, "w": width, "x": x, "y": y}
        panels.append({"id": number, "type": kind, "title": title, "gridPos": place} | _content(kind, unit, queries))
        x += width
    variables = [
        {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "current": {}},
        _variable("job_name", ""),
        _variable("run_id", '{job_name=~"$job_name"}'),
    ]
    return {
        "title": "toolkit runs", "uid": "toolkit-runs", "schemaVersion": 38, "version": 1, "editable": True,
        "tags": ["toolkit"], "timezone": "browser", "refresh": "10s", "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables}, "annotations": {"list": []}, "panels": panels,
    }  # fmt: skip


def _content(kind: str, unit: str, queries: dict[str, str]) -> dict[str, Any]:
    if kind == "row":
        return {"collapsed": False, "panels": []}
    targets = []
    for name, (query, legend) in zip("ABC", queries.items(), strict=False):
        expression, shown = query.replace("RUN", _RUN), legend or "{{run_id}}"
        target = {"refId": name, "datasource": _SOURCE, "expr": expression, "legendFormat": shown}
        targets.append(target | ({"instant": True, "format": "table"} if kind == "table" else {}))
    fields = {"defaults": {"unit": unit}, "overrides": []}
    return {"datasource": _SOURCE, "fieldConfig": fields, "options": {}, "targets": targets}


def _variable(name: str, chosen: str) -> dict[str, Any]:
    """Return a list of the values of a label, from which the user chooses some or all."""
    query = {"query": f"label_values(toolkit_step{chosen}, {name})", "refId": name}
    return {
        "name": name, "label": name, "type": "query", "datasource": _SOURCE, "query": query, "refresh": 2, "sort": 2,
        "multi": True, "includeAll": True, "allValue": ".+", "current": {"text": "All", "value": "$__all"},
    }  # fmt: skip
