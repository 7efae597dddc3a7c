"""Checks that a middleware profile is active, or reports what to install or set.

It only reads the environment, the files that it names and the state of the host; it starts and sends nothing.
"""

import os
import re
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from vla_ros.middleware.daemons import RoudiWatch, roudi_is_up, roudi_pools, zenoh_router_is_up
from vla_ros.middleware.profiles import (
    DEFAULT_RMW,
    RMW_OF,
    Distribution,
    FrameLoad,
    receive_buffer_bytes,
    segment_bytes,
)

STOCK_FAST_DDS = 160_000
"""Largest frames, in bytes, of which Fast DDS's stock 512 KiB segment holds three (measured with 224x224 rgb8)."""

STOCK_CYCLONE = 1_000_000
"""Largest frames, in bytes, that Cyclone's stock receive buffer carries (measured with 640x480 rgb8)."""

_STOCK = "stock settings, which hold frames of this size"

_SHARED_MEMORY_ON = re.compile(r"psmx_iox|<SharedMemory>\s*<Enable>\s*true")

RECEIVE_MAX = Path("/proc/sys/net/core/rmem_max")
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Problem:
    """A reason why a profile is not active, and the command or setting that fixes it."""

    found: str
    fix: str
    fatal: bool = False  # nothing can run until it is fixed


@dataclass(frozen=True)
class Report:
    """Result of :func:`check_profile`."""

    name: str  # the requested profile
    facts: tuple[str, ...]  # settings in force
    problems: tuple[Problem, ...]  # empty if the profile is active

    @property
    def fatal(self) -> bool:
        """True if nothing can run until a problem is fixed (the RMW or its daemon is not installed)."""
        return any(problem.fatal for problem in self.problems)

    @property
    def active(self) -> bool:
        return not self.problems

    @property
    def summary(self) -> str:
        if self.active:
            return "active: " + ", ".join(self.facts)
        listed = "; ".join(f"{problem.found} (to fix it: {problem.fix})" for problem in self.problems)
        return "NOT active: " + listed

    def __str__(self) -> str:
        return f"middleware {self.name}: {self.summary}"


def check_profile(
    name: str, frames: FrameLoad, distribution: Distribution, environment: Mapping[str, str] | None = None
) -> Report:
    """Compare the environment and the host with the needs of the profile ``name``.

    The profile ``default`` checks the settings in force. ``environment`` is the node's; None means this process's,
    with the RMW of its rclpy.
    """
    variables = os.environ if environment is None else environment
    rmw = _rmw(environment) or DEFAULT_RMW
    wanted = RMW_OF.get(name, rmw)
    if not _installed(wanted, variables):
        package = f"ros-{distribution.name}-{wanted.replace('_', '-')}"
        missing = Problem(f"{wanted} is not installed", f"sudo apt-get install {package}", fatal=True)
        return Report(name, (), (missing,))
    if rmw != wanted:
        return Report(name, (), (Problem(f"RMW_IMPLEMENTATION is {rmw}, not {wanted}", _use(name)),))
    by_rmw = {RMW_OF["fastdds"]: _fast_dds, RMW_OF["cyclonedds"]: _cyclone, RMW_OF["zenoh"]: _zenoh}
    check = _iceoryx if name == "iceoryx" else by_rmw.get(rmw, _unknown)
    findings = [f"{rmw} for {frames}", *check(frames, distribution, variables)]
    facts = tuple(finding for finding in findings if not isinstance(finding, Problem))
    return Report(name, facts, tuple(finding for finding in findings if isinstance(finding, Problem)))


def _rmw(environment: Mapping[str, str] | None) -> str:
    """Return the RMW of this process's rclpy, or ``RMW_IMPLEMENTATION`` of ``environment``; "" if unknown."""
    named = (os.environ if environment is None else environment).get("RMW_IMPLEMENTATION", "")
    # rclpy uses the RMW that is set, or ends the process if that RMW is not installed.
    if environment is not None or (named and "rclpy" not in sys.modules):
        return named
    try:
        import rclpy
    except ImportError:
        return ""
    return str(rclpy.get_rmw_implementation_identifier())


