"""Every wait of the thread that spins, with its bound: while it waits, no stop is heard.

The waits are found in the source of what that thread runs: loops that try again, and calls that may block. A wait
that is not listed, or a listed one that is gone, fails.
"""

import ast
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from live_loop import LiveLoop, every

import vla_ros
from vla_ros.control.safety import State
from vla_ros.errors import VlaRosError
from vla_ros.execution.claim import Claim
from vla_ros.graph.dds.discovery import _taken

PACKAGE = Path(vla_ros.__file__).parent
ROOMS = (
    "execution",
    "node",
    "person",
    "graph",
    "record/process.py",
    "telemetry",
    "control/safety.py",
    "control/mailbox.py",
    "control/inputs.py",
)
BLOCKING = {
    "join",
    "wait",
    "wait_for",
    "acquire",
    "result",
    "sleep",
    "select",
    "accept",
    "recv",
    "communicate",
    "spin_once",
    "shutdown",
    "poll",
    "work",
}
ELSEWHERE = "another thread, or a command that is no node"

WAITS = {
    # The spin itself: it waits for messages, and for the first timer.
    "graph/node.py::spin": "ends between two callbacks",
    "graph/dds/participant.py::wait": "the period of the spin, 0.05 s, and the next timer",
    "graph/dds/graph.py::_spin_once": "as Participant.wait",
    "graph/rclpy_backend.py::spin_once": "one callback, or the period of the spin",
    "node/lifecycle_main.py::_spin": "ends between two callbacks",
    # Callbacks.
    "execution/gate.py::open": "20 supervisions, then no command is sent",
    "node/lockstep.py::run_due": "100,000 iterations of the control loop, and the policy's own inference",
    "execution/claim.py::is_there": "does not block",
    "execution/claim.py::update": "64 connections, none of which is waited for",
    "node/policy_node.py::poll": "each subscription: as many messages as it keeps",
    "graph/rclpy_frames.py::poll": "100 messages",
    "node/observer.py::_append": "the frames that a policy looks back at",
    "graph/cdr.py::_elements": "the bytes of the message",
    "graph/dds/discovery.py::_taken": "32 times 256 samples; the rest waits for the next look",
    "execution/context.py::flush": "the kinds of log lines that wait",
    "control/safety.py::_deliver": "the events that listeners add",
    "node/guard_client.py::_read": "does not block",
    "node/guard_client.py::look": "the zeros that the guard has sent since the last look",
    "node/guard_client.py::reset": "0.2 s for the guard, which hears stops meanwhile",
    "graph/dds/action.py::_on_goal": "20 goals that are remembered",
    # At the start.
    "execution/claim.py::__init__": "0.2 s for each other node that claims the same",
    "execution/claim.py::wait_until_alone": "5 s, then an error",
    "graph/wiring.py::publisher_and_gid": "2 s, then an error",
    "node/guard_client.py::open": "60 s, then an error",
    # At the end.
    "node/guard_client.py::close": "1 s, then the guard is killed, and 1 s",
    "execution/gate.py::finish_holds": "timeouts.joint_state, at most 2 s",
    "node/control_loop.py::stop": "timeouts.inference + 1 s, then the inference is abandoned",
    "node/inference.py::close": "what is left of ControlLoop.stop",
    "node/beside.py::close": "5 s for each thread",
    "graph/wiring.py::close": "the endpoints of the node",
    "graph/rclpy_frames.py::close": "four buffers",
    "graph/rclpy_backend.py::destroy": "1 s for the results of goals that have ended",
    "graph/rclpy_backend.py::_leave": "the executor's own thread, which is this one",
    "record/process.py::close": "15 s for the thread, 15 s for the bag, 15 s for a killed process",
    "telemetry/frame_trace.py::close": "5 s for the queue, 5 s for the thread",
    "telemetry/metrics.py::close": "0.2 s to the next look of its thread, 5 s for the thread",
}
"""By function, the bound of its waits on the thread that spins."""

