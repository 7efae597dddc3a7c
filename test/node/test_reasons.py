"""Reasons of docs/safety.md that no other test of the node causes, each caused and ended.

The node is the real one, on a participant and a thread of its own, but in this process: signals and the end of a
process are what the other tests are about.
"""

import itertools
import math
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from vla_ros.contract.components import parse_components
from vla_ros.contract.spec import ImageFeature, PolicySpec, StateFeature
from vla_ros.control.reasons import Reason
from vla_ros.control.safety import State
from vla_ros.node.policy_node import PolicyNode
from vla_ros.policies import Policy, Session
from vla_ros.types import ActionChunk, Observation
from vla_ros.vision.messages import encode_image

POSE = PolicySpec()
JOINTS = PolicySpec(action=parse_components("arm.joint_position + arm.gripper", action=True), dimension=8)
FORCE = PolicySpec(state=(StateFeature("force", parse_components("topic.force")),))
SLOWLY = (0.005, 0, 0, 0, 0, 0, 1)
NEAR, AWAY = ([turn, 0.3, 0, 1.6, 0, 1.2, 0, 1] for turn in (0.01, 0.1))  # from where the robot of conftest.py is

Inside = Callable[..., PolicyNode]


class Constant(Policy):
    """A policy that always answers the same, or raises it."""

    def __init__(self, answer: Any = SLOWLY, spec: PolicySpec = POSE) -> None:
        self.answer, self.spec = answer, spec

    def infer(self, session: Session, observation: Observation) -> ActionChunk:
        if isinstance(self.answer, Exception):
            raise self.answer
        return ActionChunk(np.array([self.answer], np.float64), observation.stamp)


def still(stamp: int, level: int = 127) -> bytes:
    return encode_image(np.full((48, 64, 3), level, np.uint8), stamp, "camera")


LIMITS = [
    ("limit_translation", "max_translation_step:=0.001", POSE, SLOWLY),
    ("limit_rotation", "max_rotation_step:=0.05", POSE, (0, 0, 0, 0, 0, 0.1, 1)),
    ("limit_workspace", "workspace_high:=[0.1, 1.0, 2.0]", POSE, SLOWLY),
    ("limit_position", "max_joint_step:=0.5", JOINTS, [0, 0.3, 0, 9.0, 0, 1.2, 0, 1]),
    ("limit_jump", "max_joint_step:=0.001", JOINTS, NEAR),
    ("limit_velocity", "velocity_scale:=0.01", JOINTS, AWAY),
    ("limit_acceleration", "max_joint_acceleration:=0.1", JOINTS, NEAR),
]


@pytest.mark.parametrize(
    ("limit", "spec", "answer"),
    [pytest.param(*case, id=name, marks=pytest.mark.causes(name)) for name, *case in LIMITS],
)
def test_a_broken_limit_is_counted_in_a_dry_run_and_stops_an_armed_arm(
    robot, inside: Inside, request, limit: str, spec: PolicySpec, answer
) -> None:
    words = ["control.armed:=false", "limits.on_violation:=stop", f"limits.{limit}"]
    if limit.startswith("workspace"):
        words.append("limits.workspace_low:=[-1.0, -1.0, 0.0]")
    node = inside(*words, policy=Constant(answer, spec))
    robot.until(lambda: len(robot.actions) > 3, robot.send_frame)
    assert node.safety.state is State.DISARMED
    assert node.enable(True)[0], "a limit broken while disarmed must not keep the arm from being armed"
    robot.until(lambda: node.safety.state is State.STOPPED, robot.send_frame)
    reason = node.safety.status.stopped_by
    assert reason.value == request.node.callspec.id
    robot.until(lambda: robot.commands, robot.send_joints)  # after a suspension, a hold needs a new one
    assert all(np.allclose(command.position[:7], robot.positions) for command in robot.commands)


