"""The exporter of a run: what a scrape shows, where it can be read, and that it harms no run."""

from __future__ import annotations

import http.client
import json
import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import psutil
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from launch.runtime.local_ranks import free_port
from megalite.checkpoint.saver import Saved
from megalite.config import Config, resolve_layout
from megalite.config.sections import PrometheusConfig
from megalite.monitor.events import EVENTS, EventLog
from megalite.monitor.goodput import Goodput
from megalite.monitor.observer import Nonfatal
from megalite.monitor.prometheus import endpoint as endpoint_module
from megalite.monitor.prometheus import metrics_server
from megalite.monitor.prometheus.endpoint import Endpoint, Rendering, TextfileWriter, label_of, write_targets
from megalite.monitor.prometheus.exporter import PrometheusExporter
from megalite.monitor.prometheus.families import OF_THE_RUN
from megalite.monitor.prometheus.host import HostMetrics
from megalite.monitor.steps.breakdown import COLUMN, ROW, StepBreakdown
from tests.helpers.prometheus_server import promtool, why_no_prometheus
from tests.unit.megalite.monitor.prometheus.test_totals import record

TOKEN = "hf_" + "kF7wQz2LmX9pRt4vBn6c"


def breakdown(step: int, ranks: int = 4) -> StepBreakdown:
    """Two stages; rank 1 needs twice as long as the other rank of its stage."""
    rows = np.zeros((ranks, len(ROW)))
    rows[:, COLUMN["steps"]], rows[:, COLUMN["forward"]] = 1, 0.1
    rows[1, COLUMN["forward"]] = 0.2
    rows[:, COLUMN["data all_reduce calls"]] = 3
    rows[:, COLUMN["memory_peak_mib"]] = np.arange(ranks) + 100
    stages = [rank * 2 // ranks for rank in range(ranks)]
    return StepBreakdown.of(step, rows, stages, [0.0] * ranks, [f"node{rank % 2}" for rank in range(ranks)])


class Watched:
    """An exporter with what it needs of a run, while it is open."""

    def __init__(self, values: dict[str, Any], prometheus: dict[str, Any]) -> None:
        values = values | {"monitor": {"prometheus": {"enabled": True, "port": min(free_port(), 60_000)} | prometheus}}
        self.config = Config.model_validate(values)
        self.config.run_dir.mkdir(exist_ok=True)
        self.said: list[str] = []
        self.nonfatal = Nonfatal(self.said.append)
        self.host = HostMetrics(self.config, self.nonfatal, self.said.append)
        goodput = Goodput(self.config.run_dir, 0, EventLog(self.config.run_dir / EVENTS).write)
        layout = resolve_layout(self.config, 1, "cpu")
        self.exporter = PrometheusExporter(self.config, layout, 0, self.host, goodput, self.nonfatal)

    def step(self, number: int, **other: Any) -> None:
        self.exporter.on_breakdown(breakdown(number))
        self.exporter.on_step(record(number, goodput=0.5, **other))

    def scrape(self, accept: str = "text/plain") -> tuple[str, str]:
        """The text, and its type."""
        assert self.host.endpoint is not None
        request = urllib.request.Request(f"http://{self.host.endpoint.target}/metrics", headers={"Accept": accept})
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.read().decode(), answer.headers["Content-Type"]

    def values(self) -> dict[tuple[str, ...], float]:
        families = parse(self.scrape()[0])
        return {(one.name, *map(str, one.labels.values())): one.value for family in families for one in family.samples}

    def close(self) -> None:
        self.host.close()
        self.exporter.close()


@pytest.fixture
def watched(tiny: dict[str, Any]) -> Iterator[Watched]:
    opened = Watched(tiny, {})
    yield opened
    opened.close()


def test_a_scrape_is_clean_in_both_formats(watched: Watched) -> None:
    """No `_created` series, which would double the number of counters; and names as Prometheus wants them."""
    watched.step(1, evaluation_loss=3.5, model_flops_utilization=0.4, loss_scale=2.0, source_losses={"web": 2.5})
    watched.exporter.on_checkpoint(Saved(1, Path("x"), None, 0.1, 0.2, 3), "")
    watched.exporter.on_checkpoint(Saved(2, Path("x"), None, 0.1, 0.2, 3), "")
    text, kind = watched.scrape()
    assert kind.startswith("text/plain") and "_created" not in text
    told = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert told == {family.name for family in OF_THE_RUN}
    open_text, open_kind = watched.scrape("application/openmetrics-text; version=1.0.0")
    assert open_kind.startswith("application/openmetrics-text") and open_text.endswith("# EOF\n")
    assert "_created" not in open_text and list(parse_openmetrics(open_text))
    if why_no_prometheus() is None:
        done = promtool("check", "metrics", text=text)
        assert done.returncode == 0 and not done.stderr, done.stderr


def test_ranks_have_memory_and_speed(watched: Watched) -> None:
    for step in (1, 2, 3):
        watched.step(step)
    values = watched.values()
    assert values["megalite_memory_peak_bytes", "node1", "3", "1"] == 103 * 2**20
    speeds = {name[2]: value for name, value in values.items() if name[0] == "megalite_rank_relative_speed_ratio"}
    assert speeds == {"0": 2.0, "1": 0.5, "2": 1.0, "3": 1.0}, "that of the event slow_rank, so the alert sees it too"
    assert values["megalite_communication_calls_total", "data", "all_reduce", "0"] == 9


def test_sources_keep_their_last_losses(watched: Watched) -> None:
    for step, losses in enumerate(({"web": 2.5, "code": 3.5}, {}, {"web": 2.0}), start=1):
        watched.step(step, source_losses=losses)
    values = watched.values()
    assert values["megalite_source_loss_nats", "web"] == 2.0 and values["megalite_source_loss_nats", "code"] == 3.5


def test_more_than_a_few_sources_are_no_series(tiny: dict[str, Any]) -> None:
    names = [f"s{place}" for place in range(33)]
    watched = Watched(tiny | {"data": {"sources": {name: {"path": "unused", "weight": 1} for name in names}}}, {})
    watched.step(1, source_losses=dict.fromkeys(names, 2.5))
    assert not [name for name in watched.values() if name[0] == "megalite_source_loss_nats"]
    watched.close()


def test_ranks_can_be_left_out(tiny: dict[str, Any]) -> None:
    watched = Watched(tiny, {"per_rank": False})
    watched.step(1)
    assert not [name for name in watched.values() if "node1" in name]
    watched.close()


def test_training_does_not_wait_for_a_scrape(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a step does is count: nothing of prometheus_client is called, and no file is written."""
    import prometheus_client.metrics_core as core

    for name in ("CounterMetricFamily", "GaugeMetricFamily", "HistogramMetricFamily"):
        monkeypatch.setattr(core, name, lambda *_, **__: pytest.fail("rendered on the training thread"))
    before = sorted(watched.config.run_dir.iterdir())
    watched.step(1)
    assert sorted(watched.config.run_dir.iterdir()) == before


def test_failures_are_counted_and_harm_nobody(watched: Watched) -> None:
    """A full disk in the place of what was shown, and an observer that fails."""
    (watched.config.run_dir / "prometheus_counters.json").mkdir()
    with watched.nonfatal("loss.png"):
        raise OSError("no room")
    watched.step(1)
    watched.scrape()
    values = watched.values()
    assert values["megalite_monitor_failures_total", "loss.png"] == 1 and values["megalite_step",] == 1
    assert values["megalite_monitor_failures_total", "prometheus_counters.json"] == 2, "each scrape tries again"


@pytest.mark.parametrize(("host", "address"), [(None, "127.0.0.1"), ("0.0.0.0", "0.0.0.0")])
def test_it_listens_where_it_is_told(host: str | None, address: str) -> None:
    """By default no other host reaches it; the target of all addresses is this host's name."""
    options = PrometheusConfig.model_validate({"port": min(free_port(), 60_000)} | ({"host": host} if host else {}))
    endpoint = Endpoint(options, CollectorRegistry(), pytest.fail)
    own = psutil.Process().net_connections("tcp")
    assert {one.laddr.ip for one in own if one.status == "LISTEN" and one.laddr.port == endpoint.port} == {address}
    assert endpoint.target == f"{socket.gethostname() if host else '127.0.0.1'}:{endpoint.port}"
    endpoint.close()


def test_no_client_takes_the_threads_and_files_of_the_run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Any user of the host can connect; a run that has no file descriptor left cannot save."""
    monkeypatch.setattr(metrics_server.MetricsServer, "most_connections", 3)
    monkeypatch.setattr(metrics_server._ScrapeHandler, "timeout", 0.3)
    endpoint = Endpoint(PrometheusConfig(enabled=True, port=free_port()), CollectorRegistry(), lambda _: None)
    idle = [socket.create_connection(("127.0.0.1", endpoint.port), timeout=20) for _ in range(5)]
    assert [client.recv(1) for client in idle] == [b""] * 5, "closed at once, or after their time"
    for client in idle:
        client.close()
    with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=10) as answer:
        assert answer.status == 200
    endpoint.close()
    assert capfd.readouterr() == ("", ""), "the console is the run's"


def test_clients_that_drip_bytes_keep_no_scrape_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte begins the patience anew: 16 such clients kept Prometheus out for ever."""
    monkeypatch.setattr(metrics_server.MetricsServer, "most_connections", 2)
    monkeypatch.setattr(metrics_server.MetricsServer, "longest_s", 0.4)
    endpoint = Endpoint(PrometheusConfig(enabled=True, port=free_port()), CollectorRegistry(), lambda _: None)
    clients = [socket.create_connection(("127.0.0.1", endpoint.port), timeout=20) for _ in range(2)]
    deadline, status = time.monotonic() + 20, 0
    while status != 200 and time.monotonic() < deadline:
        for client in clients:
            with suppress(OSError):
                client.sendall(b"G")
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/", timeout=10) as answer:
            status = answer.status
    assert status == 200
    for client in clients:
        client.close()
    endpoint.close()


@pytest.mark.parametrize("bound", ["127.0.0.1", "0.0.0.0"])
def test_a_name_that_a_stranger_lets_resolve_to_this_host_gets_no_metrics(bound: str) -> None:
    """A page that a browser on this host shows could read them under its own site's name."""
    endpoint = Endpoint(
        PrometheusConfig(enabled=True, host=bound, port=free_port()), CollectorRegistry(), lambda _: None
    )
    wide = bound == "0.0.0.0"
    for host, status in {
        "evil.example": 403,
        "evil.example:9000": 403,
        "": 403,
        f"localhost:{endpoint.port}": 200,
        "10.1.2.3": 200 if wide else 403,
        socket.gethostname().upper(): 200 if wide else 403,
    }.items():
        connection = http.client.HTTPConnection("127.0.0.1", endpoint.port, timeout=20)
        connection.request("GET", "/metrics", headers={"Host": host})
        assert connection.getresponse().status == status, (bound, host)
        connection.close()
    endpoint.close()


def test_the_next_free_port_is_taken_and_told() -> None:
    """Two runs on one host; after ten ports it gives up."""
    first, said, opened = min(free_port(), 60_000), list[str](), list[Endpoint]()
    for _ in range(2):
        opened.append(Endpoint(PrometheusConfig(port=first), CollectorRegistry(), said.append))
    assert opened[1].port > first and len(said) == 1
    assert said[0].startswith(f"port {first} is taken on ") and said[0].endswith(
        f": its metrics are on {opened[1].port}"
    )
    with pytest.raises(OSError, match=f"ports {first} to {first + 9} of .* are all taken"):
        for _ in range(9):
            opened.append(Endpoint(PrometheusConfig(port=first), CollectorRegistry(), said.append))
    for endpoint in opened:
        endpoint.close()


def test_the_textfile_names_the_run_and_goes_with_it(tiny: dict[str, Any], tmp_path: Path) -> None:
    """node_exporter's series have no label of a target; and it refuses a file that is half written."""
    folder = tmp_path / "text"
    folder.mkdir()
    for ends in (False, True):
        watched = Watched(tiny | {"run_dir": str(tmp_path / "my run")}, {"enabled": False, "textfile": str(folder)})
        assert watched.host.endpoint is None
        watched.step(1)
        if ends:
            watched.exporter.on_end("ended")
        watched.close()
        files = sorted(path.name for path in folder.iterdir())
        assert len(files) == (0 if ends else 1), "that of a killed run stays, so that the alert about it fires"
        if not ends:
            assert files[0].startswith("megalite_") and files[0].endswith("_my_run.prom")
            samples = [one for family in parse((folder / files[0]).read_text()) for one in family.samples]
            assert {one.labels["run"] for one in samples} == {str(tmp_path / "my run")}
            assert next(one.value for one in samples if one.name == "megalite_step") == 1
            assert (folder / files[0]).stat().st_mode & 0o444 == 0o444, "node_exporter is another user"


def test_the_last_state_of_a_run_is_written_and_a_disk_that_hangs_does_not_hold_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end comes while a write goes on: another one has to follow it."""
    writes, begun, goes_on = [], Event(), Event()

    def slow(self: TextfileWriter) -> None:
        writes.append(len(writes))
        begun.set()
        goes_on.wait(20)

    monkeypatch.setattr(TextfileWriter, "_write", slow)
    monkeypatch.setattr(endpoint_module, "LAST_WRITE_S", 0.2)
    writer = TextfileWriter(tmp_path, tmp_path / "run", lambda: (), Nonfatal(print))
    writer.ask()
    assert begun.wait(20)
    writer.close(remove=False)
    assert writer._thread.is_alive(), "the end of the run did not wait for it"
    goes_on.set()
    writer._thread.join(20)
    assert writes == [0, 1]


def test_targets_name_all_hosts_and_no_secret(tmp_path: Path) -> None:
    """Ranks of one host have one target; a secret in the folder's name would be a label of every series."""
    run_dir = tmp_path / TOKEN
    run_dir.mkdir()
    write_targets(run_dir, ["node1:9466", "node0:9466", "node1:9466"])
    (entry,) = json.loads((run_dir / "prometheus_targets.json").read_text())
    assert entry == {"targets": ["node0:9466", "node1:9466"], "labels": {"run": str(tmp_path / "***")}}
    assert TOKEN not in label_of(run_dir)


def test_what_cannot_be_rendered_leaves_the_rest(watched: Watched) -> None:
    def broken() -> Iterator[Any]:
        raise ValueError("a hole in it")
        yield

    watched.host.registry.register(Rendering(broken, watched.nonfatal))
    watched.step(4)
    assert watched.values()["megalite_step",] == 4
    assert watched.said == ["Prometheus failed once, training goes on: ValueError: a hole in it"]
