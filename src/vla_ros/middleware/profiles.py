"""Generates the files of each profile from the number and size of the camera frames, for each distribution."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from vla_ros.config.tree import Config
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


PAGE = 4096
IN_FLIGHT = 8
"""Frames of one camera that may exist at once: 5 in the driver's history (SensorDataQoS), one being written, and
one in each of two readers."""


@dataclass(frozen=True)
class FrameLoad:
    """Number and size of the camera frames."""

    width: int = 1920  # pixels in a row
    height: int = 1080  # rows
    cameras: int = 1  # number of cameras with frames of that size
    bytes_per_pixel: int = 3  # 3 for rgb8 and bgr8, 4 with alpha, 2 for yuv422 and 16 bit depth

    def __post_init__(self) -> None:
        for name, high in (("width", 16384), ("height", 16384), ("cameras", 64), ("bytes_per_pixel", 16)):
            value = getattr(self, name)
            if not 1 <= value <= high:
                raise ConfigError(f"{name}: found {value}, expected an integer from 1 to {high}")

    @classmethod
    def of(cls, config: Config) -> FrameLoad:
        """Return the frames of a configuration, all with the greatest width and height of its cameras."""
        camera = config.camera
        return cls(max(camera.width), max(camera.height), len(camera.topics))

    @property
    def image_bytes(self) -> int:
        return self.width * self.height * self.bytes_per_pixel

    @property
    def message_bytes(self) -> int:
        """Bytes of one serialised ``sensor_msgs/Image``: the pixels, and one page for header and row padding."""
        return round_up(self.image_bytes + PAGE, PAGE)

    @property
    def in_flight_bytes(self) -> int:
        """Bytes of all messages that may exist at once."""
        return self.message_bytes * self.cameras * IN_FLIGHT

    def __str__(self) -> str:
        cameras = "1 camera" if self.cameras == 1 else f"{self.cameras} cameras"
        return f"{cameras} of {self.width}x{self.height} ({self.image_bytes / 1e6:.1f} MB a frame)"


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


MIB = 1024**2

UDP_DATAGRAM = 65500
"""Largest UDP datagram of Fast DDS in bytes. Fast DDS splits messages by the smallest limit of its transports, over
shared memory, too."""

MIN_SEGMENT = 16 * MIB
"""Smallest Fast DDS segment in bytes; a segment also carries all other messages of its process."""

MAX_RECEIVE_BUFFER = 128 * MIB
"""Largest useful receive buffer in bytes: Linux doubles the requested size and counts it in 32 bits."""


def segment_bytes(frames: FrameLoad) -> int:
    return max(MIN_SEGMENT, round_up(frames.in_flight_bytes, MIB))


def receive_buffer_bytes(frames: FrameLoad) -> int:
    """Return the socket receive buffer in bytes: two frames of every camera.

    A frame arrives as one burst; room for a second one lets the receiving thread fall behind safely.
    """
    return min(MAX_RECEIVE_BUFFER, max(8 * MIB, round_up(2 * frames.message_bytes * frames.cameras, MIB)))


def fastdds_xml(frames: FrameLoad) -> str:
    """Generate XML for Fast DDS 2.6 to 3.6: shared memory large enough for the frames, UDPv4 for other hosts."""
    segment = segment_bytes(frames)
    pieces = -(-frames.message_bytes // UDP_DATAGRAM)
    queue = max(512, round_up(pieces * IN_FLIGHT * frames.cameras, 512))
    return f"""<?xml version="1.0" encoding="UTF-8"?>
<!-- Fast DDS for {frames}. Written by `vla-ros middleware fastdds`; both ends of a topic must use it. -->
<dds xmlns="http://www.eprosima.com">
  <profiles>
    <transport_descriptors>
      <transport_descriptor>
        <transport_id>vla_ros_shared_memory</transport_id>
        <type>SHM</type>
        <!-- {IN_FLIGHT} frames of each camera; the stock segment of 512 KiB holds none. -->
        <segment_size>{segment}</segment_size>
        <!-- A frame is {pieces} pieces of {UDP_DATAGRAM} bytes; the stock queue holds 512. -->
        <port_queue_capacity>{queue}</port_queue_capacity>
        <maxMessageSize>{frames.message_bytes}</maxMessageSize>
      </transport_descriptor>
      <transport_descriptor>
        <transport_id>vla_ros_udp</transport_id>
        <type>UDPv4</type>
        <!-- Cut down to net.core.rmem_max by the kernel. -->
        <receiveBufferSize>{receive_buffer_bytes(frames)}</receiveBufferSize>
      </transport_descriptor>
    </transport_descriptors>
    <participant profile_name="vla_ros" is_default_profile="true">
      <rtps>
        <userTransports>
          <transport_id>vla_ros_shared_memory</transport_id>
          <transport_id>vla_ros_udp</transport_id>
        </userTransports>
        <useBuiltinTransports>false</useBuiltinTransports>
        <builtin>
          <discovery_config>
            <!-- Time to the next announcement of a process: stock 3 s, and the first ones can get lost. -->
            <leaseAnnouncement>
              <sec>0</sec>
              <nanosec>300000000</nanosec>
            </leaseAnnouncement>
          </discovery_config>
        </builtin>
      </rtps>
    </participant>
  </profiles>
