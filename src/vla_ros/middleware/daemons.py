"""Daemons of which some middlewares need one per host: RouDi for iceoryx, the router for zenoh."""

from __future__ import annotations

import itertools
import re
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROUDI_SOCKET = Path("/tmp/roudi")
"""Socket of RouDi 2.0 for registrations."""

ROUDI_MISSING = "none runs on this host and CYCLONEDDS_URI asks for iceoryx; start it: iox-roudi -c roudi.toml"

ROUDI_GONE = (
    "RouDi has ended: connected processes continue, new ones cannot join. Stop all processes that use iceoryx, "
    "start RouDi, then start them again"
)

ZENOH_ROUTER = ("127.0.0.1", 7447)


def roudi_is_up() -> bool:
    """Whether a process listens on RouDi's socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(str(ROUDI_SOCKET))
        except OSError:  # no such file, or left behind by a killed RouDi
            return False
    return True


def wait_for_roudi(ended: Callable[[], bool], say: Callable[[str], object]) -> bool:
    """Wait until RouDi is up; iceoryx itself waits, too, but cannot be interrupted.

    Args:
        ended: Called ten times a second; true ends the wait.
        say: Called once with what is being waited for.

    Returns:
        False if ``ended()`` was true first.
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
    """Detects that the RouDi of this process has ended."""

    def __init__(self, is_up: Callable[[], bool] = roudi_is_up) -> None:
        self._is_up = is_up
        self._gone = False

    def check(self) -> str:
        """The problem, or "". It is final, because a new RouDi does not know this process."""
        self._gone = self._gone or not self._is_up()
        return ROUDI_GONE if self._gone else ""


def roudi_pools(processes: Path = Path("/proc")) -> list[int] | None:
    """Chunk sizes of the running RouDi in bytes, from the file on its command line; None if unknown."""
    for command in sorted(processes.glob("[0-9]*/cmdline")):
        try:
            arguments = command.read_text(encoding="utf-8").split("\0")
        except (OSError, UnicodeDecodeError):  # it has ended
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
    """Whether a process listens on the port of zenoh's router."""
    try:
        with socket.create_connection(ZENOH_ROUTER, timeout=0.5):
            return True
    except OSError:
        return False


def start_detached(command: Sequence[str], log: Path) -> int:
    """Start a daemon in a session of its own; returns its process id.

    A RouDi that is interrupted ends every process that uses it, the camera driver included. So it must not get the
    Ctrl-C of the launch that started it.
    """
    with log.open("ab") as output:
        daemon = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    return daemon.pid
