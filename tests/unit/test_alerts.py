"""The dashboard and the alerts: they name metrics that exist, they parse, and each alert fires."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from megalite.monitor.prometheus.families import OF_GPUS, OF_THE_RUN
from tests.helpers.prometheus_server import promtool, why_no_prometheus

ROOT = Path(__file__).parents[2]
RULES, RULES_TEST = (ROOT / "docs" / "prometheus" / name for name in ("alerts.yml", "alerts_test.yml"))
DASHBOARD = json.loads((ROOT / "docs" / "grafana" / "megalite.json").read_text())
RULE = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
FAMILIES = {family.name: family for family in (*OF_THE_RUN, *OF_GPUS)}
needs_prometheus = pytest.mark.skipif(why_no_prometheus() is not None, reason=why_no_prometheus() or "")


def test_every_query_names_metrics_that_exist() -> None:
    """A metric that was renamed leaves an empty panel, and an alert that never fires."""
    known = set(FAMILIES) | {f"megalite_step_seconds_{what}" for what in ("bucket", "sum", "count")}
    for query in [*QUERIES, *(rule["expr"] for rule in RULE)]:
        assert set(re.findall(r"\bmegalite_\w+", query)) <= known, query


def test_every_metric_is_on_the_dashboard() -> None:
    shown = set(re.findall(r"\bmegalite_\w+", " ".join(QUERIES)))
    assert set(FAMILIES) - {"megalite_step_seconds"} <= shown


def test_every_metric_is_in_the_table_of_the_page() -> None:
    page = (ROOT / "docs" / "observing.md").read_text()
    missing = [name for name in FAMILIES if f"`{name}" not in page]
    assert not missing, f"docs/observing.md does not name {missing}"


@needs_prometheus
def test_every_query_parses(tmp_path: Path) -> None:
    filled = [query.replace("$__rate_interval", "1m").replace("$run", ".*") for query in QUERIES]
    rules = [{"record": f"dashboard:query:{number}", "expr": query} for number, query in enumerate(filled)]
    path = tmp_path / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    for checked in (path, RULES):
        done = promtool("check", "rules", checked)
        assert done.returncode == 0, done.stdout + done.stderr


@needs_prometheus
def test_every_alert_fires_and_not_before() -> None:
    done = promtool("test", "rules", RULES_TEST)
    assert done.returncode == 0, done.stdout + done.stderr
    tests = yaml.safe_load(RULES_TEST.read_text())["tests"]
    cases = [(case["alertname"], "exp_alerts" in case) for test in tests for case in test["alert_rule_test"]]
    for rule in RULE:
        assert {(rule["alert"], True), (rule["alert"], False)} <= set(cases), rule["alert"]