</dds>
"""


def cyclone_xml(
    frames: FrameLoad, distribution: Distribution, *, iceoryx: bool = False, interface: str = ""
) -> str:
    """Generate XML for Cyclone DDS: receive buffers and, with ``iceoryx``, shared memory through RouDi.

    The distribution determines the syntax. If ``interface`` is "", Cyclone chooses the network interface.
    """
    chosen = f'name="{interface}"' if interface else 'autodetermine="true"'
    # Loopback does not announce multicast, but Cyclone can use it there.
    multicast = "true" if interface == "lo" else "default"
    interfaces = [f'<NetworkInterface {chosen} priority="default" multicast="{multicast}"/>']
    shared_memory = ""
    if iceoryx and distribution.cyclone == "0.10":
        shared_memory = """
    <SharedMemory>
      <Enable>true</Enable>
      <LogLevel>warn</LogLevel>
    </SharedMemory>"""
    elif iceoryx:
        interfaces.append('<PubSubMessageExchange type="iox" library="psmx_iox" config="LOG_LEVEL=WARN;"/>')
    listed = "\n        ".join(interfaces)
    name = "iceoryx" if iceoryx else "cyclonedds"
    high = round_up(2 * frames.message_bytes, 1024) // 1024
    return f"""<?xml version="1.0" encoding="UTF-8"?>
<!-- Cyclone DDS {distribution.cyclone} for {frames}. Written by `vla-ros middleware {name}`. -->
<CycloneDDS xmlns="https://cdds.io/config">
  <Domain Id="any">
    <General>
      <Interfaces>
        {listed}
      </Interfaces>
    </General>{shared_memory}
    <Internal>
      <!-- Two frames of every camera; cut down to net.core.rmem_max by the kernel. -->
      <SocketReceiveBufferSize min="default" max="{receive_buffer_bytes(frames)}B"/>
      <!-- A RELIABLE driver may have two frames unacknowledged before it waits; the stock limit is 500 kB. -->
      <Watermarks>
        <WhcHigh>{high} KiB</WhcHigh>
      </Watermarks>
    </Internal>
  </Domain>
</CycloneDDS>
"""


SMALL_POOLS = ((256, 8192), (1024, 4096), (16 * 1024, 1024), (128 * 1024, 128), (MIB, 24))
"""(chunk size in bytes, number of chunks) for everything but raw images. iceoryx uses the smallest pool that fits;
if that pool is empty, it does not use a larger one."""


def image_chunks(frames: FrameLoad) -> int:
    """Return how many image chunks RouDi needs: twice the frames in flight, as readers may hold dropped samples."""
    return 2 * IN_FLIGHT * frames.cameras


def roudi_toml(frames: FrameLoad) -> str:
    """Generate TOML for RouDi (iceoryx 2.0): pools for small messages and one pool for images."""
    pools = [pool for pool in SMALL_POOLS if pool[0] < frames.message_bytes]
    pools.append((round_up(frames.message_bytes + PAGE, PAGE), image_chunks(frames)))
    total = sum(size * count for size, count in pools)
    entries = "\n".join(f"[[segment.mempool]]\nsize = {size}\ncount = {count}\n" for size, count in pools)
    return f"""# RouDi (iceoryx 2.0) for {frames}. Written by `vla-ros middleware iceoryx`.
# It reserves {total / 1e6:.0f} MB of /dev/shm when it starts. One per host: iox-roudi -m off -c THIS_FILE
[general]
version = 1

[[segment]]

{entries}"""


def zenoh_override(frames: FrameLoad, distribution: Distribution) -> dict[str, str]:
    """Return the environment variables that enable zenoh's shared memory, with room for the frames in flight."""
    enabled = "transport/shared_memory/enabled=true"
    size = segment_bytes(frames)
    if distribution.zenoh_pool_in_config:
        pool = f"transport/shared_memory/transport_optimization/pool_size={size}"
        return {"ZENOH_CONFIG_OVERRIDE": f"{enabled};{pool}"}
    return {"ZENOH_CONFIG_OVERRIDE": enabled, "ZENOH_SHM_ALLOC_SIZE": str(size)}
