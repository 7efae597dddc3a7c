"""Runs ``vla-ros`` in a process of its own, on a graph of its own."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from vla_ros.errors import VlaRosError
from vla_ros.graph.launcher import launched

_PORT_BASE, _DOMAIN_GAIN = 7400, 250  # DDSI-RTPS 2.5, 9.6.2.4: discovery ports of a domain
_OFFSETS = (0, 1, 10, 11, 12, 13)  # multicast discovery, and unicast ports of the first participants


def free_domain(domains: Sequence[int] = range(1, 101)) -> int:
    """Return one of ``domains`` without participants on this host; up to 100, no port is an ephemeral one."""
    for domain in random.SystemRandom().sample(domains, len(domains)):
        if all(_is_free(_PORT_BASE + _DOMAIN_GAIN * domain + offset) for offset in _OFFSETS):
            return domain
    raise VlaRosError(f"no DDS domain from {min(domains)} to {max(domains)} is free here; set ROS_DOMAIN_ID")


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def private_graph(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that isolate the demo (a free domain, on this host only), except those already set."""
    chosen: dict[str, str] = {}
    if not environment.get("ROS_DOMAIN_ID"):
        chosen["ROS_DOMAIN_ID"] = str(free_domain())
    reach = environment.get("ROS_AUTOMATIC_DISCOVERY_RANGE") or "LOCALHOST"
    if reach == "LOCALHOST" and not environment.get("ROS_LOCALHOST_ONLY"):
        chosen["ROS_AUTOMATIC_DISCOVERY_RANGE"] = reach
        if environment.get("ROS_DISTRO") == "humble":  # which knows only the older variable
            chosen["ROS_LOCALHOST_ONLY"] = "1"
    return chosen


class CommandProcess:
    """A ``vla-ros`` command in a process of its own; its output goes to the file ``log``."""

    def __init__(self, words: Sequence[str], log: Path) -> None:
        self._log = log
        with log.open("wb") as output:
            # A new session, so that Ctrl-C reaches only this process, which then interrupts the other one.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vla_ros.cli", *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **launched()},
                start_new_session=True,
            )

    def alive(self) -> bool:
        return self._process.poll() is None

    def wait(self, seconds: float) -> None:
        """Wait until the process has ended, for at most ``seconds``."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def end(self, patience: float = 20.0) -> int:
        """Interrupt the process, wait, and kill it after ``patience`` seconds; return its exit status."""
        if self.alive():
            self._process.send_signal(signal.SIGINT)
            self.wait(patience)
            self._process.kill()
        return self._process.wait()

    def last_lines(self, count: int = 30) -> str:
        return "\n".join(self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-count:])
