"""Daemons that some middlewares need, one per host: RouDi for iceoryx, the router for zenoh."""

import itertools
import re
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from vla_ros.errors import VlaRosError

ROUDI_SOCKET = Path("/tmp/roudi")
"""Socket of RouDi 2.0 for registrations."""

ROUDI_MEMORY = Path("/dev/shm/iceoryx_mgmt")
"""Shared memory that RouDi 2.0 creates at each start and that every iceoryx process maps."""

ROUDI_WAIT = 60.0
"""Seconds to wait for RouDi if it is not running."""

ROUDI_MISSING = (
    "none runs on this host and CYCLONEDDS_URI asks for iceoryx; start it: iox-roudi -m off -c roudi.toml"
)

ROUDI_GONE = (
    "RouDi has ended or was restarted: no new process can reach this one, not even to stop "
    "it. Stop all processes that use iceoryx, start RouDi, then start them again"
)

ZENOH_ROUTER = ("127.0.0.1", 7447)


def roudi_is_up() -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(str(ROUDI_SOCKET))
        except OSError:  # no such file, or left behind by a killed RouDi
            return False
    return True


def wait_for_roudi(
    ended: Callable[[], bool], say: Callable[[str], object], clock: Callable[[], float] = time.monotonic
) -> bool:
    """Wait until RouDi is up; iceoryx would wait as well, but cannot be interrupted.

    ``ended`` is called ten times a second; if it returns True, the wait ends with False. ``say`` is called with the
    reason for waiting. Raises VlaRosError after :data:`ROUDI_WAIT`.
    """
    deadline = None
    while not roudi_is_up():
        if ended():
            return False
        if deadline is None:
            deadline = clock() + ROUDI_WAIT
            say(f"waiting for RouDi: {ROUDI_MISSING} (waiting {ROUDI_WAIT:g} s)")
        if clock() > deadline:
            raise VlaRosError(f"waited {ROUDI_WAIT:g} s for RouDi: {ROUDI_MISSING}")
        time.sleep(0.1)
    return True


class RoudiWatch:
    """Detects that the RouDi of this process has ended, even if a new RouDi has replaced it."""

    def __init__(
        self,
        is_up: Callable[[], bool] = roudi_is_up,
        memory: Path = ROUDI_MEMORY,
        maps: Path = Path("/proc/self/maps"),
    ) -> None:
        self._is_up = is_up
        self._memory = memory
        lines = [line.split() for line in maps.read_text().splitlines() if str(memory) in line]
        self._mapped = int(lines[0][4]) if lines else None  # address, permissions, offset, device, inode
        self._gone = False

    def check(self) -> str:
        """Return the problem, or "". A problem is permanent: a new RouDi does not know this process."""
        self._gone = self._gone or not self._is_up() or self._replaced()
        return ROUDI_GONE if self._gone else ""

    def _replaced(self) -> bool:
        if self._mapped is None:
            return False
        try:
            return self._memory.stat().st_ino != self._mapped
        except OSError:
            return True


def roudi_pools(processes: Path = Path("/proc")) -> list[int] | None:
    """Return the chunk sizes of the running RouDi in bytes, from the file on its command line; None if unknown."""
    for command in sorted(processes.glob("[0-9]*/cmdline")):
        try:
            arguments = command.read_text(encoding="utf-8").split("\0")
        except (OSError, UnicodeDecodeError):  # the process has ended
            continue
        if Path(arguments[0]).name != "iox-roudi":
            continue
        for flag, value in itertools.pairwise(arguments):
            if flag in ("-c", "--config-file"):
                return _toml_sizes(command.parent / "cwd" / value)
    return None


def _toml_sizes(path: Path) -> list[int] | None:
    try:
        return [int(size) for size in re.findall(r"^\s*size\s*=\s*(\d+)", path.read_text(), re.MULTILINE)] or None
    except OSError:
        return None


def zenoh_router_is_up() -> bool:
    try:
        with socket.create_connection(ZENOH_ROUTER, timeout=0.5):
            return True
    except OSError:
        return False


def start_detached(command: Sequence[str], log: Path) -> int:
    """Start a daemon in its own session and return its process id.

    An interrupted RouDi ends every process that uses it, including the camera driver, so it must not receive
    the Ctrl-C of the launch that started it.
    """
    with log.open("ab") as output:
        daemon = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    return daemon.pid
