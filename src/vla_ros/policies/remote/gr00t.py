"""The dialect of GR00T's policy server over ZeroMQ: N1.5, N1.6, N1.7 and the main branch.

Based on Isaac-GR00T n1.5, n1.6, n1.7 and commit 626af89. Each version encodes arrays differently and reads only its
own layout. The response to ``get_modality_config`` reveals the version. Feature keys are ``video.NAME`` and
``state.NAME``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from vla_ros.contract.spec import ImageFeature, PolicySpec, StateFeature
from vla_ros.errors import ConfigError
from vla_ros.policies.remote.dialect import (
    Dialect,
    Message,
    Metadata,
    Request,
    Response,
    ServerSaidError,
    action_chunk,
    is_image,
    read,
    read_map,
)
from vla_ros.policies.remote.messages import WireError, described, nd, npy, pack, text_map

_OLD, _NEW = "__ModalityConfig_class__", "__ModalityConfig__"


class Gr00t(Dialect):
    """The dialect of GR00T's server; the metadata map each modality to its configuration.

    The entry ``version`` is ``n1.5``, ``npy`` (N1.6 and the N1.7 tag) or ``nd`` (the main branch).
    """

    name, family, schemes, port = "gr00t", "gr00t", ("zmq", "tcp"), 5555
    hello = pack({"endpoint": "get_modality_config"})
    flat: ClassVar[bool] = False  # True for flat feature keys, which N1.5 always expects

    def encode_request(self, request: Request, metadata: Metadata) -> bytes:
        """Write a ``get_action`` request in the layout of the server's version.

        Images are uint8 [1, T, H, W, 3], states float32 [1, T, D]. N1.5 expects no batch axis.
        """
        version = metadata.get("version", "nd")
        old = version == "n1.5"
        groups: dict[str, dict[str, Any]] = {"video": {}, "state": {}}
        for key, value in request.features.items():
            group, axes = ("video", 3) if is_image(value) else ("state", 1)
            times = value[None] if value.ndim == axes else value
            batch = times if old else times[None]
            numbers = batch if old or group == "video" else batch.astype(np.float32)
            groups[group][key.removeprefix(f"{group}.")] = numbers
        language = metadata.get("language") or metadata.get("annotation") or {}
        [name, *_] = language.get("modality_keys") or ["annotation.human.task_description"]
        observation: dict[str, Any] = {**groups, "language": {name: [[request.instruction]]}}
        if old or self.flat:
            observation = {f"{group}.{key}": value for group in groups for key, value in groups[group].items()}
            observation[name] = [request.instruction]
        data = observation if old else {"observation": observation, "options": None}
        return pack({"endpoint": "get_action", "data": data}, nd if version == "nd" else npy)

    def decode_response(self, message: Message) -> Response:
        """Read actions by name: a map, or a list of such a map and a map of other outputs of the policy."""
        content = read(_checked(message))
        if isinstance(content, list) and len(content) == 2:
            content = content[0]
        if not isinstance(content, Mapping) or not content:
            raise WireError(f"the response is {described(content)}, expected a map of actions")
        actions = {str(key): _columns(value, str(key)) for key, value in content.items()}
        return Response({key.removeprefix("action."): value for key, value in actions.items()})

    def encode_reset(self, session: str, metadata: Metadata) -> bytes | None:
        old = metadata.get("version") == "n1.5"  # knows no reset
        return None if old else pack({"endpoint": "reset", "data": {"options": None}})

    def decode_metadata(self, message: Message) -> Metadata:
        version, modalities = "nd", {}
        for name, entry in read_map(_checked(message), "the modality configuration").items():
            if not isinstance(entry, Mapping) or not (entry.get(_OLD) or entry.get(_NEW)):
                raise WireError(f"the modality '{name[:40]}' is {described(entry)}, expected a ModalityConfig")
            body = entry.get("as_json")
            if isinstance(body, str):
                version, body = "n1.5", _json(body)
            elif entry.get(_OLD):
                version = "npy"
            keys = text_map(body, f"the modality '{name[:40]}'").get("modality_keys")
            if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
                raise WireError(f"the modality '{name[:40]}' is {described(body)}, expected modality_keys")
            modalities[name] = body
        return {**modalities, "version": version}

    def horizon(self, metadata: Metadata) -> Any:
        steps = metadata.get("action", {}).get("delta_indices")
        return len(steps) if isinstance(steps, list) else None

    def check(self, metadata: Metadata, bound: PolicySpec, action_keys: Sequence[str] = ()) -> None:
        _check_modality("video", "features.images", metadata, bound.images)
        _check_modality("state", "features.state", metadata, bound.state)
        theirs = [key.removeprefix("action.") for key in (metadata.get("action") or {}).get("modality_keys") or ()]
        unknown = [key for key in action_keys if key not in theirs]
        if theirs and unknown:
            raise ConfigError(f"the server returns the actions {theirs}, but policy.action_keys has {unknown}")


class Gr00tFlat(Gr00t):
    """GR00T's server with ``--use-sim-policy-wrapper``: flat keys such as ``video.front``, not nested maps."""

    name, flat = "gr00t_flat", True


GR00T, GR00T_FLAT = Gr00t(), Gr00tFlat()


def _check_modality(
    group: str, option: str, metadata: Metadata, features: Sequence[ImageFeature | StateFeature]
) -> None:
    section = metadata.get(group)
    if section is None:
        return
    theirs = {key.removeprefix(f"{group}.") for key in section["modality_keys"]}
    ours = {feature.key.removeprefix(f"{group}.") for feature in features}
    if theirs != ours:
        raise ConfigError(f"the server takes the {group} {sorted(theirs)}, but {option} has {sorted(ours)}")
    indices = section.get("delta_indices")
    for feature in features:
        steps = [delta.steps for delta in feature.delta_timestamps]
        in_seconds = any(delta.seconds for delta in feature.delta_timestamps)
        if isinstance(indices, list) and not in_seconds and steps != indices:
            raise ConfigError(
                f"the server takes the {group} at steps {indices}, but {feature.key} has {steps} "
                "(features.delta_indices)"
            )


def _columns(value: Any, name: str) -> Any:
    """Return actions [K, D]; N1.5 sends [K] if D is 1."""
    return action_chunk(value[:, None] if isinstance(value, np.ndarray) and value.ndim == 1 else value, name)


def _checked(message: Message) -> bytes:
    if isinstance(message, str) or message == b"ERROR":
        raise ServerSaidError("ERROR", " and nothing else")
    return message


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise WireError("the modality configuration is not JSON") from None
