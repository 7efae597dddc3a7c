import threading
import time
from typing import Any

import numpy as np
import pytest

from vla_ros.execution.drivers import SERVO_TYPE
from vla_ros.execution.gate import DriverGate

pytestmark = pytest.mark.filterwarnings("error")

TWIST, GRIPPER = "/servo/delta_twist_cmds", "/gripper_controller/commands"
SWITCH = "/servo/switch_command_type"
FINGERS = ["robot.gripper_joint_names:=[finger_left, finger_right]", f"topics.gripper:={GRIPPER}"]
SERVO = ["control.output:=twist_stamped", f"topics.command:={TWIST}", "control.rate_hz:=10.0"]
LATE = 0.15  # s for a message on its way, on a machine with other work


def listen(robot: Any, kind: str, topic: str) -> tuple[list[tuple[float, Any]], Any]:
    """What comes on a topic and when (steady clock), all of it, and the subscription."""
    heard: list[tuple[float, Any]] = []
    graph = robot.graph
    end = robot.node.create_subscription(
        graph.message(kind), topic, lambda message: heard.append((time.monotonic(), message)), graph.qos("request")
    )
    return heard, end


def speed(message: Any) -> float:
    linear, angular = message.twist.linear, message.twist.angular
    return float(np.linalg.norm([linear.x, linear.y, linear.z, angular.x, angular.y, angular.z]))


def stamp_of(message: Any) -> int:
    return int(message.header.stamp.sec) * 1_000_000_000 + int(message.header.stamp.nanosec)


def count(robot: Any, name: str) -> int:
    return int(robot.diagnostics.get("state", {}).get(f"count/{name}", 0))


@pytest.mark.causes("velocity_expired")
def test_a_twist_expires(robot, inside) -> None:
    twists, _ = listen(robot, "geometry_msgs/msg/TwistStamped", TWIST)
    inside("policy.instruction:=slow", *SERVO)
    robot.until(lambda: count(robot, "velocity_expired") >= 3, robot.send_frame)
    assert "inference_late" not in robot.reported, "a late answer within timeouts.inference is no hold"
    moving = [index for index, (_, twist) in enumerate(twists[:-1]) if speed(twist) > 0]
    assert len(moving) >= 3
    stood = [twists[index + 1][0] - twists[index][0] for index in moving]
    assert np.median(stood) < 0.2 + LATE, "a velocity stood for longer than it may"
    for index in moving:
        twist, following = twists[index][1], twists[index + 1][1]
        assert stamp_of(twist) in robot.sent
        assert speed(following) == 0
        assert following.header.frame_id == twist.header.frame_id
        assert stamp_of(following) > stamp_of(twist)


def test_regular_twists_are_not_interrupted(robot, inside) -> None:
    twists, _ = listen(robot, "geometry_msgs/msg/TwistStamped", TWIST)
    inside(*SERVO, "timeouts.velocity:=2.0")
    robot.until(lambda: len(twists) >= 20, robot.send_frame)
    assert all(speed(twist) > 0 for _, twist in twists)
    robot.until(lambda: speed(twists[-1][1]) == 0, robot.send_joints)
    before = len(twists)
    robot.until(lambda: robot.says("camera_stale"), robot.send_joints)
    assert len(twists) == before, "the hold was the zero twist; there is nothing left to end"


def positions(message: Any) -> list[float]:
    """Finger positions in any of the messages for a gripper."""
    if hasattr(message, "data"):
        return [float(value) for value in message.data]
    names, values = (
        (message.name, message.position)
        if hasattr(message, "name")
        else (message.joint_names, message.points[0].positions)
    )
    assert list(names) == ["finger_left", "finger_right"]
    return [float(value) for value in values]


