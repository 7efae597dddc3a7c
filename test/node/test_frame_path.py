import re
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import vla_ros
from vla_ros.contract.components import parse_components
from vla_ros.contract.spec import PolicySpec, StateFeature
from vla_ros.policies.base import Policy, Session
from vla_ros.types import ActionChunk, Observation

PACKAGE = Path(vla_ros.__file__).parent
PAGE = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
MOST_HOPS, MOST_FILES = 40, 25

BEGIN = {"node/receiver.py::receive", "node/control_loop.py::run_once"}
"""Where the frame enters a thread."""

BESIDE = "execution/gate.py::supervise"
"""Checks all inputs, whatever the frame."""

ROOMS = re.findall(r"^\| `(\w+)` \|", PAGE.split("### The robot: ")[1].split("\n### ")[0], re.MULTILINE)
"""The robot's rooms in the order of the page: each imports only those above it."""


def listed() -> dict[str, str]:
    """The hops of the page in order, each with what it does; those in bold are waypoints."""
    section = PAGE.split("## The path of one frame\n")[1].split("\n## ")[0]
    return dict(re.findall(r"^\| \d+ \| (\**`[\w/.:]+`\**) \| (.+?) \|$", section, re.MULTILINE))


class Trace:
    """Collects the functions on the call stack, down to the thread's entry, when the frame reaches a waypoint."""

    def __init__(self, waypoints: set[str]) -> None:
        self.waypoints, self.functions = waypoints, {name.rpartition(":")[2] for name in waypoints}
        self.hops: dict[str, None] = {}
        self.climbs = set[str]()
        self.on = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if not self.on or event != "call" or frame.f_code.co_name not in self.functions:
            return
        stack: list[str] = []
        at: FrameType | None = frame
        if name_of(frame) not in self.waypoints:
            return
        while at is not None and (not stack or stack[-1] not in BEGIN):
            stack += [name] if (name := name_of(at)) else []
            at = at.f_back
        rooms = [ROOMS.index(name.partition("/")[0]) for name in stack]
        self.climbs |= {" <- ".join(stack)} if rooms != sorted(rooms) else set()
        if stack[-1] in BEGIN and BESIDE not in stack:
            self.hops.update(dict.fromkeys(reversed(stack)))


def name_of(frame: FrameType) -> str:
    """``file::function`` of the package; "" for another's code, and for comprehensions and lambdas."""
    path, name = frame.f_code.co_filename, frame.f_code.co_name
    own = path.startswith(str(PACKAGE)) and not name.startswith("<")
    return f"{Path(path).relative_to(PACKAGE).as_posix()}::{name}" if own else ""


class Looking(Policy):
    """Looks at the image and the joints, and opens the gripper."""

    spec = PolicySpec(state=(StateFeature("joints", parse_components("arm.joint_position")),))

    def infer(self, session: Session, observation: Observation) -> ActionChunk:
        assert observation.images["image"].size
        return ActionChunk(np.array([[0.005, 0, 0, 0, 0, 0, 1.0]]), observation.stamp)


def test_a_frame_takes_the_path_on_the_page(robot, inside) -> None:
    hops = listed()
    waypoints = {name.strip("*`") for name in hops if name.startswith("**")}
    trace = Trace(waypoints)
    patient = [f"timeouts.{name}:=60.0" for name in ("camera", "joint_state", "frame_age", "inference")]
    threading.setprofile(trace)
    try:
        inside("robot.gripper_joint_names:=[finger_left]", *patient, policy=Looking())
    finally:
        threading.setprofile(None)
    robot.names, robot.positions = [*robot.names, "finger_left"], [*robot.positions, 0.04]
    robot.until(lambda: len(robot.commands) > 3, robot.send_frame)
    robot.until(lambda: robot.command_stamp() == max(robot.sent))  # no other frame is on its way
    trace.on = True
    known, sent = len(robot.actions), robot.send_frame()
    robot.until(lambda: robot.command_stamp() == sent and len(robot.actions) > known)
    trace.on = False
    assert list(trace.hops) == [name.strip("*`") for name in hops]
    assert not trace.climbs, "a call goes up to another room, or back to one that it came through"
    assert len(hops) <= MOST_HOPS
    assert len({name.strip("*`").partition("::")[0] for name in hops}) <= MOST_FILES
