import itertools
import json
import os
import time
import urllib.request
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
from scripted_node import ScriptedPolicy

from vla_ros.vision.decode import decode_image
from vla_ros.vision.messages import encode_image

STATUS, DEBUG = "/vla_policy/status", "/vla_policy/debug_image"


def listen(robot: Any, kind: str, topic: str, qos: str, heard: list[Any], raw: bool = False) -> None:
    graph = robot.graph
    robot.node.create_subscription(graph.message(kind), topic, heard.append, graph.qos(qos), raw=raw)


def test_every_frame_has_one_line_in_the_trace(robot, start, tmp_path) -> None:
    """Frames that are answered, replaced, undecodable, from the future, repeated and late."""
    trace = tmp_path / "trace.jsonl"
    words = ["-p", "control.armed:=true", "-p", "policy.instruction:=go on", "-p", f"node.trace:={trace}"]
    node = start(*words, "-p", "timeouts.inference:=0.2")
    robot.until(lambda: len(robot.commands) > 5, robot.send_frame)
    answered = {robot.command_stamp(index) for index in range(2, len(robot.commands))} & robot.sent
    image = np.zeros((48, 64, 3), np.uint8)

    def bad() -> None:
        robot.send_frame(encode_image(image[..., :2], robot.now(), "camera", "16UC1"))
        robot.send_frame(encode_image(image, robot.now() + 10**12, "camera"))
        robot.send_frame(encode_image(image, robot.send_frame(), "camera"))

    def dropped(*reasons: str) -> bool:
        return all(f"dropped/{reason}" in robot.diagnostics.get("camera", {}) for reason in reasons)

    robot.until(lambda: dropped("image_invalid", "frame_from_future", "frame_repeated"), bad)
    robot.instruct("slow")
    robot.until(lambda: dropped("inference_late", "replaced"), robot.send_frame)
    robot.instruct("x" * 10_000)
    robot.instruct("go on")
    moved = len(robot.commands)
    robot.until(lambda: len(robot.commands) > moved + 1, robot.send_frame)
    assert node.end() == 0
    frames = json.loads(node.stats.read_text())["frames"]
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    followed = {line["stamp"]: line for line in lines if line["outcome"] == "command"}
    assert answered <= set(followed)
    for stamp, line in followed.items():
        assert stamp <= line["times"]["received"] <= line["times"]["sent"]
        assert {"preprocess", "inference", "control"} <= set(line["stages_ms"])
    outcomes = Counter(line["outcome"] for line in lines)
    assert outcomes["command"] + outcomes["shown"] == frames["used"]
    assert {name: count for name, count in outcomes.items() if name not in {"command", "shown"}} == frames[
        "dropped"
    ]
    assert 0 <= frames["received"] - outcomes.total() <= 1, "at most the frame that waits is not accounted for"


def test_status_reaches_a_late_subscriber_and_follows_each_change(robot, inside) -> None:
    inside()
    robot.until(lambda: robot.commands, robot.send_frame)
    heard: list[Any] = []
    listen(robot, "std_msgs/msg/String", STATUS, "instruction", heard)

    def said() -> dict[str, Any]:
        return json.loads(heard[-1].data) if heard else {}

    robot.until(lambda: said().get("state") == "armed", robot.send_frame)
    assert said()["instruction"] == "go on"
    robot.until(lambda: "camera_stale" in said()["holds"], robot.send_joints)
    robot.stop()
    robot.until(lambda: said()["stopped_by"] == "operator_stop", robot.send_joints)
    assert said()["counters"]["operator_stop"] == 1
    assert "reset" in said()["explanation"]


def test_the_viewpoint_adapter_is_named(robot, inside) -> None:
    policy = ScriptedPolicy()
    policy.spec = replace(policy.spec, view="ab" * 32)
    inside(policy=policy)
    robot.until(lambda: robot.status.get("view") == "ab" * 32, robot.send_frame)
    robot.until(lambda: robot.diagnostics.get("policy", {}).get("view") == "ab" * 32, robot.send_frame)


