"""vLLM-Omni: openpi's framing; a bare array or named actions come back, errors as maps.

After vLLM-Omni 0.30.0. A connection is closed after 30 s without a request; the first request of a session's name
tells the model to begin an episode.
"""

from __future__ import annotations

from vla_ros.policies.remote.dialect import Metadata, Query, openpi_features
from vla_ros.policies.remote.messages import pack


def query(query: Query, metadata: Metadata) -> bytes:
    """Return an observation with the session's name."""
    session = {"session_id": query.session} if query.session else {}
    return pack({**openpi_features(query), "prompt": query.instruction, **session, **query.extras})


def reset(session: str) -> bytes:
    """Return the request that begins an episode."""
    return pack({"endpoint": "reset", "session_id": session} if session else {"endpoint": "reset"})
