"""A Prometheus endpoint: ``/metrics`` in the text exposition format 0.0.4, off by default, loopback by default.

The standard library's server on one thread is enough for a scrape every few seconds, and one slow client cannot
take more than that thread. It only reads: there is nothing here that could change what the robot does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer
from typing import Any

from vla_ros.control.safety import State
from vla_ros.errors import ConfigError

_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_CLIENT_TIMEOUT = 2.0  # s


def exposition(
    state: State,
    counters: Mapping[str, int],
    frames: Mapping[str, Any],
    latency_ms: Mapping[str, Mapping[str, float]],
    resources: Mapping[str, int],
) -> str:
    """The node's figures as Prometheus reads them.

    Args:
        state: What the arm may do.
        counters: Reasons and how often each came.
        frames: As :meth:`vla_ros.telemetry.stats.Stats.frames` gives them.
        latency_ms: As :meth:`vla_ros.telemetry.stats.Stats.latency_ms` gives it.
        resources: Bytes and counts by name, as :func:`vla_ros.telemetry.resources.process_resources` gives them.
    """
    lines = _family("vla_ros_state", "gauge", "1 for the state that the arm is in")
    lines += [f'vla_ros_state{{state="{each.value}"}} {int(each is state)}' for each in State]
    lines += _family("vla_ros_reasons_total", "counter", "How often each reason to hold, stop or drop came")
    lines += [f'vla_ros_reasons_total{{reason="{name}"}} {count}' for name, count in sorted(counters.items())]
    for name, text in (("received", "Frames that came"), ("used", "Frames that were answered")):
        lines += [
            *_family(f"vla_ros_frames_{name}_total", "counter", text),
            f"vla_ros_frames_{name}_total {frames[name]}",
        ]
    lines += _family("vla_ros_frames_dropped_total", "counter", "Frames that were not used")
    dropped = sorted(frames["dropped"].items())
    lines += [f'vla_ros_frames_dropped_total{{reason="{reason}"}} {count}' for reason, count in dropped]
    lines += [
        *_family("vla_ros_commands_total", "counter", "Motions that were sent"),
        f"vla_ros_commands_total {frames['commands']}",
    ]
    lines += _family("vla_ros_stage_seconds", "summary", "Time of each stage over the last frames")
    for stage, times in latency_ms.items():
        for quantile, key in (("0.5", "p50"), ("0.99", "p99")):
            lines.append(f'vla_ros_stage_seconds{{stage="{stage}",quantile="{quantile}"}} {times[key] / 1e3:.6f}')
    for name, value in resources.items():
        lines += [*_family(f"vla_ros_{name}", "gauge", name.replace("_", " ")), f"vla_ros_{name} {value}"]
    return "\n".join(lines) + "\n"


def _family(name: str, kind: str, text: str) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]


class _Server(TCPServer):
    """Not ``http.server.HTTPServer``: that one asks the name service for its own name."""

    allow_reuse_address = True


class MetricsServer:
    """Answers ``GET /metrics`` on a thread of its own until :meth:`close`.

    Args:
        address: Interface to listen on.
        port: TCP port; 0 takes a free one.
        render: Makes the text, on the server's thread.

    Attributes:
        port: The port that is listened on.

    Raises:
        ConfigError: The address or port cannot be listened on.
    """

    def __init__(self, address: str, port: int, render: Callable[[], str]) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = _CLIENT_TIMEOUT

            def do_GET(self) -> None:
                found = self.path.partition("?")[0] == "/metrics"
                text = render() if found else "there is /metrics and nothing else\n"
                body = text.encode()
                self.send_response(200 if found else 404)
                self.send_header("Content-Type", _CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """A scrape is no news."""

        try:
            self._server = _Server((address, port), Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"node.metrics_port: {address}:{port} cannot be listened on ({error}); choose another port, or 0 "
                "for no endpoint"
            ) from None
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.2,), name="vla_metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)
