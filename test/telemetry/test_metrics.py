"""The Prometheus endpoint: what it says, and that it is there only where it was asked for."""

from __future__ import annotations

import re
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from vla_ros.control.safety import State
from vla_ros.errors import ConfigError
from vla_ros.telemetry.metrics import MetricsServer, exposition
from vla_ros.telemetry.stats import Stats

SAMPLE = re.compile(r'[a-z_:][a-z0-9_:]*(\{[a-z_]+="[^"\n]*"(,[a-z_]+="[^"\n]*")*\})? -?[0-9.e+-]+')


def text() -> str:
    stats = Stats()
    stats.received()
    stats.dropped("replaced", 3)
    stats.record({"inference": 12.5, "policy/vision": 4.0})
    return exposition(State.HOLDING, {"camera_stale": 2}, stats.frames(), stats.latency_ms(), {"threads": 5})


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    server = MetricsServer("127.0.0.1", 0, text)
    yield server
    server.close()


def get(server: MetricsServer, path: str) -> tuple[int, str, str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=5) as answer:
        return answer.status, answer.headers["Content-Type"], answer.read().decode()


def test_every_line_is_of_the_exposition_format() -> None:
    for line in text().splitlines():
        assert line.startswith(("# HELP ", "# TYPE ")) or SAMPLE.fullmatch(line), line
    names = [line.split()[2] for line in text().splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))


def test_the_figures_are_those_of_the_node() -> None:
    lines = text().splitlines()
    for line in (
        'vla_ros_state{state="holding"} 1',
        'vla_ros_state{state="armed"} 0',
        'vla_ros_reasons_total{reason="camera_stale"} 2',
        'vla_ros_frames_dropped_total{reason="replaced"} 3',
        "vla_ros_frames_received_total 1",
        'vla_ros_stage_seconds{stage="inference",quantile="0.99"} 0.012500',
        "vla_ros_threads 5",
    ):
        assert line in lines


def test_it_answers_metrics_and_nothing_else(server: MetricsServer) -> None:
    status, kind, body = get(server, "/metrics")
    assert (status, body) == (200, text())
    assert kind == "text/plain; version=0.0.4; charset=utf-8"
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(server, "/../etc/passwd")


def test_a_client_that_says_nothing_does_not_keep_others_out(server: MetricsServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5):
        assert get(server, "/metrics")[0] == 200


def test_a_port_that_is_taken_is_said_in_words(server: MetricsServer) -> None:
    with pytest.raises(ConfigError, match=r"metrics_port.*choose another port"):
        MetricsServer("127.0.0.1", server.port, text)
