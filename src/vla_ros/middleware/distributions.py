"""What differs between the ROS 2 distributions as far as middleware settings are concerned."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from vla_ros.errors import ConfigError


@dataclass(frozen=True)
class Distribution:
    """One ROS 2 distribution.

    Attributes:
        name: As in ``ROS_DISTRO``.
        cyclone: Version of Cyclone DDS whose configuration it reads: "0.10", or "11" where shared memory is a
            PubSubMessageExchange plug-in and ``<SharedMemory>`` is refused.
        fastdds_variable: Environment variable with the path of the Fast DDS profile; Fast DDS 3 renamed it.
        zenoh_pool_in_config: True where zenoh (1.7 and later) takes the size of its shared memory from its own
            configuration, False where rmw_zenoh takes it from ``ZENOH_SHM_ALLOC_SIZE``.
    """

    name: str
    cyclone: str
    fastdds_variable: str
    zenoh_pool_in_config: bool

    @property
    def default_rmw(self) -> str:
        """The RMW that is used when ``RMW_IMPLEMENTATION`` is not set; the same in all distributions here."""
        return "rmw_fastrtps_cpp"


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
    """The distribution that ``ROS_DISTRO`` names, or ``fallback`` where none is sourced.

    Raises:
        ConfigError: None is sourced and there is no fallback, or it is one that this package does not know.
    """
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
