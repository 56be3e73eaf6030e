"""A real Prometheus reads a real run of four ranks, which is killed and goes on."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from launch.runtime.local_ranks import free_port
from tests.helpers.commands import ROOT, metrics
from tests.helpers.prometheus_server import Server, prometheus_server, why_no_prometheus
from tests.helpers.warm_runs import Session, pid_of, session

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_no_prometheus() is not None, reason=why_no_prometheus() or "")]

SCRAPED_S = 60.0
SAVED = 6  # steps between saves
# a CPU has no peak in any data sheet, and metrics of GPUs need one
NOT_HERE = re.compile(r"megalite_(gpu_|model_flops)")


@pytest.fixture
def config(tiny: dict[str, Any]) -> dict[str, Any]:
    """tp2 pp2 in fp16, whose loss scale is told; it trains until it is asked to end."""
    tiny["parallel"] = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    tiny["training"] |= {"steps": 100_000, "evaluation": {"interval": 5, "samples": 4}}
    prometheus = {"enabled": True, "port": min(free_port(), 60_000)}
    monitor = {"plot": False, "prometheus": prometheus}
    data = dict(tiny["data"])
    data["sources"] = {"text": {"path": data.pop("path"), "weight": 1}}  # whose loss is told by itself
    return tiny | {"data": data, "precision": {"dtype": "fp16"}, "checkpoint": {"interval": SAVED}, "monitor": monitor}


def expressions() -> list[str]:
    """All queries of the dashboard, with its variables filled in."""
    dashboard = json.loads((ROOT / "docs" / "grafana" / "megalite.json").read_text())
    targets = [target for panel in dashboard["panels"] for target in panel.get("targets", [])]
    return [target["expr"].replace("$__rate_interval", "10s").replace("$run", ".*") for target in targets]


def wait_for(running: Session, server: Server, expression: str) -> None:
    """Until Prometheus has an answer."""
    running.wait_until(lambda: bool(server.query(expression) or time.sleep(0.2)), SCRAPED_S)  # type: ignore[func-returns-value]


def samples(server: Server, name: str) -> dict[str, list[tuple[float, float]]]:
    """All that was scraped, by the labels of the series: time and value."""
    found = {}
    for series in server.query(f"{name}[1h]"):
        labels = {key: value for key, value in series["metric"].items() if key not in ("instance", "job", "run")}
        found[str(sorted(labels.items()))] = [(when, float(value)) for when, value in series["values"]]
    return found


def test_a_killed_run_in_prometheus(config: dict[str, Any], tmp_path: Path) -> None:
    """Every query of the dashboard has an answer, values are those of metrics.jsonl, and no counter falls when the run
    is killed between two saves and started again: `rate()` would take that for a reset and count all steps anew."""
    run_dir, port = Path(config["run_dir"]), config["monitor"]["prometheus"]["port"]
    targets = run_dir / "prometheus_targets.json"
    with prometheus_server(tmp_path, targets) as server:
        with session(tmp_path / "first", config, world_size=4) as running:
            wait_for(running, server, f"megalite_step > {2 * SAVED}")
            listening = psutil.Process(pid_of(tmp_path / "first", 0)).net_connections("tcp")
            addresses = {one.laddr.ip for one in listening if one.status == "LISTEN" and one.laddr.port == port}
            assert addresses == {"127.0.0.1"}, "the port is open to other hosts"
            running.wait_until(lambda: metrics(run_dir)[-1]["step"] % SAVED in (3, 4))
            running.send(signal.SIGKILL)
            running.end()
        first = metrics(run_dir)
        assert json.loads(targets.read_text())[0]["targets"] == [f"127.0.0.1:{port}"], "a crash takes nothing back"
        with session(tmp_path / "second", config, world_size=4) as running:
            wait_for(running, server, f"megalite_step > {first[-1]['step'] + SAVED}")
            for one in expressions():  # a rate takes two scrapes
                if not NOT_HERE.search(one):
                    wait_for(running, server, one)
            wait_for(running, server, "count_over_time(megalite_step[1h]) > 8")
            running.send(signal.SIGTERM)
            running.wait()
        assert not targets.exists(), "an ended run is not a target that fails"

        by_step = {record["step"]: record for record in [*first, *metrics(run_dir)]}  # the same losses, done again
        steps = dict(*samples(server, "megalite_step").values())
        for name, key in (("loss_nats", "loss"), ("gradient_norm", "grad_norm"), ("learning_rate", "learning_rate")):
            values = dict(*samples(server, f"megalite_{name}").values())
            assert len(values) > 5 and values.items() <= {
                (when, by_step[int(step)][key]) for when, step in steps.items()
            }, name
        tokens = dict(*samples(server, "megalite_tokens_total").values())
        lost = dict(*samples(server, "megalite_steps_total{outcome='lost'}").values())
        of_a_step = config["training"]["global_batch_size"] * config["training"]["sequence_length"]
        assert all(tokens[when] == of_a_step * (step + lost[when]) for when, step in steps.items())
        assert 0 < lost[max(steps)] < SAVED
        counters = [name for name in names(server) if name.endswith(("_total", "_bucket", "_sum", "_count"))]
        assert len(counters) > 10
        for name in counters:
            for labels, series in samples(server, name).items():
                values_in_time = [value for _, value in series]
                assert values_in_time == sorted(values_in_time), f"{name} {labels} falls"


def names(server: Server) -> set[str]:
    return {series["metric"]["__name__"] for series in server.query("{__name__=~'megalite_.+'}[1h]")}
