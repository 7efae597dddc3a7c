"""The node as a robot meets it, over DDS in a process of its own.

Pinned here: nothing moves until armed; a bad message is counted and the next good frame works; whatever the
policy does wrong, the arm holds at its last measured position; first stop wins until a person resets.
"""

import json
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scripted_node import ScriptedPolicy, vla_ros_run

from vla_ros.config import build, load
from vla_ros.contract.spec import ImageFeature
from vla_ros.policies.hold import HoldPolicy
from vla_ros.vision.messages import encode_image

pytestmark = pytest.mark.filterwarnings("error")


ARMED = ("-p", "control.armed:=true", "-p", "policy.instruction:=go on")


def moving(robot: Any, start: Callable[..., Any], *words: str, **options: Any) -> Any:
    """A node that answers frames."""
    node = start(*words, **options)
    robot.until(lambda: robot.commands, robot.send_frame)
    return node


def test_commands_follow_frames_and_carry_their_stamps(robot, start) -> None:
    node = moving(robot, start, *ARMED)
    robot.until(lambda: len(robot.commands) >= 20, robot.send_frame)
    stamps = [robot.command_stamp(index) for index in range(len(robot.commands))]
    assert len(set(stamps)) == len(stamps), "a frame was used twice"
    assert stamps == sorted(stamps)
    assert set(stamps) <= robot.sent
    assert np.linalg.norm(robot.command_positions() - robot.positions) > 1e-3
    assert list(robot.commands[-1].name)[:2] == ["joint_1", "joint_2"]
    assert np.allclose(robot.actions[-1].data, [0.005, 0, 0, 0, 0, 0, 1])
    assert node.end() == 0
    stats = json.loads(node.stats.read_text())
    frames = stats["frames"]
    assert frames["received"] == frames["used"] + sum(frames["dropped"].values())
    assert {"wait", "preprocess", "inference", "control", "publish", "frame_age", "total", "receive"} <= set(
        stats["latency_ms"]
    )


def test_nothing_moves_until_armed_and_signals_arm_and_disarm(robot, start) -> None:
    node = start("-p", "policy.instruction:=go on")
    robot.until(lambda: len(robot.actions) > 5, robot.send_frame)
    assert robot.commands == []
    node.signal(signal.SIGUSR1)
    robot.until(lambda: robot.commands, robot.send_frame)
    node.signal(signal.SIGUSR2)
    robot.until(lambda: "armed -> disarmed" in node.log.read_text(), robot.send_frame)
    held = len(robot.commands)
    robot.until(lambda: np.allclose(robot.command_positions(), robot.positions, atol=1e-9))
    robot.actions.clear()
    robot.until(lambda: len(robot.actions) > 5, robot.send_frame)
    assert len(robot.commands) <= held + 1, "a command was sent while disarmed"


class OnDevice(ScriptedPolicy):
    """A policy whose device reads images from its own memory; each of its calls notes its thread."""

    def __init__(self) -> None:
        self.memory: list[Any] = []
        self.threads: dict[str, set[str]] = {"page_locked": set(), "infer": set()}
        self.pixels: list[bool] = []

    def page_locked(self, size: int) -> Any:
        self.threads["page_locked"].add(threading.current_thread().name)
        self.memory.append(np.zeros(size, np.uint8))
        return self.memory[-1]

    def infer(self, session: Any, observation: Any) -> Any:
        self.threads["infer"].add(threading.current_thread().name)
        [image] = observation.raw_images.values()
        self.pixels.append(any(np.shares_memory(image.pixels, memory) for memory in self.memory))
        return super().infer(session, observation)


def test_frames_wait_in_the_devices_memory_and_the_graph_thread_never_calls_the_policy(robot, inside) -> None:
    policy = OnDevice()
    moving(robot, inside, "camera.width:=64", "camera.height:=48", policy=policy)
    robot.until(lambda: len(policy.pixels) >= 20, robot.send_frame)
    assert all(policy.pixels), "an image was uploaded from elsewhere"
    assert len(policy.memory) == 4
    assert all("graph" not in threads for threads in policy.threads.values())
    before = len(robot.commands)
    larger = robot.noise(robot.now(), 96, 128)
    robot.until(lambda: not policy.pixels[-1] and len(robot.commands) > before, lambda: robot.send_frame(larger))


