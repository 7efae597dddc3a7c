"""The wire protocols of policy servers (openpi, RoboArena, vLLM-Omni, SGLang, GR00T, OFT) and their client.

``messages`` encodes and decodes arrays, ``images`` decodes images. Each family of servers has a module with its
dialect; ``dialects`` chooses among them. ``vla_eval`` has the messages of a benchmark harness. ``transport`` sends
and receives messages, ``link`` keeps a connection open, ``policy`` is the client.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vla_ros.config.options import PolicyConfig, option
from vla_ros.errors import ConfigError
from vla_ros.policies.base import LazyPolicy

API_KEY = "VLA_ROS_API_KEY"
"""Environment variable with the server's key, used if ``policy.api_key_file`` is empty."""


@dataclass(frozen=True)
class RemoteOptions(PolicyConfig):
    """Options of the connection to a policy server."""

    server: str = option(
        "", "Address of the policy server: ws://HOST:PORT, wss://HOST/PATH, zmq://HOST:PORT (GR00T), http:// (OFT)"
    )
    dialect: str = option(
        "auto", "The server's protocol (docs/remote.md); auto: recognise it by the server's address and metadata"
    )
    api_key_file: str = option("", f"File with the server's API key; empty: the environment variable {API_KEY}")
    connect_timeout: float = option(30.0, "Maximum wait for the server at start", unit="s", low=0.1, high=3600.0)
    horizon: int = option(
        64, "Maximum number of actions in a chunk, if the server does not state it", low=1, high=4096
    )
    action_keys: tuple[str, ...] = option(
        (), "The server's named actions in the order of features.action; empty: in the server's order"
    )
    jpeg_quality: int = option(
        0, "Send images as JPEG of this quality if the server accepts it; 0: raw pixels", low=0, high=100
    )
    max_response: int = option(64, "Maximum size of a response", unit="MiB", low=1, high=1024)


_MOST_KEY = 4096  # characters


def read_key(path: Path, name: str, least: int = 1) -> str:
    """Read an API key of at least ``least`` characters without spaces from a file.

    Raises ConfigError, which names the option ``name``, if the file does not contain such a key.
    """
    try:
        with path.expanduser().open("rb") as file:  # a pipe is allowed: the key need not be on a disk
            key = file.read(_MOST_KEY + 1).decode("ascii").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name}: {error}") from None
    if not least <= len(key) <= _MOST_KEY or len(key.split()) != 1 or not key.isprintable():
        raise ConfigError(f"{name}: {path} does not contain a key of at least {least} characters without spaces")
    return key


REMOTE = LazyPolicy(RemoteOptions, "vla_ros.policies.remote.policy:RemotePolicy")
"""Target of the entry point ``remote``."""
