"""Processes, domains and messages for the graph tests."""

import base64
import importlib.util
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from tools.forks import Fork, script

HERE = Path(__file__).parent
CDR = HERE.parent / "data" / "cdr" / "cdr.json"
PATIENCE = 20.0
"""Seconds after which an event that should have come counts as missing; a loaded machine is slow to discover."""


def rclpy_missing() -> str:
    """Why rclpy cannot be used here; empty when it can."""
    if importlib.util.find_spec("rclpy") is None:
        return "rclpy is not on the Python path: no ROS 2 installation is sourced"
    try:
        import rclpy  # noqa: F401
    except ImportError as error:
        return f"rclpy does not import: {error}"
    return ""


def dds_missing() -> str:
    """Why the embedded participant cannot be used here; empty when it can."""
    missing = [name for name in ("cyclonedds", "rosbags") if importlib.util.find_spec(name) is None]
    return f"{' and '.join(missing)} not installed (extra 'dds')" if missing else ""


def piped(command: list[str], env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env={**os.environ, **(env or {})}, **pipes)


class Process:
    """A child that answers JSON lines, with bounded waiting."""

    def __init__(self, process: subprocess.Popen[str] | Fork) -> None:
        self.process = process
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)

    def answer(self, timeout: float = PATIENCE) -> Any:
        try:
            return json.loads(self._lines.get(timeout=timeout))
        except queue.Empty:
            raise AssertionError(f"no answer in {timeout} s; exit status {self.process.poll()}") from None

    def ask(self, op: str, **arguments: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
        self.process.stdin.flush()
        answer = self.answer()
        assert not (isinstance(answer, dict) and "error" in answer), answer
        return answer

    def close(self) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            status = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        self._reader.join(PATIENCE)
        self.process.stdout.close()
        return status


@pytest.fixture(scope="session", autouse=True)
def domain() -> Iterator[int]:
    """A DDS domain of this test run, on this host only."""
    number = 50 + os.getpid() % 51
    names = (
        "ROS_DOMAIN_ID",
        "ROS_LOCALHOST_ONLY",
        "ROS_AUTOMATIC_DISCOVERY_RANGE",
        "CYCLONEDDS_URI",
        "ROS_STATIC_PEERS",
    )
    before = {name: os.environ.pop(name, None) for name in names}
    os.environ["ROS_DOMAIN_ID"] = str(number)
    os.environ["ROS_AUTOMATIC_DISCOVERY_RANGE"] = "LOCALHOST"
    if os.environ.get("ROS_DISTRO") == "humble":  # which does not know the range
        os.environ["ROS_LOCALHOST_ONLY"] = "1"
    if rclpy_missing() or os.environ.get("RMW_IMPLEMENTATION") == "rmw_cyclonedds_cpp":
        # Another run on the same host may have the same domain: a tag, which Cyclone alone knows, keeps them apart.
        tag = f"<Tag>vla_ros_graph_{os.getpid()}</Tag>"
        uri = f"<CycloneDDS><Domain><Discovery>{tag}</Discovery></Domain></CycloneDDS>"
        os.environ["CYCLONEDDS_URI"] = uri
    yield number
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@pytest.fixture(params=["dds", "rclpy"])
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend that is present."""
    reason = dds_missing() if request.param == "dds" else rclpy_missing()
    if reason:
        pytest.skip(reason)
    return str(request.param)


@pytest.fixture
def open_here(backend: str) -> Iterator[Callable[..., Any]]:
    from vla_ros.graph import open_graph

    with ExitStack() as opened:
        yield lambda *args: opened.enter_context(open_graph(backend, args))


@pytest.fixture
def graph(open_here: Callable[..., Any]) -> Any:
    return open_here()


@pytest.fixture
def start_peer(backend: str) -> Iterator[Callable[..., Process]]:
    with ExitStack() as started:

        def make(*args: str) -> Process:
            process = Fork(script, [str(HERE / "peer.py"), backend, *args], None, 2)
            peer = started.enter_context(closing(Process(process)))
            assert peer.answer(60.0) == "ready"
            return peer

        yield make


@pytest.fixture
def peer(start_peer: Callable[..., Process]) -> Process:
    return start_peer()


@pytest.fixture
def plain(domain: int) -> Iterator[Callable[..., Process]]:
    """Starts processes that use nothing but the cyclonedds library."""
    if dds_missing():
        pytest.skip(dds_missing())
    command = [sys.executable, str(HERE / "plain_cyclone.py"), str(domain)]
    with ExitStack() as started:
        yield lambda *args: started.enter_context(closing(Process(piped([*command, *args]))))


@pytest.fixture
def spin_until() -> Callable[..., None]:
    """Spins a graph until something holds; fails when it does not hold in time."""

    def spin(graph: Any, condition: Callable[[], bool], timeout: float = PATIENCE) -> None:
        end = time.monotonic() + timeout
        graph.spin(lambda: bool(condition()) or time.monotonic() > end, period=0.05)
        assert condition(), f"did not happen in {timeout} s"

    return spin


@pytest.fixture
def wait_until() -> Callable[..., None]:
    """Waits without spinning until something holds; fails when it does not hold in time."""

    def wait(condition: Callable[[], bool], timeout: float = PATIENCE) -> None:
        end = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < end, f"did not happen in {timeout} s"
            time.sleep(0.02)

    return wait


@pytest.fixture(scope="session")
def golden() -> dict[str, dict[str, Any]]:
    """Type -> fields, hash and CDR as rclpy wrote them."""
    return {
        name: {**entry, "cdr": base64.b64decode(entry["cdr_base64"])}
        for name, entry in json.loads(CDR.read_text()).items()
    }


@pytest.fixture
def conftest_reasons() -> tuple[str, str]:
    """Why rclpy, and why DDS, cannot be used; empty if they can."""
    return rclpy_missing(), dds_missing()