def unknown_encoding(stamp: int) -> bytes:
    return encode_image(np.zeros((48, 64, 3), np.uint8), stamp, "camera").replace(b"rgb8", b"hsv8", 1)


def no_pixels(stamp: int) -> bytes:
    cdr = encode_image(np.zeros((48, 64, 3), np.uint8), stamp, "camera")
    return cdr[: cdr.index((48 * 64 * 3).to_bytes(4, "little"))] + bytes(4)


def test_frames_without_stamps_are_used_with_a_warning(robot, inside, caplog) -> None:
    """Many drivers publish stamp 0. Such a frame counts as taken when it came; that its age is unknown is shown."""

    def send() -> None:
        robot.send_frame(robot.noise(0))

    inside("timeouts.frame_age:=0.5")
    robot.until(lambda: len(robot.commands) > 10, send)
    began = robot.now()
    robot.commands.clear()
    robot.until(lambda: len(robot.commands) > 10, send)
    stamps = [robot.command_stamp(index) for index in range(len(robot.commands))]
    assert stamps == sorted(set(stamps))
    assert all(began - 500_000_000 < stamp < robot.now() for stamp in stamps)
    robot.until(lambda: robot.says("had no stamp", "camera"), send)
    assert robot.diagnostics["camera"]["level"] == 1
    assert caplog.text.count("/camera/image_raw: its frames have the stamp 0") == 1
    robot.until(lambda: robot.says("camera_stale"), robot.send_joints)


@pytest.mark.parametrize("damaged", [unknown_encoding, no_pixels])
@pytest.mark.causes("image_invalid")
def test_a_damaged_frame_is_dropped_and_the_next_good_one_moves(
    robot, inside, damaged: Callable[[int], bytes]
) -> None:
    node = moving(robot, inside)
    before = len(robot.commands)
    robot.send_frame(damaged(robot.now()))
    robot.until(lambda: node.stats.frames()["dropped"].get("image_invalid") == 1, robot.send_joints)
    robot.until(lambda: len(robot.commands) > before, robot.send_frame)


@pytest.mark.parametrize(
    ("instruction", "reason"),
    [
        pytest.param("nan", "action_invalid", marks=pytest.mark.causes("action_invalid")),
        pytest.param("short", "action_invalid", marks=pytest.mark.causes("action_invalid")),
        pytest.param("raise", "inference_error", marks=pytest.mark.causes("inference_error")),
        pytest.param("slow", "inference_late", marks=pytest.mark.causes("inference_late")),
    ],
)
def test_a_bad_answer_makes_the_arm_hold_its_position(robot, inside, instruction: str, reason: str) -> None:
    moving(robot, inside, "timeouts.inference:=0.2")
    robot.instruct(instruction)
    robot.until(lambda: robot.says(reason), robot.send_frame, patience=30)
    robot.until(lambda: np.allclose(robot.command_positions(), robot.positions, atol=1e-9), robot.send_joints)
    held = len(robot.commands)
    robot.until(lambda: int(robot.diagnostics.get("camera", {}).get(f"dropped/{reason}", 0)) > 3, robot.send_frame)
    assert len(robot.commands) == held, "a command was sent while holding"
    robot.instruct("go on")
    robot.until(lambda: len(robot.commands) > held, robot.send_frame)


@pytest.mark.causes("joint_state_invalid")
def test_joint_states_with_nan_hold_until_a_good_one(robot, inside) -> None:
    moving(robot, inside)
    invalid = [*robot.positions[:3], float("nan"), *robot.positions[4:]]

    def send_invalid() -> None:
        robot.send_joints(invalid)

    robot.until(lambda: robot.says("joint_state_invalid"), send_invalid)
    held = len(robot.commands)
    assert np.isfinite(robot.command_positions()).all()
    robot.until(lambda: len(robot.commands) > held, robot.send_frame)


