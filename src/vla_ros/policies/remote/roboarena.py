"""RoboArena: openpi's framing, with an ``endpoint`` in each request and a reset that is answered with text.

After robo-arena/roboarena 6fa329f. Its metadata are six keys that say what the robot is to send.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vla_ros.policies.remote.dialect import Metadata, Query, is_image, openpi_features
from vla_ros.policies.remote.messages import pack

CONFIG_KEYS = frozenset(
    {
        "image_resolution",
        "needs_wrist_camera",
        "n_external_cameras",
        "needs_stereo_camera",
        "needs_session_id",
        "action_space",
    }
)


def query(query: Query, metadata: Metadata) -> bytes:
    """Return an observation with float32 states, and the session's name where the server asks for it."""
    features = openpi_features(query).items()
    message: dict[str, Any] = {key: v if is_image(v) else np.asarray(v, np.float32) for key, v in features}
    if metadata.get("needs_session_id"):
        message["session_id"] = query.session
    return pack({**message, "prompt": query.instruction, **query.extras, "endpoint": "infer"})


def reset(session: str) -> bytes:
    """Return the request that begins an episode."""
    return pack({"session_id": session, "endpoint": "reset"} if session else {"endpoint": "reset"})
