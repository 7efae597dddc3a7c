"""Middleware profiles: RMW, files, environment variables and daemon for the number and size of camera frames."""

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vla_ros.config.tree import Config
from vla_ros.errors import ConfigError


@dataclass(frozen=True)
class Distribution:
    """The middlewares' versions in one ROS 2 distribution, as far as their profiles depend on them."""

    name: str  # as in ``ROS_DISTRO``
    cyclone: str  # version of Cyclone DDS: "0.10" with ``<SharedMemory>``, or "11" with ``<PubSubMessageExchange>``
    fastdds_variable: str  # environment variable with the path of the Fast DDS profile; Fast DDS 3 renamed it
    # True if zenoh's configuration sets its shared-memory size (1.7 and later), False if ``ZENOH_SHM_ALLOC_SIZE``
    # does.
    zenoh_pool_in_config: bool


_TEMPLATES = Path(__file__).parent / "templates"

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
    def of(cls, config: Config) -> "FrameLoad":
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
    return (
        _TEMPLATES.joinpath("fastdds.xml")
        .read_text(encoding="utf-8")
        .format(
            frames=frames,
            in_flight=IN_FLIGHT,
            segment=segment,
            pieces=pieces,
            datagram=UDP_DATAGRAM,
            queue=queue,
            message=frames.message_bytes,
            buffer=receive_buffer_bytes(frames),
        )
    )


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
    more = ""
    if distribution.cyclone == "11":
        more = """
    <Compatibility>
      <!-- The type of a service lacks its header in Lyrical; the embedded participant's has it. -->
      <IgnoreTypeInformation>1.16</IgnoreTypeInformation>
    </Compatibility>"""
    elif iceoryx:
        more = """
    <SharedMemory>
      <Enable>true</Enable>
      <LogLevel>warn</LogLevel>
    </SharedMemory>"""
    if iceoryx and distribution.cyclone == "11":
        interfaces.append('<PubSubMessageExchange type="iox" library="psmx_iox" config="LOG_LEVEL=WARN;"/>')
    return (
        _TEMPLATES.joinpath("cyclonedds.xml")
        .read_text(encoding="utf-8")
        .format(
            frames=frames,
            version=distribution.cyclone,
            name="iceoryx" if iceoryx else "cyclonedds",
            interfaces="\n        ".join(interfaces),
            more=more,
            buffer=receive_buffer_bytes(frames),
            high=round_up(2 * frames.message_bytes, 1024) // 1024,
        )
    )


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


RMW_OF = {
    "fastdds": "rmw_fastrtps_cpp",
    "cyclonedds": "rmw_cyclonedds_cpp",
    "iceoryx": "rmw_cyclonedds_cpp",
    "zenoh": "rmw_zenoh_cpp",
}
"""``RMW_IMPLEMENTATION`` of each profile that sets one."""

NAMES = ("default", *RMW_OF)

_FOLDER = "{folder}"
"""Placeholder for the folder of the files."""


@dataclass(frozen=True)
class Profile:
    """A middleware configured for given frames."""

    name: str  # one of :data:`NAMES`
    rmw: str  # value of ``RMW_IMPLEMENTATION``, or "" to keep the user's choice
    frames: FrameLoad
    distribution: Distribution
    files: Mapping[str, str]  # file name to text
    variables: Mapping[str, str]  # environment variables, with :data:`_FOLDER` for the folder of the files
    daemon: tuple[str, ...]  # command of the daemon, one per host, with :data:`_FOLDER`; empty if none is needed

    def environment(self, folder: Path) -> dict[str, str]:
        own = {name: value.replace(_FOLDER, str(folder.resolve())) for name, value in self.variables.items()}
        return {"RMW_IMPLEMENTATION": self.rmw, **own} if self.rmw else own

    def command(self, folder: Path) -> list[str]:
        return [part.replace(_FOLDER, str(folder.resolve())) for part in self.daemon]

    def shell(self, folder: Path) -> str:
        """Return the text to ``source`` in the camera driver's shell (bash, zsh, sh)."""
        lines = [f"# {self.name} on ROS 2 {self.distribution.name} for {self.frames}: source this file."]
        stale = sorted({*ALL_VARIABLES} - set(self.environment(folder)))
        if self.rmw:  # variables of another profile would still take effect
            lines.append("unset " + " ".join(stale))
        lines += [f"export {name}={shlex.quote(value)}" for name, value in self.environment(folder).items()]
        if self.daemon:
            lines.append(f"# once per host: {shlex.join(self.command(folder))}")
        return "\n".join(lines) + "\n"


ALL_VARIABLES = (
    "FASTRTPS_DEFAULT_PROFILES_FILE",
    "FASTDDS_DEFAULT_PROFILES_FILE",
    "CYCLONEDDS_URI",
    "ZENOH_CONFIG_OVERRIDE",
    "ZENOH_SHM_ALLOC_SIZE",
)
"""All variables that a profile may set besides ``RMW_IMPLEMENTATION``."""


def select_profile(name: str, frames: FrameLoad, distribution: Distribution, interface: str = "") -> Profile:
    """Generate the profile called ``name``, one of :data:`NAMES`; ``default`` sets nothing.

    ``interface`` is Cyclone DDS's network interface: "" lets it choose, ``lo`` keeps everything on this host.
    """
    if name not in NAMES:
        raise ConfigError(f"middleware: found '{name}', expected one of {', '.join(NAMES)}")
    files: dict[str, str] = {}
    variables: dict[str, str] = {}
    daemon: tuple[str, ...] = ()
    if name == "fastdds":
        files["fastdds.xml"] = fastdds_xml(frames)
        variables[distribution.fastdds_variable] = f"{_FOLDER}/fastdds.xml"
    elif name in ("cyclonedds", "iceoryx"):
        shared = name == "iceoryx"
        file = f"{name}_{distribution.cyclone}.xml"
        files[file] = cyclone_xml(frames, distribution, iceoryx=shared, interface=interface)
        variables["CYCLONEDDS_URI"] = f"file://{_FOLDER}/{file}"
        if shared:
            files["roudi.toml"] = roudi_toml(frames)
            # With monitoring, RouDi also removes slow processes; an armed node then aborts without a hold.
            daemon = ("iox-roudi", "-m", "off", "-c", f"{_FOLDER}/roudi.toml")
    elif name == "zenoh":
        variables = zenoh_override(frames, distribution)
        daemon = ("ros2", "run", "rmw_zenoh_cpp", "rmw_zenohd")
    return Profile(name, RMW_OF.get(name, ""), frames, distribution, files, variables, daemon)


def default_folder(profile: Profile, environment: Mapping[str, str] | None = None) -> Path:
    """Return the folder of a profile's files below ``ROS_HOME`` (``~/.ros``), one for each frame size."""
    variables = os.environ if environment is None else environment
    home = Path(variables.get("ROS_HOME", "") or Path.home() / ".ros")
    frames = profile.frames
    size = f"{frames.width}x{frames.height}x{frames.cameras}"
    return home / "vla_ros" / "middleware" / profile.distribution.name / size


def write_profile(profile: Profile, folder: Path) -> Path:
    """Write the files to ``folder``; return the path of the file to ``source``."""
    source = folder / f"{profile.name}.sh"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in (*profile.files.items(), (source.name, profile.shell(folder))):
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder}: cannot write the middleware profile ({error.strerror})") from None
    return source
