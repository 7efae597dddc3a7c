"""Differences between ROS 2 distributions in their middleware settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from vla_ros.errors import ConfigError


@dataclass(frozen=True)
class Distribution:
    """One ROS 2 distribution."""

    name: str  # as in ``ROS_DISTRO``
    cyclone: str  # version of Cyclone DDS: "0.10" with ``<SharedMemory>``, or "11" with ``<PubSubMessageExchange>``
    fastdds_variable: str  # environment variable with the path of the Fast DDS profile; Fast DDS 3 renamed it
    # True if zenoh's configuration sets its shared-memory size (1.7 and later), False if ``ZENOH_SHM_ALLOC_SIZE``
    # does.
    zenoh_pool_in_config: bool


DEFAULT_RMW = "rmw_fastrtps_cpp"
"""The RMW if ``RMW_IMPLEMENTATION`` is not set; the same in all known distributions."""

_FAST_DDS_2 = "FASTRTPS_DEFAULT_PROFILES_FILE"
_FAST_DDS_3 = "FASTDDS_DEFAULT_PROFILES_FILE"

DISTRIBUTIONS = {
    known.name: known
    for known in (
        Distribution("humble", "0.10", _FAST_DDS_2, False),
        Distribution("jazzy", "0.10", _FAST_DDS_2, False),
        Distribution("kilted", "0.10", _FAST_DDS_3, False),
        Distribution("lyrical", "11", _FAST_DDS_3, True),
    )
}


def sourced_distribution(environment: Mapping[str, str] | None = None, fallback: str = "") -> Distribution:
    """Return the distribution of ``ROS_DISTRO``, or ``fallback`` if that is not set."""
    variables = os.environ if environment is None else environment
    name = variables.get("ROS_DISTRO", "").strip() or fallback
    if not name:
        raise ConfigError("ROS_DISTRO is not set: no ROS 2 is sourced; `source /opt/ros/jazzy/setup.bash` first")
    try:
        return DISTRIBUTIONS[name]
    except KeyError:
        raise ConfigError(
            f"ROS 2 distribution '{name}': middleware profiles are known for {', '.join(DISTRIBUTIONS)}; "
            "use middleware:=default and your own settings"
        ) from None
