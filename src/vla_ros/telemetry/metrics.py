"""The Prometheus endpoint ``/metrics``: off by default, and on loopback unless configured otherwise.

prometheus_client collects and formats the metrics. Its own servers look up the host name at start and let every
hanging client occupy a thread; here one thread, with a timeout, serves all clients.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from socketserver import TCPServer
from typing import Any

from vla_ros.control.safety import State
from vla_ros.errors import ConfigError, MissingDependencyError, install

try:
    from prometheus_client import CollectorRegistry, MetricsHandler
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
except ImportError as error:
    raise MissingDependencyError(
        f"node.metrics_port: prometheus_client fails to import ({error}); run `{install('metrics')}`, or "
        "set 0 for no endpoint"
    ) from error

_CLIENT_TIMEOUT = 2.0  # s


def families(
    state: State,
    counters: Mapping[str, int],
    frames: Mapping[str, Any],
    latency_ms: Mapping[str, Mapping[str, float]],
    execution: Mapping[str, float],
    resources: Mapping[str, float],
) -> list[Metric]:
    states = GaugeMetricFamily("vla_ros_state", "1 for the current state of the arm", labels=["state"])
    for each in State:
        states.add_metric([each.value], each is state)
    received = CounterMetricFamily("vla_ros_frames_received", "Frames received", frames["received"])
    used = CounterMetricFamily("vla_ros_frames_used", "Frames that led to a step result", frames["used"])
    commands = CounterMetricFamily("vla_ros_commands", "Motion commands sent", frames["commands"])
    stages = Metric("vla_ros_stage_seconds", "Duration of each stage over the last frames", "summary")
    for stage, times in latency_ms.items():
        for quantile, key in (("0.5", "p50"), ("0.99", "p99")):
            stages.add_sample(stages.name, {"stage": stage, "quantile": quantile}, times[key] / 1e3)
    return [
        states,
        _by_reason("vla_ros_reasons", "Occurrences of each reason to hold, stop or drop", counters),
        received,
        used,
        _by_reason("vla_ros_frames_dropped", "Frames dropped", frames["dropped"]),
        commands,
        stages,
        *(
            GaugeMetricFamily(f"vla_ros_execution_{name}", f"Execution: {name.replace('_', ' ')}", value)
            for name, value in execution.items()
        ),
        *(GaugeMetricFamily(f"vla_ros_{name}", name.replace("_", " "), value) for name, value in resources.items()),
    ]


def _by_reason(name: str, text: str, counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=["reason"])
    for reason, count in sorted(counts.items()):
        family.add_metric([reason], count)
    return family


class _Server(TCPServer):
    allow_reuse_address = True


class MetricsServer:
    """Serves ``GET /metrics`` until :meth:`close`, on its own thread, which calls ``collect``.

    Port 0 selects a free port. Raises ConfigError if the address or port is not available.
    """

    def __init__(self, address: str, port: int, collect: Callable[[], Iterable[Metric]]) -> None:
        class Collector:
            def collect(self) -> Iterable[Metric]:
                return collect()

        class Handler(MetricsHandler):
            timeout = _CLIENT_TIMEOUT
            registry = CollectorRegistry(auto_describe=False)

            def do_GET(self) -> None:  # noqa: N802 - the name that http.server calls
                if self.path.partition("?")[0] == "/metrics":
                    super().do_GET()
                else:
                    self.send_error(404, "only /metrics exists")

        Handler.registry.register(Collector())
        try:
            self._server = _Server((address, port), Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"node.metrics_port: cannot listen on {address}:{port} ({error}); choose another port, or 0 for no "
                "endpoint"
            ) from None
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.2,), name="vla_metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)
