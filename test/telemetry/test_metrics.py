import importlib
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

pytest.importorskip("prometheus_client", reason="the library prometheus_client is not installed (extra 'metrics')")

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from vla_ros.control.outcome import REPLACED, FrameOutcome
from vla_ros.control.safety import State
from vla_ros.errors import ConfigError, MissingDependencyError
from vla_ros.telemetry.metrics import MetricsServer, families
from vla_ros.telemetry.stats import Stats


def figures() -> list[Metric]:
    stats = Stats()
    stats.received()
    for _ in range(3):
        stats.on_outcome(FrameOutcome(1, "/camera", 2, REPLACED))
    stats.record({"inference": 12.5, "policy/vision": 4.0})
    counters = {"camera_stale": 2, 'odd "name"\n': 1}
    return families(
        State.HOLDING, counters, stats.frames(), stats.latency_ms(), {"stalled_share": 0.25}, {"threads": 5}
    )


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    server = MetricsServer("127.0.0.1", 0, figures)
    yield server
    server.close()


def get(server: MetricsServer, path: str) -> tuple[str, str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=5) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def test_a_scrape_returns_the_figures_of_the_node(server: MetricsServer) -> None:
    kind, body = get(server, "/metrics")
    assert kind.startswith("text/plain; version=")
    found = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(body)
        for sample in family.samples
    }
    for key, value in {
        ("vla_ros_state", "holding"): 1,
        ("vla_ros_state", "armed"): 0,
        ("vla_ros_reasons_total", "camera_stale"): 2,
        ("vla_ros_reasons_total", 'odd "name"\n'): 1,
        ("vla_ros_frames_dropped_total", "replaced"): 3,
        ("vla_ros_frames_received_total",): 1,
        ("vla_ros_frames_used_total",): 0,
        ("vla_ros_commands_total",): 0,
        ("vla_ros_stage_seconds", "0.99", "inference"): 0.0125,
        ("vla_ros_threads",): 5,
    }.items():
        assert found[key] == value


def test_only_metrics_is_answered(server: MetricsServer) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(server, "/../etc/passwd")


def test_a_client_that_hangs_does_not_keep_others_out(server: MetricsServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5):
        assert "vla_ros_state" in get(server, "/metrics")[1]


def test_a_port_in_use_is_refused_with_advice(server: MetricsServer) -> None:
    with pytest.raises(ConfigError, match=r"metrics_port.*choose another port"):
        MetricsServer("127.0.0.1", server.port, figures)


def test_the_extra_is_named_if_it_is_missing(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "vla_ros.telemetry.metrics")
    with pytest.raises(MissingDependencyError, match="pip install 'prometheus"):
        importlib.import_module("vla_ros.telemetry.metrics")
