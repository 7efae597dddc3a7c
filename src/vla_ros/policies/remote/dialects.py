"""The dialects that exist, and how to recognise the dialect of a server."""

from __future__ import annotations

from urllib.parse import urlsplit

from vla_ros.errors import ConfigError
from vla_ros.policies.remote.dialect import Dialect, Metadata
from vla_ros.policies.remote.gr00t import GR00T, GR00T_FLAT
from vla_ros.policies.remote.moveit_pro import MOVEIT_PRO
from vla_ros.policies.remote.oft import OFT_HTTP
from vla_ros.policies.remote.openpi import OPENPI, ROBOARENA, SGLANG, VLLM_OMNI
from vla_ros.policies.remote.vla_eval import VLA_EVAL

DIALECTS: dict[str, Dialect] = {}
"""Maps ``policy.dialect`` to dialects; the first one with an address's scheme is the default for that scheme."""


def register(*dialects: Dialect) -> None:
    """Add dialects to those that addresses, metadata and ``policy.dialect`` can choose."""
    DIALECTS.update({dialect.name: dialect for dialect in dialects})


register(OPENPI, ROBOARENA, VLLM_OMNI, SGLANG, GR00T, GR00T_FLAT, OFT_HTTP, VLA_EVAL, MOVEIT_PRO)


def by_address(server: str, name: str = "auto") -> Dialect:
    """Return the dialect called ``name``, or for ``auto`` the dialect of the address.

    :func:`by_metadata` may correct it. Raises ConfigError if the address is unsupported or contradicts ``name``.
    """
    address = urlsplit(server)
    if address.scheme == "grpc":
        raise ConfigError(
            f"policy.server: found '{server}'. LeRobot's gRPC server exchanges pickles, which can run arbitrary "
            "code; serve the checkpoint with `vla-ros serve` or another server with a ws:// address"
        )
    candidates = [dialect for dialect in DIALECTS.values() if address.scheme in dialect.schemes]
    if not candidates or not address.hostname:
        raise ConfigError(
            f"policy.server: found '{server}', expected ws://HOST:PORT, wss://, zmq:// (GR00T), or http:// (OFT, "
            "MoveIt Pro)"
        )
    unsent = {"user": address.username, "fragment": address.fragment}
    unsent |= {"query": address.query} if address.scheme in ("zmq", "tcp") else {}
    for part, found in unsent.items():
        if found:
            raise ConfigError(
                f"policy.server: the address has a {part}, which is not sent to {address.scheme}:// servers; leave "
                "it out (an API key is in the file of policy.api_key_file)"
            )
    if name == "auto":
        return next((dialect for dialect in candidates if dialect.path == address.path), candidates[0])
    if name not in DIALECTS:
        raise ConfigError(f"policy.dialect: found '{name}', expected auto, {', '.join(DIALECTS)}")
    if DIALECTS[name] not in candidates:
        schemes = "://, ".join(DIALECTS[name].schemes)
        raise ConfigError(f"policy.server: found '{server}', expected {schemes}:// for policy.dialect '{name}'")
    return DIALECTS[name]


def by_metadata(assumed: Dialect, metadata: Metadata) -> Dialect:
    """Return the variant of the dialect ``assumed`` that a server's metadata indicate, or else ``assumed``."""
    variants = [dialect for dialect in DIALECTS.values() if type(assumed) in type(dialect).__bases__]
    return next((dialect for dialect in variants if dialect.recognizes(metadata)), assumed)