@pytest.mark.causes("device_error")
def test_an_error_of_the_gpu_stops_the_arm(robot, inside: Inside) -> None:
    inside(policy=Constant(RuntimeError("CUDA error: an illegal memory access was encountered")))
    robot.until(lambda: robot.says("device_error"), robot.send_frame)


class Patient(Constant):
    """A policy that answers when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.let = threading.Semaphore(0), threading.Semaphore(0)

    def infer(self, session: Session, observation: Observation) -> ActionChunk:
        self.asked.release()
        assert self.let.acquire(timeout=10)
        return super().infer(session, observation)


class Slow(Policy):
    """Answers with four steps after half a second."""

    def __init__(self) -> None:
        self.spec = PolicySpec(horizon=4)
        self.threads: set[str] = set()

    def infer(self, session: Session, observation: Observation) -> ActionChunk:
        self.threads.add(threading.current_thread().name)
        threading.Event().wait(0.5)
        return ActionChunk(np.tile(SLOWLY, (4, 1)), observation.stamp)


@pytest.mark.causes("plan_empty")
def test_the_arm_rests_if_the_next_chunk_is_late_and_then_continues(robot, inside: Inside) -> None:
    policy = Slow()
    node = inside("control.schedule:=append", "control.rate_hz:=20.0", policy=policy)

    def motions() -> int:
        return sum(robot.command_stamp(index) in robot.sent for index in range(len(robot.commands)))

    robot.until(lambda: node.safety.counters.get("plan_empty", 0) >= 2 and motions() >= 8, robot.send_frame)
    assert node.safety.state is State.ARMED
    assert policy.threads == {"vla_inference"}


@pytest.mark.causes("task_changed")
def test_an_inference_begun_before_arming_never_moves_the_arm(robot, inside: Inside) -> None:
    policy = Patient()
    node = inside("control.armed:=false", policy=policy)
    robot.until(lambda: policy.asked.acquire(blocking=False), robot.send_frame)
    assert node.enable(True)[0]
    armed = robot.now()
    policy.let.release(100)
    robot.until(lambda: any(robot.command_stamp() in robot.sent for _ in robot.commands), robot.send_frame)
    motions = {robot.command_stamp(index) for index in range(len(robot.commands))} & robot.sent
    assert min(motions) > armed


@pytest.mark.causes("input_missing")
def test_a_missing_or_stale_state_topic_holds(robot, inside: Inside) -> None:
    node = inside("robot.state_topics:=[force=/force]", policy=Constant(spec=FORCE))
    graph = robot.graph
    kind = graph.message("sensor_msgs/msg/JointState")
    force = robot.node.create_publisher(kind, "/force", graph.qos("state_publisher"))
    held: dict[Any, str] = {}

    def why() -> str:
        held.update(node.safety.status.holds)
        return next(
            (detail for reason, detail in node.safety.status.holds.items() if reason == "input_missing"), ""
        )

    def with_force(age: int = 0, newtons: float = 1.0) -> None:
        robot.send_frame()
        force.publish(robot.joint_state(["z"], [newtons], robot.now() - age))

    robot.until(lambda: "topic.force: no message yet" in why(), robot.send_frame)
    robot.until(lambda: node.safety.state is State.ARMED, with_force)
    robot.until(lambda: "older than the frame" in why(), lambda: with_force(3_000_000_000))
    robot.until(lambda: node.safety.state is State.ARMED, with_force)
    robot.until(lambda: "topic.force: number 0 is nan" in why(), lambda: with_force(newtons=math.nan))
    robot.until(lambda: node.safety.state is State.ARMED, with_force)


@pytest.mark.causes("following_error")
def test_an_arm_that_does_not_follow_is_held_until_it_keeps_its_position(robot, inside: Inside) -> None:
    """The robot's positions stay as they are: the driver is there, and moves nothing."""
    node = inside("limits.following_error:=0.05", policy=Constant())
    robot.until(lambda: "following_error" in node.safety.status.holds, robot.send_frame)
    detail = node.safety.status.holds[Reason.FOLLOWING_ERROR]
    found = re.search(r"is at (\S+) and was commanded to be at (\S+): (\S+) apart, allowed 0.05", detail)
    assert found, detail
    at, commanded, apart = map(float, found.groups())
    assert abs(commanded - at) == pytest.approx(apart, abs=1e-3)
    robot.until(lambda: bool(robot.commands) and np.allclose(robot.command_positions()[:7], robot.positions))
    began = time.monotonic()
    robot.until(lambda: node.safety.state is State.ARMED, robot.send_frame)
    assert time.monotonic() - began > 0.7, "it must have kept its position for a second"