def test_joint_states_of_arm_and_gripper_are_merged(robot, inside) -> None:
    moving(robot, inside, "robot.gripper_joint_names:=[finger_left]")

    def both() -> None:
        robot.send_frame()
        robot.send_joints([0.021], names=["finger_left"])

    count = len(robot.commands)
    robot.until(lambda: len(robot.commands) >= count + 20, both)
    robot.until(lambda: robot.diagnostics.get("state", {}).get("count/joint_state_invalid", "0") == "0", both)
    # The wrist's part goes stale: the arm is not known any more, and the joints are named.
    names, positions = robot.names[:5], robot.positions[:5]
    robot.names, robot.positions = names, positions
    robot.until(lambda: robot.says("joint_6"), both)
    assert robot.says("joint_state_invalid")


TWO_CAMERAS = ("camera.topics:=[/camera/image_raw, /wrist/image_raw]", "camera.keys:=[image, wrist]")


class WithWrist(ScriptedPolicy):
    spec = replace(ScriptedPolicy.spec, images=(*ScriptedPolicy.spec.images, ImageFeature("wrist")))


def test_with_two_cameras_every_frame_is_counted_and_both_are_watched(robot, inside) -> None:
    graph = robot.graph
    wrist = robot.node.create_publisher(
        graph.message("sensor_msgs/msg/Image"), "/wrist/image_raw", graph.qos("camera")
    )

    def both() -> None:
        stamp = robot.now()
        wrist.publish(encode_image(np.zeros((48, 64, 3), np.uint8), stamp, "wrist"))
        robot.send_frame()

    node = inside(*TWO_CAMERAS, policy=WithWrist())
    robot.until(lambda: len(robot.commands) > 10, both)
    robot.until(lambda: robot.says("camera_stale (/wrist/image_raw"), robot.send_frame)
    before = len(robot.commands)
    robot.until(lambda: len(robot.commands) > before + 3, both)
    frames = node.stats.frames()
    waiting = frames["received"] - frames["used"] - sum(frames["dropped"].values())
    assert 0 <= waiting <= 2, f"not one for each camera: {frames}"


@pytest.mark.parametrize("keys", ["[image, spare]", "[spare, image]"])
def test_a_camera_that_the_policy_does_not_use_neither_holds_nor_begins_inferences(robot, inside, keys) -> None:
    first, second = ("/camera/image_raw", "/spare")[:: 1 if keys.startswith("[image") else -1]
    node = inside(f"camera.topics:=[{first}, {second}]", f"camera.keys:={keys}")
    robot.until(lambda: len(robot.commands) > 10, robot.send_frame)  # nobody publishes on /spare
    assert not [said for _, said in robot.statuses if "/spare" in said["explanation"]]
    assert node.stats.frames()["received"] > 10


def test_a_tip_outside_its_box_is_told(robot, inside) -> None:
    box = ("limits.workspace_low:=[1.5, -0.1, 0.1]", "limits.workspace_high:=[1.6, 0.1, 0.2]")
    node = inside(*box)
    robot.until(lambda: "outside limits.workspace_low [1.5, -0.1, 0.1]" in robot.status.get("explanation", ""),
                robot.send_frame)  # fmt: skip
    assert robot.status["explanation"].startswith("armed; the tip of 'arm' is at [")
    armed, said = node.enable(True)
    assert armed
    assert "it can only come back" in said


@pytest.mark.causes("camera_stale")
def test_a_stale_camera_holds_until_the_next_frame(robot, inside) -> None:
    moving(robot, inside)
    robot.positions[0] += 0.01
    robot.until(lambda: robot.says("camera_stale"), robot.send_joints)
    robot.until(
        lambda: np.isclose(robot.command_positions()[0], robot.positions[0], atol=0.0101), robot.send_joints
    )
    held = len(robot.commands)
    robot.until(lambda: len(robot.commands) > held, robot.send_frame)


@pytest.mark.causes("operator_stop")
def test_a_stop_holds_until_reset_and_armed_again(robot, start) -> None:
    node = moving(robot, start, *ARMED)
    robot.stop()
    robot.until(lambda: "-> stopped" in node.log.read_text(), robot.send_frame)
    robot.until(lambda: np.allclose(robot.command_positions(), robot.positions, atol=1e-9), robot.send_frame)
    held = len(robot.commands)
    node.signal(signal.SIGUSR1)
    robot.until(lambda: "fix the cause, reset, then arm" in node.log.read_text(), robot.send_frame)
    assert len(robot.commands) == held
    node.signal(signal.SIGHUP)
    robot.until(lambda: "no longer stopped" in node.log.read_text(), robot.send_frame)
    node.signal(signal.SIGUSR1)
    robot.until(lambda: len(robot.commands) > held, robot.send_frame)