def test_the_debug_image_is_published_for_subscribers(robot, inside) -> None:
    inside("control.armed:=false")
    robot.until(lambda: len(robot.actions) > 3, robot.send_frame)
    publisher = robot.node.get_publishers_info_by_topic(DEBUG)
    assert len(publisher) == 1
    heard: list[Any] = []
    listen(robot, "sensor_msgs/msg/Image", DEBUG, "diagnostics", heard, raw=True)
    robot.until(lambda: heard, robot.send_frame)
    shown = decode_image(heard[-1])
    assert shown.image.shape == (448, 448, 3)
    assert shown.stamp in robot.sent


def test_diagnostics_say_why_messages_do_not_arrive_and_what_to_do(robot, inside) -> None:
    text = robot.graph.message("std_msgs/msg/String")
    inside("camera.topics:=[/nowhere]", "timeouts.publisher:=1.0")
    robot.until(lambda: "topics" in robot.diagnostics, robot.send_joints)
    loud = robot.node.create_publisher(text, "/vla_policy/instruction", robot.graph.qos("camera"))
    wanted = {"no_publisher /nowhere", "incompatible_qos /vla_policy/instruction"}
    robot.until(lambda: wanted <= set(robot.diagnostics["topics"]), robot.send_joints)
    part = robot.diagnostics["topics"]
    assert part["level"] == 1
    assert "Is the driver running" in part["no_publisher /nowhere"]
    robot.node.destroy_publisher(loud)
    robot.until(lambda: robot.diagnostics["topics"]["message"] == "no_publisher /nowhere", robot.send_joints)


def test_tokens_outside_the_action_bins_raise_a_warning(robot, inside) -> None:
    """A wrong prompt or image makes OpenVLA say words; they are clipped to actions and nothing else shows it."""
    inside("control.armed:=false")
    robot.until(lambda: "policy" in robot.diagnostics, robot.send_frame)
    assert robot.diagnostics["policy"]["level"] == 0
    robot.instruct("clipped")
    robot.until(lambda: robot.diagnostics["policy"]["level"] == 1, robot.send_frame)
    assert robot.says("were not action tokens", "policy")
    assert robot.diagnostics["policy"]["outside_bins"] == "2"
    assert int(robot.diagnostics["state"]["count/outside_bins"]) >= 2
    robot.instruct("go on")
    robot.until(lambda: robot.diagnostics["policy"]["level"] == 0, robot.send_frame)


def test_metrics_are_those_of_the_node(robot, inside) -> None:
    port = 20_000 + os.getpid() % 10_000
    inside("control.armed:=false", f"node.metrics_port:={port}")
    robot.until(lambda: len(robot.actions) > 3, robot.send_frame)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    values = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}
    assert values['vla_ros_state{state="disarmed"}'] == 1
    assert values["vla_ros_frames_used_total"] >= 3
    assert values["vla_ros_resident_bytes"] > 10**7
    assert values["vla_ros_commands_total"] == 0


def test_a_dry_run_reports_the_frame_age(robot, inside) -> None:
    node = inside("control.armed:=false")
    delay = 300_000_000
    image = np.zeros((48, 64, 3), np.uint8)
    robot.until(
        lambda: robot.says("frame age p50", "latency"),
        lambda: robot.send_frame(encode_image(image, robot.now() - delay, "camera")),
    )
    latency = robot.diagnostics["latency"]
    assert float(latency["frame_age/p50_ms"]) >= 300 + float(latency["inference/p50_ms"])
    assert node.stats.frames()["commands"] == 0


def test_invalid_joint_states_are_logged(robot, inside, caplog) -> None:
    robot.positions[2] = float("nan")
    inside("control.armed:=false")
    robot.until(lambda: "joint_state_invalid: joint 'joint_3' is nan" in caplog.text, robot.send_frame)
    assert "no joint state yet" not in caplog.text


def test_frequent_instructions_do_not_flood_the_log(robot, inside, caplog) -> None:
    node = inside()
    began, numbers = time.monotonic(), itertools.count()
    robot.until(lambda: time.monotonic() - began > 1.5, lambda: robot.instruct(f"number {next(numbers)}"))
    last = node.inputs.snapshot.instruction
    robot.until(lambda: f"instruction: {last}" in caplog.text)
    assert next(numbers) > 20
    assert caplog.text.count("instruction: number") <= 4
