"""The supported dialects, and how to recognise the dialect of a server."""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import urlsplit

from vla_ros.errors import ConfigError
from vla_ros.policies.remote import gr00t, oft, openpi
from vla_ros.policies.remote.dialect import Dialect, Metadata

OPENPI = Dialect("openpi", "openpi", openpi.query, openpi.answer)
ROBOARENA = replace(OPENPI, name="roboarena", query=openpi.roboarena_query, reset=openpi.reset)
VLLM_OMNI = Dialect(
    "vllm_omni",
    "openpi",
    openpi.vllm_omni_query,
    openpi.vllm_omni_answer,
    path="/v1/realtime/robot/openpi",
    reset=openpi.reset,
)
SGLANG = replace(OPENPI, name="sglang", query=openpi.sglang_query, port=30000, path="/openpi/policy")
GR00T = Dialect(
    "gr00t",
    "gr00t",
    gr00t.query,
    gr00t.answer,
    ("zmq", "tcp"),
    5555,
    hello=gr00t.HELLO,
    metadata=gr00t.metadata,
    reset=gr00t.reset,
)
GR00T_N15 = replace(GR00T, reset=None)  # its server knows no reset
GR00T_FLAT = replace(GR00T, name="gr00t_flat", query=gr00t.FLAT)
OFT = Dialect("oft", "oft", oft.query, oft.answer, ("http", "https"), 8777, "/act")

DIALECTS = {each.name: each for each in (OPENPI, ROBOARENA, VLLM_OMNI, SGLANG, GR00T, GR00T_FLAT, OFT)}
SCHEMES = {scheme: each for each in (OPENPI, GR00T, OFT) for scheme in each.schemes}


def by_address(server: str, name: str = "auto") -> Dialect:
    """Return the dialect called ``name``, or for ``auto`` the dialect of the address.

    :func:`by_metadata` may correct it. Raises ConfigError if the address is unsupported or contradicts ``name``.
    """
    parts = urlsplit(server)
    if parts.scheme == "grpc":
        raise ConfigError(
            f"policy.server: found '{server}'. LeRobot's gRPC server exchanges pickles, which can run arbitrary "
            "code; serve the checkpoint with `vla-ros serve` or another server with a ws:// address"
        )
    if parts.scheme not in SCHEMES or not parts.hostname:
        raise ConfigError(
            f"policy.server: found '{server}', expected ws://HOST:PORT, wss://, zmq:// (GR00T) or http:// (OFT)"
        )
    if name != "auto":
        if parts.scheme not in DIALECTS[name].schemes:
            schemes = "://, ".join(DIALECTS[name].schemes)
            raise ConfigError(f"policy.server: found '{server}', expected {schemes}:// for policy.dialect '{name}'")
        return DIALECTS[name]
    by_path = {each.path: each for each in (VLLM_OMNI, SGLANG)}
    return by_path.get(parts.path, SCHEMES[parts.scheme])


def by_metadata(assumed: Dialect, metadata: Metadata) -> Dialect:
    """Return the dialect that a server's metadata indicate, or else ``assumed``."""
    if assumed is OPENPI and metadata.keys() >= openpi.ROBOARENA_KEYS:
        return ROBOARENA
    if assumed is OPENPI and metadata.get("object") == "action.metadata":
        return SGLANG
    if assumed is GR00T and metadata.get("version") == "n1.5":
        return GR00T_N15
    return assumed