@pytest.mark.parametrize(
    ("output", "kind"),
    [
        ("float64_multi_array", "std_msgs/msg/Float64MultiArray"),
        ("joint_trajectory", "trajectory_msgs/msg/JointTrajectory"),
        ("joint_state", "sensor_msgs/msg/JointState"),
    ],
)
def test_a_gripper_on_its_own_topic_is_limited_held_and_stopped_with_the_arm(
    robot, inside, output: str, kind: str
) -> None:
    heard, _ = listen(robot, kind, GRIPPER)
    inside(f"gripper.output:={output}", *FINGERS, "gripper.max_speed:=0.03")
    robot.until(lambda: len(heard) > 3 and robot.commands, robot.send_frame)
    assert [len(command.name) for command in robot.commands] == [7] * len(robot.commands)
    assert positions(heard[-1][1]) == [0.04, 0.04]
    robot.instruct("close")
    robot.until(lambda: positions(heard[-1][1])[0] < 0.03, robot.send_frame)
    robot.stop()
    robot.until(lambda: robot.says("operator_stop"), robot.send_frame)
    robot.until(lambda: np.allclose(robot.command_positions(), robot.positions, atol=1e-9))
    told = np.array([positions(message) for _, message in heard])
    assert np.abs(np.diff(told, axis=0)).max() <= 0.03 / 30 + 1e-9, "faster than gripper.max_speed"
    assert np.all(told[-1] == told[-2]), "a hold keeps what the fingers were told"
    held = len(heard)
    robot.actions.clear()
    robot.until(lambda: len(robot.actions) > 5, robot.send_frame)
    assert len(heard) == held, "the gripper was told something after the stop"


def test_a_gripper_beside_a_servo_gets_the_finger_positions(robot, inside) -> None:
    """Without a URDF: the arm's part is a twist alone."""
    twists, _ = listen(robot, "geometry_msgs/msg/TwistStamped", TWIST)
    heard, _ = listen(robot, "std_msgs/msg/Float64MultiArray", GRIPPER)
    inside("policy.instruction:=close", "robot.urdf:=''", *SERVO, *FINGERS)
    robot.until(lambda: len(twists) > 3 and len(heard) > 3, robot.send_frame)
    assert positions(heard[-1][1]) == [0.0, 0.0]


@pytest.mark.causes("driver_gone")
def test_losing_the_gripper_driver_stops_the_arm(robot, inside) -> None:
    heard, end = listen(robot, "std_msgs/msg/Float64MultiArray", GRIPPER)
    inside(*FINGERS)
    robot.until(lambda: len(heard) > 3, robot.send_frame)
    robot.node.destroy_subscription(end)
    robot.until(lambda: robot.says(f"on {GRIPPER}"), robot.send_frame)
    assert robot.says("driver_gone")


@pytest.mark.causes("driver_missing")
def test_the_arm_waits_for_the_gripper_driver(robot, inside) -> None:
    inside(*FINGERS)
    robot.until(lambda: robot.says("driver_missing"), robot.send_frame)
    assert all(np.allclose(command.position[:7], robot.positions) for command in robot.commands)
    heard, _ = listen(robot, "std_msgs/msg/Float64MultiArray", GRIPPER)
    robot.until(lambda: heard, robot.send_frame)


def test_frames_stamped_ahead_start_no_trajectory_in_the_future(robot, inside, caplog) -> None:
    """A trajectory controller would wait for the stamp, and each new message would make it wait anew."""
    arm = "/arm_controller/joint_trajectory"
    heard, _ = listen(robot, "trajectory_msgs/msg/JointTrajectory", arm)
    inside("control.output:=joint_trajectory", f"topics.command:={arm}")
    offset = time.time() - time.monotonic()

    def due() -> list[float]:
        """Seconds from the arrival of each trajectory to its point."""
        points = [message.points[0].time_from_start for _, message in heard]
        ends = [
            stamp_of(message) / 1e9 + point.sec + point.nanosec / 1e9
            for (_, message), point in zip(heard, points, strict=True)
        ]
        return [end - at - offset for (at, _), end in zip(heard, ends, strict=True)]

    def frame() -> None:
        robot.send_frame(robot.noise(robot.now() + int(0.5e9)))

    robot.until(lambda: len(heard) > 8, frame)
    assert max(due()) < 0.2, "a frame's stamp ahead of the clock delays the arm"
    robot.until(lambda: any("ahead of this clock" in text for text in caplog.messages), frame)
    assert not robot.reported & {"frame_from_future", "frame_old"}