def uses_iceoryx(environment: Mapping[str, str] | None = None) -> bool:
    """Return True if a process in this environment depends on RouDi, at start and while it runs."""
    variables = os.environ if environment is None else environment
    if _rmw(environment) != RMW_OF["iceoryx"]:
        return False
    text = _cyclone_text(variables)
    return not isinstance(text, Problem) and bool(_SHARED_MEMORY_ON.search(text))


def middleware_watch(backend: str) -> Callable[[], str]:
    """Return a function that reports why new processes can no longer reach this one, or "" while they can.

    ``backend`` is the graph's; only ``rclpy`` may use iceoryx.
    """
    return RoudiWatch().check if backend == "rclpy" and uses_iceoryx() else str


Findings = Iterator["str | Problem"]


def _installed(rmw: str, variables: Mapping[str, str]) -> bool:
    return any(
        (Path(prefix) / "share/ament_index/resource_index/rmw_typesupport" / rmw).exists()
        for prefix in variables.get("AMENT_PREFIX_PATH", "").split(os.pathsep)
        if prefix
    )


def _use(name: str) -> str:
    shell = f"vla-ros middleware {name} --write FOLDER && . FOLDER/{name}.sh"
    return f"middleware:={name} for a launch file, {shell} in a shell"


def _unknown(frames: FrameLoad, distribution: Distribution, variables: Mapping[str, str]) -> Findings:
    yield "its settings are not known"


def _fast_dds(frames: FrameLoad, distribution: Distribution, variables: Mapping[str, str]) -> Findings:
    variable = distribution.fastdds_variable
    path = variables.get(variable, "")
    if not path and frames.message_bytes * frames.cameras <= STOCK_FAST_DDS:
        yield _STOCK
        return
    if not path:
        yield Problem(
            f"{variable} is not set: the stock 512 KiB segment loses frames of {frames.image_bytes:,} B",
            _use("fastdds"),
        )
        return
    sizes = _segment_sizes(Path(path))
    if isinstance(sizes, Problem):
        yield sizes
        return
    needed = 2 * frames.message_bytes * frames.cameras
    if not sizes or max(sizes) < needed:
        found = f"a segment of {max(sizes):,} B" if sizes else "no shared-memory transport with its own segment"
        yield Problem(
            f"{path} has {found}; two frames of each camera are {needed:,} B",
            f"vla-ros middleware fastdds --width {frames.width} --height {frames.height} "
            f"--cameras {frames.cameras} --write FOLDER",
        )
    else:
        yield f"shared-memory segment of {max(sizes) / 1e6:.0f} MB"
    yield from _shared_memory(segment_bytes(frames))


def _segment_sizes(path: Path) -> list[int] | Problem:
    try:
        root = ElementTree.parse(path).getroot()
    except (OSError, ElementTree.ParseError) as error:
        return Problem(f"{path}: cannot be read ({error})", _use("fastdds"))
    texts = ((element.tag, (element.text or "").strip()) for element in root.iter())
    return [int(text) for tag, text in texts if tag.rpartition("}")[2] == "segment_size" and text.isdigit()]


