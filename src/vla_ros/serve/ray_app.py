"""The policy server as a Ray Serve application, replicated over GPUs and hosts.

  serve run vla_ros.serve.ray_app:application config=demo replicas=2

Ray starts and restarts replicas, routes each connection to a replica, and scales with the number of connections.
When a replica exits, its robots reconnect to another. docs/remote.md has an example.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vla_ros.config import load
from vla_ros.config.files import config_file
from vla_ros.errors import ConfigError, MissingDependencyError, install
from vla_ros.policies.base import checkpoint_options, create
from vla_ros.policies.remote import read_key
from vla_ros.process import SWITCH_INTERVAL
from vla_ros.serve.asgi import Application
from vla_ros.serve.cli import KEY_LENGTH
from vla_ros.serve.service import Limits, Service

try:
    from ray import serve
except ImportError as error:
    raise MissingDependencyError(
        f"Ray Serve cannot be imported ({error}); install it with: {install('ray')}"
    ) from error

_OWN = ("config", "checkpoint", "policy", "api_key_file")
_NUMBERS = {"replicas": "1", "most_replicas": "0", "gpus": "0", "cpus": "1", "max_batch": "16", "robots": "16"}


def application(arguments: Mapping[str, str]) -> Any:
    """Build the application from ``name=value`` arguments.

    The arguments are ``config``, ``checkpoint``, ``policy``, ``api_key_file``, ``max_batch`` and any option by its
    flat name (``policy.unnorm_key``). ``replicas`` (default 1) and ``most_replicas`` are the bounds for scaling;
    Ray starts another replica above ``robots`` robots per replica. ``gpus`` and ``cpus`` of a replica may be
    fractions.
    """
    unknown = [name for name in arguments if name not in (*_OWN, *_NUMBERS) and "." not in name]
    if unknown:
        known = ", ".join((*_OWN, *_NUMBERS))
        raise ConfigError(f"found the argument '{unknown[0]}', expected {known} or an option")
    numbers = {name: _number(name, arguments.get(name, usual)) for name, usual in _NUMBERS.items()}
    files = [config_file(arguments["config"])] if "config" in arguments else []
    options = checkpoint_options(arguments.get("policy"), arguments.get("checkpoint"), files)
    options += [f"{name}:={value}" for name, value in arguments.items() if "." in name]
    load(files, options)  # reports wrong options here rather than in every replica
    robots, least = int(numbers["robots"]), int(numbers["replicas"])
    deployed = serve.deployment(
        Replica,
        name="vla_ros",
        max_ongoing_requests=4 * robots,
        health_check_period_s=2.0,
        health_check_timeout_s=10.0,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=5.0,
        ray_actor_options={"num_cpus": numbers["cpus"], "num_gpus": numbers["gpus"]},
        autoscaling_config={
            "min_replicas": least,
            "max_replicas": max(least, int(numbers["most_replicas"])),
            "target_ongoing_requests": robots,  # an open connection counts as one request
        },
    )
    limits = Limits(max_batch=int(numbers["max_batch"]), max_robots=4 * robots)
    return deployed.bind(files, options, arguments.get("api_key_file", ""), limits)


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1e4:
        raise ConfigError(f"{name}: found {text!r}, expected a number of 0 or more")
    return value


_loaded: list[Application] = []  # the application of this process, if it is a replica


def _application() -> Application:
    """Called by Ray in a replica, after its constructor."""
    return _loaded[-1]


@serve.ingress(_application)
class Replica:
    """A loaded policy and the connections that Ray sends to it."""

    def __init__(self, files: list[Path], options: list[str], key_file: str, limits: Limits) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL)
        key = read_key(Path(key_file), "api_key_file", KEY_LENGTH) if key_file else ""
        config = load(files, options)
        self.service = Service(create(config), limits, config)
        self.service.load()
        _loaded.append(Application(self.service, key))

    def check_health(self) -> None:
        """Called by Ray, which replaces the replica if this raises."""
        if not self.service.healthy():
            raise RuntimeError(f"the worker is {self.service.worker.state.value}: {self.service.worker.error}")

    def __del__(self) -> None:
        """Called by Ray when the replica shuts down."""
        if hasattr(self, "service"):
            self.service.close(5.0)
