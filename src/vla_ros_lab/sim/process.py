"""Runs the policy node in a separate process."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vla_ros.errors import VlaRosError
from vla_ros.graph.launcher import launched

_PORT_BASE, _DOMAIN_GAIN = 7400, 250  # DDSI-RTPS 2.5, 9.6.2.4: discovery ports of a domain
_OFFSETS = (0, 1, 10, 11, 12, 13)  # multicast discovery, and unicast ports of the first participants
_DOMAINS = range(1, 101)  # their ports are below Linux's ephemeral ports


def free_domain() -> int:
    """Return a ROS domain from 1 to 100 without participants on this host."""
    for domain in random.SystemRandom().sample(_DOMAINS, len(_DOMAINS)):
        if all(_is_free(_PORT_BASE + _DOMAIN_GAIN * domain + offset) for offset in _OFFSETS):
            return domain
    raise VlaRosError("no DDS domain from 1 to 100 is free on this host; set ROS_DOMAIN_ID")


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


class PolicyProcess:
    """``vla-ros run`` in a separate process.

    On exit, the process writes latency and frame counters to the file ``stats``; its output goes to ``log``.
    """

    def __init__(self, config: Sequence[Path], assignments: Sequence[str], stats: Path, log: Path) -> None:
        command = [sys.executable, "-m", "vla_ros.cli", "run", "--stats", str(stats)]
        for path in config:
            command += ["--config", str(path)]
        for assignment in assignments:
            command += ["-p", assignment]
        self._stats, self._log = stats, log
        with log.open("wb") as output:
            # A new session, so that Ctrl-C reaches only this process, which then interrupts the policy node.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **launched()},
                start_new_session=True,
            )

    def alive(self) -> bool:
        return self._process.poll() is None

    def end(self, patience: float = 20.0) -> int:
        """Interrupt the process, wait, and kill it after ``patience`` seconds; return its exit status."""
        if self.alive():
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(patience)
            except subprocess.TimeoutExpired:
                self._process.kill()
        return self._process.wait()

    def stats(self) -> dict[str, Any]:
        """Return the latency and frame counters that the node wrote on exit; empty if it was killed."""
        try:
            return dict(json.loads(self._stats.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return {}

    def last_lines(self) -> str:
        return "\n".join(self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-30:])