@pytest.mark.causes("thread_died")
def test_a_dead_control_thread_stops_the_arm_and_cannot_be_armed_again(robot, start) -> None:
    node = moving(robot, start, *ARMED)
    robot.instruct("exit")
    robot.until(lambda: robot.says("thread_died"), robot.send_frame)
    robot.until(lambda: np.allclose(robot.command_positions(), robot.positions, atol=1e-9))
    node.signal(signal.SIGHUP)
    robot.until(lambda: robot.diagnostics["state"]["message"] == "disarmed", robot.send_frame)
    node.signal(signal.SIGUSR1)
    robot.until(lambda: "the control thread has ended with an error" in node.log.read_text(), robot.send_frame)
    assert robot.diagnostics["state"]["message"] == "disarmed", "an armed node that never moves says nothing"


def test_an_incompatible_stop_button_is_reported_and_remapped_topics_are_found(robot, start) -> None:
    graph = robot.graph
    robot.node.create_publisher(graph.message("std_msgs/msg/Bool"), "/vla_policy/stop", graph.qos("camera"))
    words = ["-p", "policy.name:=hold", "-p", "robot.urdf:=demo", "-p", "timeouts.publisher:=0.5"]
    words += ["--ros-args", "-r", "/camera/image_raw:=/left/image", "-r", "/joint_states:=/left/joint_states"]
    kind = graph.message("sensor_msgs/msg/Image")
    robot.node.create_publisher(kind, "/left/image", graph.qos("camera"))
    node = start(*words, main=vla_ros_run, bare=True)
    robot.until(lambda: "nothing will arrive on /vla_policy/stop" in node.log.read_text())
    robot.until(lambda: "/left/joint_states has had no publisher" in node.log.read_text())
    assert "image_raw has had no publisher" not in node.log.read_text()
    assert "/left/image has had" not in node.log.read_text()


@pytest.mark.parametrize(
    ("instruction", "said"),
    [
        ("x" * 10_000, "10000 characters refused"),
        ("pick up\x1b[2J the cup", "with control character U+001B refused"),
    ],
)
def test_a_refused_instruction_leaves_the_old_one_in_force(
    robot, inside, caplog, instruction: str, said: str
) -> None:
    moving(robot, inside)
    robot.instruct(instruction)
    robot.until(lambda: said in caplog.text, robot.send_frame)
    robot.until(lambda: "state" in robot.diagnostics, robot.send_frame)
    assert robot.diagnostics["state"]["instruction"] == "go on"
    before = len(robot.commands)
    robot.until(lambda: len(robot.commands) > before, robot.send_frame)


@pytest.mark.causes("no_instruction")
def test_without_an_instruction_the_arm_holds(robot, inside) -> None:
    node = inside("policy.instruction:=''")
    robot.until(lambda: robot.says("no_instruction"), robot.send_frame)
    assert all(np.allclose(command.position[:7], robot.positions) for command in robot.commands)
    held = len(robot.commands)
    robot.instruct("go on")
    robot.until(lambda: len(robot.commands) > held and not robot.says("no_instruction"), robot.send_frame)
    node.reconfigure(build({"policy.instruction": "another"}, node.config))
    node.reconfigure(build({"policy.instruction": ""}, node.config))  # ros2 param set takes it back
    robot.until(lambda: robot.says("no_instruction"), robot.send_frame)


def test_a_signal_during_loading_ends_the_node_without_arming(robot, start, monkeypatch) -> None:
    monkeypatch.setenv("SCRIPTED_LOAD_S", "60")
    node = start("-p", "control.armed:=true", "-p", "policy.instruction:=go on")
    robot.until(lambda: "loading" in node.log.read_text(), robot.send_frame)
    node.signal(signal.SIGTERM)
    assert node.process.wait(10) == 0
    assert "ended while the policy was loading" in node.log.read_text()
    assert "Traceback" not in node.log.read_text()
    assert robot.commands == []