@pytest.mark.causes("camera_skew")
def test_images_too_far_apart_hold(robot, inside: Inside) -> None:
    cameras = ("camera.topics:=[/camera/image_raw, /wrist]", "camera.keys:=[image, wrist]")
    spec = PolicySpec((ImageFeature("image"), ImageFeature("wrist")))
    node = inside(*cameras, "timeouts.camera_skew:=0.2", policy=Constant(spec=spec))
    image = robot.graph.message("sensor_msgs/msg/Image")
    wrist = robot.node.create_publisher(image, "/wrist", robot.graph.qos("camera"))

    def both(age: float = 0.0) -> None:
        wrist.publish(robot.noise(robot.now() - round(1e9 * age)))
        robot.send_frame()

    robot.until(lambda: node.safety.state is State.ARMED and robot.commands, both)
    robot.until(lambda: "allowed 0.2 s" in node.safety.explain(), lambda: both(0.5))
    robot.until(lambda: node.safety.state is State.ARMED, both)


@pytest.mark.causes("camera_frozen")
def test_a_frozen_image_holds(robot, inside: Inside) -> None:
    node = inside("timeouts.frozen_frames:=4")
    robot.until(lambda: robot.commands, robot.send_frame)
    robot.until(lambda: node.safety.state is State.HOLDING, lambda: robot.send_frame(still(robot.now())))
    robot.until(lambda: node.safety.state is State.ARMED, robot.send_frame)


@pytest.mark.parametrize(
    ("reason", "seconds"),
    [
        pytest.param("frame_old", -5, marks=pytest.mark.causes("frame_old")),
        pytest.param("frame_from_future", 5, marks=pytest.mark.causes("frame_from_future")),
    ],
)
def test_a_frame_of_a_wrong_age_holds(robot, inside: Inside, reason: str, seconds: int) -> None:
    node = inside()
    late = seconds * 1_000_000_000
    robot.until(lambda: reason in node.safety.status.holds, lambda: robot.send_frame(still(robot.now() + late)))
    assert node.safety.state is State.HOLDING
    robot.until(lambda: node.safety.state is State.ARMED, robot.send_frame)


@pytest.mark.causes("frame_repeated", "frame_out_of_order")
def test_repeated_and_late_frames_are_dropped(robot, inside: Inside) -> None:
    node = inside()
    robot.until(lambda: robot.commands, robot.send_frame)

    stamp = robot.now()
    stamps = itertools.cycle((stamp, stamp, stamp - 1_000_000))

    def twice_and_one_from_before() -> None:
        robot.send_frame(still(next(stamps)))

    dropped = {"frame_repeated", "frame_out_of_order"}
    robot.until(lambda: dropped <= set(node.stats.frames()["dropped"]), twice_and_one_from_before)
    assert node.safety.state is State.ARMED


@pytest.mark.causes("joint_state_stale")
def test_stale_joint_states_hold(robot, inside: Inside) -> None:
    node = inside()
    robot.until(lambda: robot.commands, robot.send_frame)
    robot.until(lambda: node.safety.state is State.HOLDING, lambda: robot.send_frame(joints=False))
    robot.until(lambda: node.safety.state is State.ARMED, robot.send_frame)


