"""The console as its user starts it, beside the robot and the node of test/node, and a browser if there is one."""

from __future__ import annotations

import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="the library uvicorn is not installed (extra 'console')")
pytest.importorskip("starlette", reason="the library starlette is not installed (extra 'console')")
pytest.importorskip("websockets", reason="the library websockets is not installed (extra 'console')")

from websockets.sync.client import ClientConnection, connect

from tools.chromium import CHROMIUM, Browser, wait
from tools.forks import Fork, vla_ros

from ..node.conftest import Robot, inside, robot, start

__all__ = ["inside", "robot", "start"]

_FOLLOWS, _SAGS = 0.4, 0.004  # share of the way that the arm goes in a period; rad below its command


class Console:
    """The command ``vla-ros console`` in a process of its own."""

    def __init__(self, log: Path, *words: str) -> None:
        self.log = log
        given = ["console", "--port", "0", "--backend", "dds", *words]
        self.process = Fork(vla_ros, given, log)
        try:
            wait(lambda: "token=" in self.text or self.process.poll() is not None, 60.0, lambda: self.text)
        except AssertionError:
            self.process.kill()
            raise
        found = re.search(r"(https?://([\w.]+:\d+)/)\?token=(\S+)", self.text)
        assert found, self.text
        self.base, self.host, self.token = found[1], found[2], found[3]
        self.url = found[0]

    @property
    def text(self) -> str:
        return self.log.read_text()

    def connect(self, origin: str | None = "", token: str = "", name: str = "") -> ClientConnection:
        """Connect as a page of this server; other arguments make it a foreign one, ``name`` one rebound to it."""
        host, _, port = self.host.rpartition(":")
        at = f"{name or host}:{port}"
        given: Any = f"http://{at}" if origin == "" else origin
        raw, address = (
            socket.create_connection((host, int(port)), 10),
            f"ws://{at}/live?token={token or self.token}",
        )
        return connect(address, sock=raw, origin=given, compression=None, proxy=None)

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(15)
        finally:
            self.process.kill()
            self.process.wait(15)


@pytest.fixture
def console(robot: Robot, tmp_path: Path) -> Iterator[Callable[..., Console]]:
    """Start a console on the robot's domain."""
    started: list[Console] = []

    def begin(*words: str) -> Console:
        started.append(Console(tmp_path / f"console{len(started)}.txt", *words))
        return started[-1]

    yield begin
    for each in started:
        each.end()


class Arm:
    """A thread in which the robot's arm follows its commands, late and sagging, and its camera sends frames."""

    def __init__(self, robot: Robot) -> None:
        self.robot, self.sees, self.reports = robot, True, True
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        robot = self.robot
        while not self._ended.wait(1 / 30):
            if robot.commands:
                wanted = robot.command_positions().tolist()
                sagged = [each - (_SAGS if index == 1 else 0.0) for index, each in enumerate(wanted)]
                pairs = zip(robot.positions, sagged, strict=True)
                robot.positions = [is_now + _FOLLOWS * (goes - is_now) for is_now, goes in pairs]
            if self.sees:
                robot.send_frame(joints=self.reports)
            elif self.reports:
                robot.send_joints()

    def end(self) -> None:
        self._ended.set()
        self._thread.join(10)


@pytest.fixture
def arm(robot: Robot) -> Iterator[Arm]:
    arm = Arm(robot)
    yield arm
    arm.end()


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One process for all tests: its start takes longer than most of them."""
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    browser = Browser(tmp_path_factory.mktemp("chromium") / "profile")
    yield browser
    browser.close()


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    yield chromium
    chromium.close_pages()


def said(node: Any) -> str:
    return str(node.safety.state.value)
