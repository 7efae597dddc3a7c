"""Serve a policy to robots on other machines over openpi's websocket protocol.

Clients are nodes of this package with `policy.name: remote`, and openpi's and RoboArena's clients. Each connection
is one robot; simultaneous requests are answered as one batch. GET /healthz and /metrics report the server's state.

  vla-ros serve --checkpoint DIR --port 8000
  vla-ros serve --config demo                        the small checkpoint of the simulation
  vla-ros serve --checkpoint DIR --host 0.0.0.0 --api-key-file KEY --tls-certificate CERT --tls-key KEY
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
import socket
import ssl
import sys
import threading
import time
from pathlib import Path
from typing import Any

import yaml

from vla_ros.config import load
from vla_ros.config.show import add_config_arguments, number
from vla_ros.errors import ConfigError, MissingDependencyError, PrintableFormatter, install, printable
from vla_ros.files import read_bytes
from vla_ros.policies.base import Progress, checkpoint_options, create
from vla_ros.policies.remote import read_key

KEY_LENGTH = 8
"""Minimum number of characters of an API key."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--checkpoint", metavar="DIR", help="checkpoint of the policy (policy.checkpoint)")
    add("--policy", metavar="NAME", help="policy by its entry-point name (policy.name)")
    add("--host", default="127.0.0.1", metavar="H", help="address to listen on (default: this machine only)")
    add("--api-key-file", type=Path, metavar="FILE", help="file with the key that robots must send")
    add("--no-api-key", action="store_true", help="admit every client that can reach the port")
    add("--tls-certificate", type=Path, metavar="FILE", help="certificate chain (PEM); robots then use wss://")
    add("--tls-key", type=Path, metavar="FILE", help="the certificate's private key (PEM)")
    for name, kind, low, high, default, metavar, text in (
        ("--port", int, 0, 65535, 8000, "P", "TCP port; 0 takes a free one"),
        ("--max-batch", int, 1, 1024, 16, "N", "most requests in one batch"),
        ("--max-robots", int, 1, 10000, 256, "N", "most connections"),
        ("--max-message", float, 0.01, 1024, 16.0, "MIB", "maximum size of a request"),
        ("--max-image", float, 0.01, 16.8, 4.2, "MP", "maximum size of a JPEG in million pixels"),
        ("--deadline", float, 0.001, 3600, 10.0, "S", "maximum wait of a request that states none"),
        ("--drain", float, 0, 3600, 10.0, "S", "maximum time for a clean shutdown"),
    ):
        text = f"{text} (default {default:g})"
        add(name, type=number(kind, low, high), default=default, metavar=metavar, help=text)
    text = "the policy's image or state KEY is called NAME in requests; may be given several times"
    add("--image", action="append", default=[], metavar="KEY=NAME", help=text)
    add("--with-parent", action="store_true", help="exit when standard input closes, for parent processes")
    add("--metadata", type=Path, metavar="FILE.yaml", help="metadata for clients instead of the policy's features")
    add_config_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Load the policy and serve it until SIGTERM or Ctrl-C."""
    try:
        from vla_ros.serve import server
        from vla_ros.serve.service import Limits, Service
    except ImportError as error:
        raise MissingDependencyError(
            f"a required library cannot be imported ({error}); install it with: {install('serve')}"
        ) from error
    if arguments.with_parent:
        threading.Thread(target=_end_with_parent, args=(arguments.drain,), daemon=True).start()
    shown = logging.StreamHandler()
    shown.setFormatter(PrintableFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[shown])
    logging.getLogger("vla_ros").setLevel(logging.INFO)
    options = checkpoint_options(arguments.policy, arguments.checkpoint, arguments.config)
    config = load(arguments.config, [*options, *arguments.param])
    address = server.Address(arguments.host, arguments.port, api_key(arguments), tls(arguments))
    _check_free(address)
    limits = Limits(
        arguments.max_batch,
        arguments.max_robots,
        int(arguments.max_message * 2**20),
        arguments.deadline,
        int(arguments.max_image * 1e6),
    )
    service = Service(create(config), limits, config, aliases(arguments.image), read_metadata(arguments.metadata))

    def announce(port: int) -> None:
        host = f"[{address.host}]" if ":" in address.host else address.host
        print(f"serving {config.policy.name} on {'wss' if address.tls else 'ws'}://{host}:{port}", flush=True)

    try:
        service.load(_progress())
        asyncio.run(server.run(service, address, arguments.drain, announce))
    finally:
        ended = service.close(arguments.drain)
    if service.worker.error is not None:
        print(printable(f"vla-ros serve: {service.worker.error}"), file=sys.stderr)
        return 1
    return 0 if ended else 1


def _check_free(address: Any) -> None:
    """Raise ConfigError if the address is not available, before the policy is loaded."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        socket.create_server((address.host, address.port), family=family).close()
    except OSError as error:
        why = str(error.strerror).partition(" (while")[0]
        raise ConfigError(
            f"cannot listen on {address.host}:{address.port}: {why}; choose another --port or --host, or end the "
            "program that uses it"
        ) from None


def _end_with_parent(drain: float) -> None:
    """End this process when its standard input closes."""
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(drain + 5.0)  # a clean shutdown takes less
    os._exit(1)


def _progress() -> Progress:
    """Return a function that logs the progress of loading in steps of 10 %."""
    shown = -1

    def progress(fraction: float, message: str) -> None:
        nonlocal shown
        if int(10 * fraction) > shown:
            shown = int(10 * fraction)
            logging.getLogger(__name__).info("%3.0f %% %s", 100 * fraction, message)

    return progress


def api_key(arguments: argparse.Namespace) -> str:
    """Return the key that robots must send; "" admits every client.

    Raises ConfigError if there is no key, but the host is not loopback and ``--no-api-key`` is not set.
    """
    if arguments.api_key_file is not None:
        return read_key(arguments.api_key_file, "--api-key-file", KEY_LENGTH)
    try:
        loopback = ipaddress.ip_address(arguments.host).is_loopback
    except ValueError:
        loopback = arguments.host == "localhost"
    if not (arguments.no_api_key or loopback):
        raise ConfigError(
            f"--host {arguments.host}: other machines can reach this address; give --api-key-file, or --no-api-key "
            "to admit every client"
        )
    return ""


def tls(arguments: argparse.Namespace) -> ssl.SSLContext | None:
    """Load the TLS certificate and key, if set; raises ConfigError if they do not match."""
    certificate, key = arguments.tls_certificate, arguments.tls_key
    if (certificate is None) != (key is None):
        raise ConfigError("found only one of --tls-certificate and --tls-key, expected both")
    if certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--tls-certificate: {certificate}: {error}") from error
    return context


def aliases(given: list[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in given]
    if not all(key and name for key, _, name in pairs):
        raise ConfigError(f"--image: found {' '.join(given)}, expected KEY=NAME")
    names = {key: name for key, _, name in pairs}
    if len(names) < len(pairs):
        raise ConfigError(f"--image: found {' '.join(given)}, expected each KEY once")
    return names


def read_metadata(path: Path | None) -> dict[str, object] | None:
    """Read what the server shall tell its clients (``--metadata``), a map with string keys; None without a file."""
    if path is None:
        return None
    try:
        metadata = yaml.safe_load(read_bytes(path))
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"--metadata: {path}: {error}") from error
    if not isinstance(metadata, dict) or not all(isinstance(key, str) for key in metadata):
        raise ConfigError(f"--metadata: {path}: found {type(metadata).__name__}, expected a map with string keys")
    return metadata