def _shared_memory(needed: int) -> Findings:
    if not SHARED_MEMORY.exists():
        yield Problem("/dev/shm does not exist", "mount -t tmpfs tmpfs /dev/shm")
        return
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free < needed:
        size = max(1, -(-2 * needed // 1024**3))
        yield Problem(
            f"/dev/shm has {free / 1e6:.0f} MB free, {needed / 1e6:.0f} MB are needed",
            f"docker run --shm-size={size}g, or sudo mount -o remount,size={size}g /dev/shm",
        )


def _cyclone(frames: FrameLoad, distribution: Distribution, variables: Mapping[str, str]) -> Findings:
    text = _cyclone_text(variables)
    if not variables.get("CYCLONEDDS_URI") and frames.message_bytes * frames.cameras <= STOCK_CYCLONE:
        yield _STOCK
        return
    if isinstance(text, Problem):
        yield text
        return
    if _SHARED_MEMORY_ON.search(text):
        yield from _iceoryx(frames, distribution, variables)
        return
    if "SocketReceiveBufferSize" in text:
        yield f"requested receive buffers of {receive_buffer_bytes(frames) / 1e6:.0f} MB"
    else:
        yield Problem("CYCLONEDDS_URI requests no receive buffer: large frames are lost", _use("cyclonedds"))
    yield from receive_buffer(frames)


def _cyclone_text(variables: Mapping[str, str]) -> str | Problem:
    uri = variables.get("CYCLONEDDS_URI", "").strip()
    if not uri:
        return Problem("CYCLONEDDS_URI is not set: the stock settings lose large frames", _use("cyclonedds"))
    if uri.startswith("<"):
        return uri
    text = ""
    for part in uri.split(","):
        path = Path(part.strip().removeprefix("file://"))
        try:
            text += path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            return Problem(f"CYCLONEDDS_URI: {path} cannot be read ({error})", _use("cyclonedds"))
    return text


def receive_buffer(frames: FrameLoad) -> Findings:
    """Check whether the kernel's receive buffer holds the frames, as needed over UDP."""
    try:
        limit = int(RECEIVE_MAX.read_text())
    except (OSError, ValueError):  # not readable in some containers
        yield "net.core.rmem_max could not be read"
        return
    # The kernel doubles the granted size, and half a frame of each camera was measured to be enough.
    if limit < frames.message_bytes * frames.cameras // 2:
        yield Problem(
            f"net.core.rmem_max is {limit:,} B: frames of {frames.image_bytes:,} B are lost over UDP",
            f"sudo sysctl -w net.core.rmem_max={receive_buffer_bytes(frames)}",
        )
    else:
        yield f"net.core.rmem_max {limit:,} B"


def _iceoryx(frames: FrameLoad, distribution: Distribution, variables: Mapping[str, str]) -> Findings:
    if distribution.cyclone == "11":
        cut = "cuts 4 bytes off images and joint states over iceoryx (ros2/rmw_cyclonedds issue 585, version 4.1.5)"
        yield Problem(f"rmw_cyclonedds_cpp of {distribution.name} {cut}", _use("cyclonedds"), fatal=True)
        return
    text = _cyclone_text(variables)
    if isinstance(text, Problem):
        yield Problem(text.found, _use("iceoryx"))
    elif not _SHARED_MEMORY_ON.search(text):
        yield Problem("CYCLONEDDS_URI does not enable shared memory", _use("iceoryx"))
    if roudi_is_up():
        yield from _pools(frames)
    elif shutil.which("iox-roudi", path=variables.get("PATH")) is None:
        package = f"ros-{distribution.name}-iceoryx-posh"
        yield Problem("iox-roudi is not installed", f"sudo apt-get install {package}", fatal=True)
    else:
        yield Problem("RouDi is not running: every process waits for it", "iox-roudi -m off -c roudi.toml")


def _pools(frames: FrameLoad) -> Findings:
    pools = roudi_pools()
    if pools is None:
        yield "RouDi is up (its pools are not known, as it has no readable -c file)"
    elif max(pools) < frames.message_bytes:
        yield Problem(
            f"RouDi's largest chunks are {max(pools):,} B and a frame needs {frames.message_bytes:,} B",
            "stop that RouDi and let middleware:=iceoryx start one",
        )
    else:
        yield f"RouDi is up with chunks up to {max(pools):,} B"


def _zenoh(frames: FrameLoad, distribution: Distribution, variables: Mapping[str, str]) -> Findings:
    if "shared_memory/enabled=true" in variables.get("ZENOH_CONFIG_OVERRIDE", ""):
        yield "shared memory enabled"
    else:
        yield Problem("ZENOH_CONFIG_OVERRIDE does not enable shared memory", _use("zenoh"))
    yield from _shared_memory(segment_bytes(frames))
    if zenoh_router_is_up():
        yield "a router answers on port 7447"
    else:
        yield Problem("no zenoh router answers on 127.0.0.1:7447", "ros2 run rmw_zenoh_cpp rmw_zenohd")
