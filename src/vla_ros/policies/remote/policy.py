"""A policy that runs on another machine."""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import simplejpeg

from vla_ros.config import Config, PolicyConfig
from vla_ros.contract.features import complete_spec
from vla_ros.contract.spec import PolicySpec
from vla_ros.policies.base import Lost, Policy, Progress, Session, no_progress, options_of
from vla_ros.policies.published import loop_of
from vla_ros.policies.remote import API_KEY, RemoteOptions, read_key
from vla_ros.policies.remote.dialect import EMPTY, Dialect, Metadata, Request
from vla_ros.policies.remote.dialects import by_address
from vla_ros.policies.remote.link import Link, Peer
from vla_ros.policies.remote.messages import WireError
from vla_ros.policies.remote.spec import OWN
from vla_ros.policies.remote.transport import Target
from vla_ros.process import keep_freed_memory
from vla_ros.types import ActionChunk, FloatArray, Observation
from vla_ros.vision.processors import resize_with_pad

logger = logging.getLogger(__name__)


class RemoteSession(Session):
    """The connection and the current episode of one robot."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.reset()

    def reset(self) -> None:
        """Begin an episode, with a new name, at the next observation."""
        self.begins, self.name, self.requests = True, uuid.uuid4().hex, 0

    @property
    def lost(self) -> Lost | None:
        return self.link.lost

    def close(self) -> None:
        self.link.close()


class RemotePolicy(Policy):
    """Sends observations to a policy server and checks its responses."""

    Options: ClassVar[type[PolicyConfig]] = RemoteOptions

    def __init__(self, config: Config) -> None:
        self._use(config, options_of(config, RemoteOptions))

    def _use(self, config: Config, options: RemoteOptions, key: str = "") -> None:
        """Use ``options``; without ``key``, the API key is in their file or in the environment."""
        key = key or os.environ.get(API_KEY, "").strip()
        if options.api_key_file:
            key = read_key(Path(options.api_key_file), "policy.api_key_file")
        dialect = by_address(options.server, options.dialect)
        self._target = Target(options.server, dialect, key, options.max_response << 20)
        self._config, self._options = config, options
        self._first: Link | None = None  # connection for the first session
        self._told_order = False

    def load(self, progress: Progress = no_progress) -> None:
        """Connect to the server and read the features of its policy.

        Raises:
            ServerLostError: No server was reached within ``policy.connect_timeout``.
            WireError: The server speaks another protocol, or refuses this client.
            ConfigError: The server's description of its policy contradicts ``features``.
        """
        keep_freed_memory()
        progress(0.0, f"connecting to {self._target.shown}")
        self.__dict__.pop("spec", None)
        self._first = self._connected()
        progress(1.0, f"{self._target.shown} speaks {self._first.peer.dialect.name}")

    def describe(self) -> PolicySpec:
        """Return an open spec, because only the connected server describes its policy."""
        return self._spec(EMPTY, self._target.dialect)

    def start_session(self) -> RemoteSession:
        """Connect a robot; the first robot uses the connection that :meth:`load` made."""
        link, self._first = self._first, None
        return RemoteSession(link or self._connected())

    def _connected(self) -> Link:
        link = Link(self._target, self._accept)
        link.start(self._options.connect_timeout)
        return link

    def infer(self, session: RemoteSession, observation: Observation) -> ActionChunk:
        """Infer a chunk on the server.

        Raises:
            ServerLostError: There is no connection, or no response arrived within ``timeouts.inference``.
            WireError: The server returned an error, or something other than finite actions.
        """
        began = time.perf_counter()
        seconds = self._config.timeouts.inference
        own = session.link.peer.metadata.get("server") == OWN
        session.requests += 1
        images = {key: self._image(image, own) for key, image in observation.images.items()}
        request = Request(
            images | dict(observation.state),
            observation.instruction,
            session.name,
            begins=session.begins,
            number=session.requests,
            deadline_s=seconds,
            noise=observation.noise,
            previous=observation.previous,
        )
        encoded = time.perf_counter()
        response = session.link.request(request, seconds)
        session.begins = False
        if (own or response.number is not None) and response.number != request.number:
            session.link.drop("the server responded to another request")
            found = f"found {response.number}, expected {request.number}"
            raise WireError(f"the server responded to another request: {found}; reconnecting")
        stages = {"encode": 1e3 * (encoded - began), "round_trip": 1e3 * (time.perf_counter() - encoded)}
        return ActionChunk(
            self._joined(response.actions),
            observation.stamp,
            response.normalized,
            response.tokens,
            {**stages, **response.timing_ms},
            dict(response.info),
        )

    def close(self) -> None:
        link, self._first = self._first, None
        if link is not None:
            link.close()

    def _accept(self, peer: Peer) -> None:
        """Check the metadata against ``features``; on reconnection, refuse another policy."""
        spec = self._spec(peer.metadata, peer.dialect)
        before: PolicySpec | None = self.__dict__.get("spec")
        if before is None:
            if peer.metadata.get("server") != OWN:
                peer.dialect.check(peer.metadata, complete_spec(spec, self._config), self._options.action_keys)
        elif spec != before:
            changed = [name for name in spec.__dataclass_fields__ if getattr(spec, name) != getattr(before, name)]
            raise WireError(f"the server serves another policy now ({', '.join(changed)} differ); restart the node")
        self.spec, self._image_size = spec, peer.dialect.image_size(peer.metadata)

    def _spec(self, metadata: Metadata, dialect: Dialect) -> PolicySpec:
        return dialect.spec(metadata, self._options.horizon, loop_of(dialect.family, self._config.preset))

    def _image(self, image: Any, own: bool) -> Any:
        """Return an image as the server takes it: resized with padding, as openpi's clients do, or as JPEG."""
        size = self._image_size
        if size and image.shape[-3:-1] != size:
            images = image.reshape(-1, *image.shape[-3:])
            return np.stack([resize_with_pad(each, size) for each in images]).reshape(*image.shape[:-3], *size, 3)
        quality = self._options.jpeg_quality
        if not quality or not own or image.ndim != 3:
            return image
        return simplejpeg.encode_jpeg(np.ascontiguousarray(image), quality, "RGB", "444")

    def _joined(self, actions: Mapping[str, FloatArray]) -> FloatArray:
        """Concatenate named actions in the order of ``policy.action_keys``, if set."""
        keys = self._options.action_keys or tuple(actions)
        missing = [key for key in keys if key not in actions]
        if missing:
            raise WireError(f"the server returned {list(actions)}, expected {missing} too (policy.action_keys)")
        if len(actions) > 1 and not self._options.action_keys and not self._told_order:
            self._told_order = True
            order = ", ".join(f"{key} [{part.shape[1]}]" for key, part in actions.items())
            logger.warning("actions are taken in the server's order, %s; policy.action_keys changes it", order)
        parts = [actions[key] for key in keys]
        if len({len(part) for part in parts}) > 1:
            raise WireError(f"the server's actions have {[len(part) for part in parts]} steps, expected one length")
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