OTHERS = {
    "control/mailbox.py::take",
    "control/mailbox.py::wait",
    "node/beside.py::_run",
    "node/signals.py::_watch",
    "execution/camera_frames.py::wait",
    "node/scene.py::work",
    "node/control_loop.py::_run",
    "node/control_loop.py::_step",
    "node/control_loop.py::_wait",
    "execution/executor.py::_await_due",
    "node/inference.py::job",
    "node/inference.py::start",
    "node/inference.py::_run",
    "node/depth.py::_at",
    "node/observer.py::_image",
    "node/policy_node.py::reset",
    "graph/launcher.py::wait_for_end",
    "graph/launcher.py::_poll_for_end",
    "graph/dds/service.py::_release_held",
    "record/process.py::_run",
    "record/process.py::_watch",
    "graph/dds/participant.py::__init__",
    "graph/dds/action.py::on_answer",
    "graph/dds/action.py::on_end",
    "graph/dds/service.py::dispatch",
    "execution/gripper_goals.py::on_done",
    "execution/drivers.py::_on_answer",
    "node/receiver.py::joints",
    "node/trained.py::_largest",
}
"""Waits of other threads, and calls that only have the name of one."""


def functions(path: Path) -> Iterator[tuple[str, ast.AST]]:
    """Yield the name of the innermost function around each node."""

    def walk(node: ast.AST, name: str) -> Iterator[tuple[str, ast.AST]]:
        for child in ast.iter_child_nodes(node):
            inner = child.name if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) else name
            yield inner, child
            yield from walk(child, inner)

    yield from walk(ast.parse(path.read_text(encoding="utf-8")), "")


def waits(node: ast.AST) -> bool:
    if isinstance(node, ast.While) or (isinstance(node, ast.For) and ast.unparse(node.target) == "_"):
        return True
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in BLOCKING):
        return False
    of_text = node.func.attr == "join" and isinstance(node.func.value, (ast.Constant, ast.JoinedStr))
    return not of_text and ast.unparse(node.func.value) not in ("os.pathsep", "os.path", "shlex")


def found() -> set[str]:
    paths = [path for room in ROOMS for path in (sorted((PACKAGE / room).rglob("*.py")) or [PACKAGE / room])]
    return {
        f"{path.relative_to(PACKAGE).as_posix()}::{name}"
        for path in paths
        for name, node in functions(path)
        if waits(node)
    }


def test_every_wait_of_the_thread_that_spins_is_listed_with_its_bound() -> None:
    assert found() - WAITS.keys() - OTHERS == set(), "a wait without a bound, or one that is not listed"
    assert (WAITS.keys() | OTHERS) - found() == set(), "listed, and gone"
    assert not WAITS.keys() & OTHERS


def test_a_thread_that_is_always_late_sends_nothing_and_ends() -> None:
    live = LiveLoop(events=every(0.1, 3))
    live.gate.supervised = lambda: live.clock.sleep(0.001)
    entered = [0]

    def late() -> None:
        entered[0] += 1
        live.clock.sleep(0.06)

    live.gate.late = late
    with live.gate.open() as may_move:
        assert not may_move
    assert 1 < entered[0] <= 100


class Endless:
    """A reader into which a peer writes faster than anybody takes."""

    def take(self, N: int) -> list[int]:  # noqa: N803 (cyclonedds' name)
        return [0] * N


def test_a_flood_of_discovery_is_taken_in_parts() -> None:
    assert 0 < sum(1 for _ in _taken(Endless())) < 100_000


def test_a_flood_of_claims_is_met_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    claim = Claim(f"flood {time.time_ns()}", "/a")
    accepted = [0]

    def accept() -> Any:
        accepted[0] += 1
        return SimpleNamespace(setblocking=lambda _: None), None

    monkeypatch.setattr(claim, "_meet", lambda connection: None)
    listening: Any = SimpleNamespace(accept=accept, close=lambda: None)
    server, claim._server = claim._server, listening
    claim.update()
    assert 0 < accepted[0] < 1000
    assert server is not None
    server.close()


def test_a_step_of_a_simulation_that_never_ends_is_an_error() -> None:
    from test_lockstep import Robot

    robot = Robot()
    robot.gate.begin(lambda: None, lambda: None, [])
    with pytest.raises(VlaRosError, match="did not end"):
        robot.gate._step(1_000_000_000)


def test_a_node_ends_in_time_though_no_joint_state_comes_any_more(robot, inside) -> None:
    node = inside("timeouts.joint_state:=60.0")
    robot.until(lambda: len(robot.commands) > 5, robot.send_frame)
    node.inputs.fresh_joints = lambda *_: {}  # type: ignore[method-assign]
    began = time.monotonic()
    ended = threading.Thread(target=node.deactivate)
    ended.start()
    ended.join(15.0)
    assert not ended.is_alive()
    assert time.monotonic() - began < 10.0
    assert node.safety.state is State.DISARMED
