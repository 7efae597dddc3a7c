"""The processes that some middlewares need once per host: are they up, and what do they hold?"""

from __future__ import annotations

import itertools
import re
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROUDI_SOCKET = Path("/tmp/roudi")
"""Where RouDi 2.0 listens for processes that want to join."""

ROUDI_MISSING = "none runs on this host and CYCLONEDDS_URI asks for iceoryx; start it: iox-roudi -c roudi.toml"

ROUDI_GONE = (
    "RouDi has ended: what is connected goes on, nothing new can join. End every process that uses iceoryx, start "
    "RouDi and then the others again"
)

ZENOH_ROUTER = ("127.0.0.1", 7447)


def roudi_is_up() -> bool:
    """Whether a RouDi takes registrations: its socket exists and somebody listens on it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(str(ROUDI_SOCKET))
        except OSError:  # no such file, or left behind by one that was killed
            return False
    return True


def wait_for_roudi(ended: Callable[[], bool], say: Callable[[str], object]) -> bool:
    """Wait until RouDi is up; iceoryx itself would wait as well, but no signal ends that.

    Args:
        ended: Asked ten times a second; true ends the waiting.
        say: Told once what is being waited for.

    Returns:
        False where ``ended()`` was true first.
    """
    said = False
    while not roudi_is_up():
        if ended():
            return False
        if not said:
            said = True
            say(f"waiting for RouDi: {ROUDI_MISSING}")
        time.sleep(0.1)
    return True


class RoudiWatch:
    """Notices that the RouDi which this process joined has ended.

    Args:
        is_up: Whether a RouDi takes registrations.
    """

    def __init__(self, is_up: Callable[[], bool] = roudi_is_up) -> None:
        self._is_up = is_up
        self._gone = False

    def check(self) -> str:
        """What is wrong, or "". Once it has ended that stays so: a new RouDi does not know this process."""
        self._gone = self._gone or not self._is_up()
        return ROUDI_GONE if self._gone else ""


def roudi_pools(processes: Path = Path("/proc")) -> list[int] | None:
    """Chunk sizes of the running RouDi in bytes, from the file named on its command line; None if unknown."""
    for command in sorted(processes.glob("[0-9]*/cmdline")):
        try:
            words = command.read_text(encoding="utf-8").split("\0")
        except (OSError, UnicodeDecodeError):  # ended meanwhile
            continue
        if Path(words[0]).name != "iox-roudi":
            continue
        for flag, value in itertools.pairwise(words):
            if flag in ("-c", "--config-file"):
                return _toml_sizes(command.parent / "cwd" / value)
    return None


def _toml_sizes(path: Path) -> list[int] | None:
    try:
        return [int(size) for size in re.findall(r"^\s*size\s*=\s*(\d+)", path.read_text(), re.MULTILINE)] or None
    except OSError:
        return None


def zenoh_router_is_up() -> bool:
    """Whether somebody listens where rmw_zenoh looks for its router."""
    try:
        with socket.create_connection(ZENOH_ROUTER, timeout=0.5):
            return True
    except OSError:
        return False


def start_detached(command: Sequence[str], log: Path) -> int:
    """Start a daemon that outlives this process and its signals; returns its process id.

    RouDi ends every process that uses it when it is told to end, the camera driver too. So it must not get the
    Ctrl-C of the launch that happened to start it.
    """
    with log.open("ab") as output:
        daemon = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    return daemon.pid
