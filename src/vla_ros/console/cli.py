"""Serve the operator's page for the browser: cameras, state and reasons, arm, stop, takeover, episodes.

Open the address that it prints; it has a secret that is another one at each start. From another machine, use a
tunnel (`ssh -L 8090:127.0.0.1:8090 ROBOT`), or TLS:

  vla-ros console
  vla-ros console --host 0.0.0.0 --name robot.local --tls-certificate CERT --tls-key KEY
"""

import argparse
import contextlib
import ipaddress
import logging
import secrets
import signal
import socket
import threading
from pathlib import Path
from typing import Any

from vla_ros.config.show import number
from vla_ros.errors import ConfigError, PrintableFormatter
from vla_ros.graph import open_graph
from vla_ros.graph.launcher import end_with_launcher

PORT = 8090
_LOCAL = ("localhost", "127.0.0.1", "::1")
# An access log would have the token.
_SERVER: dict[str, Any] = {"log_config": None, "access_log": False, "proxy_headers": False, "server_header": False}
_LIMITS: dict[str, Any] = {"ws_max_size": 4096, "ws_per_message_deflate": False, "limit_concurrency": 64}
_SERVER |= {"ws_ping_interval": 2.0, "ws_ping_timeout": 4.0, "timeout_graceful_shutdown": 1, "lifespan": "off"}
_TURN = 0.05  # s between looks at what was asked for, unless the graph is woken


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    port = f"TCP port; 0: a free one (default {PORT})"
    add("--port", type=number(int, 0, 65535), default=PORT, metavar="P", help=port)
    add("--host", default="127.0.0.1", metavar="H", help="address to listen on (default: this machine only)")
    add("--name", action="append", default=[], metavar="NAME", help="another host name in the browser's address")
    add("--tls-certificate", type=Path, metavar="FILE", help="certificate chain (PEM)")
    add("--tls-key", type=Path, metavar="FILE", help="the certificate's private key (PEM)")
    add("--node", default="", metavar="NAME", help="only this node (default: every node)")
    add("--backend", choices=("auto", "rclpy", "dds"), default="auto", help="see node.backend (default: auto)")


def run(arguments: argparse.Namespace) -> int:
    """Serve the page until SIGTERM or Ctrl-C."""
    import uvicorn

    from vla_ros.console.admission import Gate
    from vla_ros.console.panel import Panel
    from vla_ros.console.server import Console

    shown = logging.StreamHandler()
    shown.setFormatter(PrintableFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[shown])
    logging.getLogger("vla_ros.console").setLevel(logging.INFO)
    names, is_secure = _names(arguments), arguments.tls_certificate is not None
    scheme = "https" if is_secure else "http"
    gate = Gate(secrets.token_urlsafe(24), names, scheme)
    listening, ended = _listen(arguments.host, arguments.port), threading.Event()
    end_with_launcher()
    with contextlib.closing(listening), open_graph(arguments.backend, log_level="error") as graph:
        panel = Panel(graph, "/" + arguments.node.strip("/") if arguments.node else "")
        files = {"ssl_certfile": arguments.tls_certificate, "ssl_keyfile": arguments.tls_key}
        config = uvicorn.Config(Console(panel, gate), **_SERVER, **_LIMITS, **files)
        try:
            config.load()
        except OSError as error:  # of a certificate: ssl's errors are OSErrors
            raise ConfigError(f"--tls-certificate: {arguments.tls_certificate}: {error}") from error
        server = uvicorn.Server(config)

        def serve() -> None:
            try:
                server.run(sockets=[listening])
            finally:
                ended.set()
                graph.wake()

        thread = threading.Thread(target=serve, name="vla_console_server", daemon=True)
        host = f"[{names[0]}]" if ":" in names[0] else names[0]
        thread.start()
        print(f"console: {scheme}://{host}:{listening.getsockname()[1]}/?token={gate.token}", flush=True)

        def turn() -> bool:
            panel.turn()
            return ended.is_set() or asked.is_set()

        asked = threading.Event()
        for each in (signal.SIGINT, signal.SIGTERM):  # also twice: the terminal and `ros2 launch` both send one
            signal.signal(each, lambda *_: asked.set())
        try:
            graph.spin(turn, _TURN)
            failed = ended.is_set()
        finally:
            server.should_exit = True
            thread.join(3.0)
    return 1 if failed else 0


def _names(arguments: argparse.Namespace) -> list[str]:
    """Return the names under which pages may reach this server; the first one is printed.

    Raises ConfigError if other machines can reach the address without TLS.
    """
    if (arguments.tls_certificate is None) != (arguments.tls_key is None):
        raise ConfigError("found only one of --tls-certificate and --tls-key, expected both")
    try:
        address = ipaddress.ip_address(arguments.host)
        is_local, is_any = address.is_loopback, address.is_unspecified
    except ValueError:
        is_local, is_any = arguments.host == "localhost", False
    if not is_local and arguments.tls_certificate is None:
        raise ConfigError(
            f"--host {arguments.host}: other hosts can reach this address; give --tls-certificate and --tls-key, "
            f"or listen on 127.0.0.1 and use a tunnel: ssh -L {arguments.port}:127.0.0.1:{arguments.port} THIS_HOST"
        )
    own = [socket.gethostname()] if is_any else [arguments.host]
    return [name.lower() for name in (*arguments.name, *own, *_LOCAL)]


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=64)
    except OSError as error:
        why = str(error.strerror).partition(" (while")[0]
        raise ConfigError(
            f"cannot listen on {host}:{port}: {why}; choose another --port, or end the program that uses it"
        ) from None