def test_namespace_name_remaps_and_parameter_files_work_as_in_ros(robot, start, tmp_path) -> None:
    file = tmp_path / "robot.yaml"
    file.write_text("left/left_policy:\n  ros__parameters:\n    policy: {name: hold}\n    robot: {urdf: demo}\n")
    words = ["-r", "__ns:=/left", "-r", "__node:=left_policy", "-r", "/camera/image_raw:=/left/image"]
    words += ["--params-file", str(file), "-p", "policy.instruction:=nimm den w\u00fcrfel \u7d05"]
    node = start("--ros-args", *words, main=vla_ros_run, bare=True)
    robot.until(lambda: "is ready" in node.log.read_text(), robot.send_frame)
    robot.until(lambda: "state" in robot.diagnostics, robot.send_frame)
    assert robot.diagnostics["state"]["instruction"] == "nimm den w\u00fcrfel \u7d05"
    names = dict.fromkeys(f"{namespace}/{name}" for name, namespace in robot.node.get_node_names_and_namespaces())
    assert "/left/left_policy" in names
    assert robot.node.count_subscribers("/left/image") == 1
    assert robot.node.count_subscribers("/camera/image_raw") == 0


def test_a_parameter_for_another_node_does_not_arm_this_one(robot, start) -> None:
    words = ["-p", "policy.instruction:=go on", "--ros-args", "-p", "left_arm_policy:control.armed:=true"]
    start(*words)
    robot.until(lambda: "state" in robot.diagnostics and robot.actions, robot.send_frame)
    assert robot.diagnostics["state"]["message"] == "disarmed"
    assert robot.commands == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), "policy.checkpoint"),
        (("-p", "policy.name:=opnvla"), "did you mean 'openvla'?"),
        (("-p", "policy.name:=hold", "-p", "robot.urdf:=/nowhere/arm.urdf"), "/nowhere/arm.urdf"),
        (("-p", "policy.name:=hold", "-p", "camera.keys:=[front]"), None),
        (("-p", "control.rate_hz:=quick"), "control.rate_hz"),
        (("--ros-args", "-p", "limits.max_joint_stp:=0.01"), "did you mean 'limits.max_joint_step'?"),
    ],
)
def test_a_node_that_cannot_start_names_the_option(
    robot, start, words: tuple[str, ...], expected: str | None
) -> None:
    if not words:
        pytest.importorskip("torch", reason="the library torch is not installed (extra 'openvla')")
    node = start(*words, main=vla_ros_run)
    if expected is None:  # a policy without an opinion takes any name
        robot.until(lambda: "is ready" in node.log.read_text())
        return
    assert node.process.wait(60) == 1
    log = node.log.read_text()
    assert expected in log
    assert "Traceback" not in log


def test_closing_the_terminal_ends_the_node_with_a_hold(robot, start) -> None:
    """SIGHUP resets a node that runs in the background; one that was started by hand has lost its person."""
    ours, theirs = os.openpty()
    node = moving(robot, start, *ARMED, stdin=theirs)
    node.signal(signal.SIGHUP)
    assert node.process.wait(10) == 0
    assert "ended: the arm holds" in node.log.read_text()
    for end in (ours, theirs):
        os.close(end)


@pytest.mark.parametrize(
    ("options", "horizon", "expected"),
    [
        (
            ("control.schedule:=rtc",),
            8,
            "found rtc, but the policy cannot continue the chunk being executed: using 'blend'",
        ),
        (("control.schedule:=append",), 1, "found append, but the policy returns single steps: using 'sync'"),
        ((), 8, ""),
    ],
)
def test_a_schedule_that_the_policy_does_not_support_is_logged_at_start(
    robot, inside, caplog, options: tuple[str, ...], horizon: int, expected: str
) -> None:
    policy = HoldPolicy(load())
    policy.spec = replace(policy.spec, horizon=horizon)
    inside("control.rate_hz:=20.0", *options, policy=policy)
    assert expected in caplog.text
    assert ("control." in caplog.text) == bool(expected)
