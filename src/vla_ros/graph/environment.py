"""Reads DDS domain and discovery range from the environment; generates Cyclone DDS's configuration.

The variables have rcl's meaning ("Improved Dynamic Discovery" in the documentation of ROS 2 Iron and later), except
that the default range is this host, so that nobody drives a neighbour's robot by accident.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from xml.sax.saxutils import quoteattr

from vla_ros.errors import ConfigError
from vla_ros.graph.messages import ros_distro

RANGES = ("LOCALHOST", "SUBNET", "OFF", "SYSTEM_DEFAULT")
DEFAULT_RANGE = "LOCALHOST"

# rmw_cyclonedds looks for at most this many participants on a host.
_MAX_PARTICIPANT_INDEX = 32


@dataclass(frozen=True)
class DdsEnvironment:
    """Domain and discovery range of the embedded participant."""

    domain_id: int = 0
    range: str = DEFAULT_RANGE
    range_source: str = "default"
    static_peers: tuple[str, ...] = ()
    distro: str = "jazzy"
    user_configuration: str = ""  # ``CYCLONEDDS_URI``; overrides all other settings

    @property
    def gid_size(self) -> int:
        """Bytes of a GID in ``ros_discovery_info``: 24 in Humble, 16 since Iron."""
        return 24 if self.distro == "humble" else 16

    def describe(self) -> str:
        hint = ""
        if self.range_source == "default":
            hint = "; set ROS_AUTOMATIC_DISCOVERY_RANGE=SUBNET to meet other hosts"
        if self.range == "LOCALHOST" and self.range_source != "ROS_LOCALHOST_ONLY" and self.distro == "humble":
            # which then listens to multicast only
            hint += "; rmw_cyclonedds_cpp of Humble is met with ROS_LOCALHOST_ONLY=1 on both sides, or with SUBNET"
        peers = f", static peers {', '.join(self.static_peers)}" if self.static_peers else ""
        own = ", CYCLONEDDS_URI applied on top" if self.user_configuration else ""
        return (
            f"DDS domain {self.domain_id}, discovery range {self.range} ({self.range_source}){peers}{own}, "
            f"messages of ROS 2 {self.distro}{hint}"
        )

    def configuration(self) -> str:
        """Return Cyclone DDS's configuration: comma-separated fragments, where later ones win."""
        return f"{self._own_configuration()},{self.user_configuration}".rstrip(",")

    def _own_configuration(self) -> str:
        general = ""
        discovery = ""
        # As in rmw_cyclonedds, "OFF" sets a domain tag that no other process has.
        if self.range == "OFF":
            general += "<AllowMulticast>false</AllowMulticast>"
            discovery += f"<ParticipantIndex>none</ParticipantIndex><Tag>ros_discovery_off_{os.getpid()}</Tag>"
        elif self.range != "SYSTEM_DEFAULT":
            peers = list(self.static_peers)
            discovery += (
                "<ParticipantIndex>auto</ParticipantIndex>"
                f"<MaxAutoParticipantIndex>{_MAX_PARTICIPANT_INDEX}</MaxAutoParticipantIndex>"
            )
            if self.range == "LOCALHOST":
                # Announce often: ROS processes that only listen to multicast can discover this participant only
                # through its announcements.
                general += "<AllowMulticast>false</AllowMulticast>"
                discovery += "<SPDPInterval>1s</SPDPInterval>"
                peers.insert(0, "localhost")
                if self.range_source == "ROS_LOCALHOST_ONLY":
                    general += '<Interfaces><NetworkInterface address="127.0.0.1"/></Interfaces>'
                # Nothing leaves the host, and the loopback interface carries 64 KiB packets: an image of
                # 640x480 is 15 packets instead of 690.
                general += "<MaxMessageSize>65500B</MaxMessageSize><FragmentSize>63000B</FragmentSize>"
            if peers:
                listed = "".join(f"<Peer address={quoteattr(peer)}/>" for peer in peers)
                # Cyclone stops announcing to a peer's ports that stayed silent for 30 s, and ignores what Fast DDS
                # announces over the loopback interface: a process that starts later was never discovered.
                discovery += f"<Peers>{listed}</Peers><InitialLocatorPruneDelay>inf</InitialLocatorPruneDelay>"
        internal = (
            # As much as the kernel grants (net.core.rmem_max): a whole image must fit.
            '<SocketReceiveBufferSize min="default" max="32MB"/>'
            # Never make a writer wait for slow readers: KEEP_LAST bounds what is kept.
            "<Watermarks><WhcHigh>512MB</WhcHigh><WhcHighInit>512MB</WhcHighInit>"
            "<WhcAdaptive>false</WhcAdaptive></Watermarks>"
        )
        # Match endpoints by type name only, as the ROS middlewares do: Lyrical's type information differs from
        # this participant's. The numbers are the vendors Cyclone (1.16) and eProsima (1.15).
        compatibility = "<IgnoreTypeInformation>1.16,1.15</IgnoreTypeInformation>"
        return (
            f"<CycloneDDS><Domain><General>{general}</General><Discovery>{discovery}</Discovery>"
            f"<Internal>{internal}</Internal><Compatibility>{compatibility}</Compatibility></Domain></CycloneDDS>"
        )


def dds_environment(environment: Mapping[str, str] | None = None) -> DdsEnvironment:
    """Read the variables of ROS and of Cyclone DDS. Raises ConfigError if a value is invalid.

    The variables are ``ROS_DOMAIN_ID``, ``ROS_LOCALHOST_ONLY``, ``ROS_AUTOMATIC_DISCOVERY_RANGE``,
    ``ROS_STATIC_PEERS``, ``ROS_DISTRO`` and ``CYCLONEDDS_URI``.
    """
    variables = os.environ if environment is None else environment
    reach, source = _range(variables)
    return DdsEnvironment(
        domain_id=_domain_id(variables.get("ROS_DOMAIN_ID", "")),
        range=reach,
        range_source=source,
        static_peers=tuple(peer for peer in variables.get("ROS_STATIC_PEERS", "").split(";") if peer.strip()),
        distro=ros_distro(variables),
        user_configuration=variables.get("CYCLONEDDS_URI", "").strip(),
    )


def _domain_id(text: str) -> int:
    if not text.strip():
        return 0
    # 232 is the highest domain whose ports stay under 65536 (DDSI-RTPS 9.6.1).
    if not text.strip().isdigit() or int(text) > 232:
        raise ConfigError(f"ROS_DOMAIN_ID is '{text}'; expected a number from 0 to 232")
    return int(text)


def _range(variables: Mapping[str, str]) -> tuple[str, str]:
    only = variables.get("ROS_LOCALHOST_ONLY", "")
    if only not in ("", "0", "1"):
        raise ConfigError(f"ROS_LOCALHOST_ONLY is '{only}'; expected 0 or 1")
    # As in rcl, this older variable takes precedence, and 0 means the subnet.
    if only:
        return ("LOCALHOST" if only == "1" else "SUBNET"), "ROS_LOCALHOST_ONLY"
    value = variables.get("ROS_AUTOMATIC_DISCOVERY_RANGE", "").strip().upper()
    if not value:
        return DEFAULT_RANGE, "default"
    if value not in RANGES:
        raise ConfigError(f"ROS_AUTOMATIC_DISCOVERY_RANGE is '{value}'; expected one of {', '.join(RANGES)}")
    return value, "ROS_AUTOMATIC_DISCOVERY_RANGE"