def serve_servo(robot: Any, takes: bool) -> tuple[list[int], Any]:
    """MoveIt Servo's ``switch_command_type``: what it is told, and the service."""
    kind, told = robot.graph.service(SERVO_TYPE), list[int]()

    def answer(request: Any, response: Any) -> Any:
        told.append(int(request.command_type))
        response.success = takes
        return response

    return told, robot.node.create_service(kind, SWITCH, answer)


@pytest.mark.causes("driver_gone")
def test_servo_is_switched_to_twists_first_and_its_loss_is_detected(robot, inside) -> None:
    twists, _ = listen(robot, "geometry_msgs/msg/TwistStamped", TWIST)
    inside(*SERVO, f"topics.servo:={SWITCH}", "timeouts.driver:=0.3")
    robot.until(lambda: robot.says(f"on {SWITCH}"), robot.send_frame)
    assert all(speed(twist) == 0 for _, twist in twists)
    told, service = serve_servo(robot, takes=True)
    robot.until(lambda: any(speed(twist) > 0 for _, twist in twists), robot.send_frame)
    assert told == [1]
    robot.node.destroy_service(service)
    robot.until(lambda: robot.says("driver_gone"), robot.send_frame)


@pytest.mark.causes("driver_missing")
def test_the_arm_waits_while_servo_refuses_twists(robot, inside) -> None:
    twists, _ = listen(robot, "geometry_msgs/msg/TwistStamped", TWIST)
    told, _ = serve_servo(robot, takes=False)
    inside(*SERVO, f"topics.servo:={SWITCH}", "timeouts.driver:=0.3")
    robot.until(lambda: len(told) > 1 and robot.says("driver_missing"), robot.send_frame)
    assert all(speed(twist) == 0 for _, twist in twists)


def test_an_interbotix_arm_hears_groups_and_its_gripper_single_joints(robot, inside) -> None:
    groups, _ = listen(robot, "interbotix_xs_msgs/msg/JointGroupCommand", "/arm/commands/joint_group")
    singles, _ = listen(robot, "interbotix_xs_msgs/msg/JointSingleCommand", GRIPPER)
    topics = ("topics.command:=/arm/commands/joint_group", "control.output:=joint_group_command")
    inside(*topics, "gripper.output:=joint_single_command", *FINGERS)
    robot.until(lambda: len(groups) > 3 and singles, robot.send_frame)
    assert {message.name for _, message in groups} == {"arm"}
    assert {len(message.cmd) for _, message in groups} == {7}
    assert (singles[-1][1].name, singles[-1][1].cmd) == ("finger_left", pytest.approx(0.04))
    robot.stop()
    robot.until(lambda: robot.says("operator_stop"), robot.send_frame)
    robot.until(lambda: np.allclose(groups[-1][1].cmd, robot.positions, atol=1e-6))


def test_a_hold_while_the_graph_thread_is_busy_is_at_the_newest_position(robot, inside, monkeypatch) -> None:
    """While the graph thread is busy, the control thread holds, and first reads the joint states that wait."""
    begin, was_busy, supervise = threading.Event(), threading.Event(), DriverGate.supervise

    def late(gate: DriverGate) -> None:
        if begin.is_set() and not was_busy.is_set() and threading.current_thread().name == "graph":
            was_busy.set()
            time.sleep(1.0)
        supervise(gate)

    monkeypatch.setattr(DriverGate, "supervise", late)
    inside("timeouts.joint_state:=0.3", "timeouts.camera:=0.3", "timeouts.driver:=5.0")
    robot.until(lambda: len(robot.commands) > 5, robot.send_frame)
    begin.set()
    robot.until(was_busy.is_set, robot.send_joints)
    for index in range(40):
        robot.positions[0] = 0.002 * index
        robot.send_joints()
        time.sleep(0.03)
    robot.until(lambda: "joint_state_stale" in robot.reported, robot.send_frame)
    held = [index for index in range(len(robot.commands)) if robot.command_stamp(index) not in robot.sent]
    assert robot.command_positions(held[0])[0] > 0.004, "where it was before"