@pytest.mark.causes("heartbeat_missing", "heartbeat_lost")
def test_a_missing_heartbeat_blocks_arming_and_a_lost_one_stops(robot, inside: Inside) -> None:
    graph = robot.graph
    empty = graph.message("std_msgs/msg/Empty")
    heart = robot.node.create_publisher(empty, "/vla_policy/heartbeat", graph.qos("state_publisher"))

    def beat() -> None:
        robot.send_frame()
        heart.publish(empty())

    node = inside("timeouts.heartbeat:=0.3")
    robot.until(lambda: "heartbeat_missing" in robot.reported, robot.send_frame)
    robot.until(lambda: node.safety.state is State.ARMED, beat)
    robot.until(lambda: node.safety.state is State.STOPPED, robot.send_frame)
    node.reset()
    assert not node.enable(True)[0], "the heartbeat is still lost"
    robot.until(lambda: node.enable(True)[0], beat)


@pytest.mark.causes("clock_jump")
def test_a_backward_jump_of_simulated_time_holds_until_all_inputs_are_new(robot, inside: Inside) -> None:
    """Another one during the hold makes what came since the first one old, too, although its stamps are newer."""
    kind = robot.graph.message("rosgraph_msgs/msg/Clock")
    clock = robot.node.create_publisher(kind, "/clock", robot.graph.qos("state_publisher"))
    behind = 0
    robot.now = lambda: type(robot).now(robot) - behind

    def tick(send: Callable[[], object] = robot.send_frame) -> None:
        clock.publish(kind(clock=robot.joint_state((), ()).header.stamp))
        send()

    node = inside(ros_args=("--ros-args", "-p", "use_sim_time:=true"))
    robot.until(lambda: node.safety.state is State.ARMED and len(robot.commands) > 3, tick)
    behind = 10_000_000_000
    robot.until(lambda: "clock_jump" in node.safety.counters, tick)
    moved = len(robot.commands)
    robot.until(lambda: node.safety.state is State.ARMED and len(robot.commands) > moved + 3, tick)
    behind, robot.positions[0] = 20_000_000_000, 0.01
    measured = lambda: getattr(node.inputs.snapshot.joints, "positions", ())  # noqa: E731
    robot.until(lambda: 0.01 in measured(), lambda: tick(robot.send_joints))
    behind, robot.positions[0], before = 20_400_000_000, 0.02, node.safety.counters["clock_jump"]
    robot.until(lambda: node.safety.counters["clock_jump"] > before, lambda: tick(list))  # nothing but the time
    robot.until(lambda: node.safety.state is State.ARMED, tick)
    assert 0.01 not in measured()


@pytest.mark.xfail(raises=AssertionError, strict=True, reason="nothing is frozen: the claim must be found out")
@pytest.mark.causes("camera_frozen")
def test_a_test_that_does_not_cause_its_reason_fails(robot, inside: Inside) -> None:
    inside()
    robot.until(lambda: robot.commands, robot.send_frame)


@pytest.mark.parametrize("number", [1e30, 2.0**62])
@pytest.mark.causes("action_invalid")
def test_an_absurd_action_is_dropped_and_not_clamped(robot, inside, number: float) -> None:
    class Damaged(Policy):
        spec = PolicySpec((ImageFeature("image"),))
        absurd = False

        def infer(self, session: Session, observation: Observation) -> ActionChunk:
            step = number if self.absurd else 0.005
            return ActionChunk(np.array([[step, 0, 0, 0, 0, 0, 1.0]]), observation.stamp)

    policy = Damaged()
    inside(policy=policy)
    robot.until(lambda: len(robot.commands) > 3, robot.send_frame)
    policy.absurd = True
    robot.until(lambda: "action_invalid" in robot.status.get("holds", {}), robot.send_frame)
    held = len(robot.commands)
    count = "dropped/action_invalid"
    robot.until(lambda: int(robot.diagnostics.get("camera", {}).get(count, 0)) > 5, robot.send_frame)
    assert np.allclose(robot.command_positions(), robot.positions, atol=1e-9)
    assert len(robot.commands) <= held + 1
    policy.absurd = False
    robot.until(lambda: len(robot.commands) > held + 3, robot.send_frame)
