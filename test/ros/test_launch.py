"""The launch files, run by `ros2 launch` from an installed package (`colcon build`).

Regressions pinned: a mistake that is told only after a model was loaded; a middleware that is chosen but not in
force and not named; `ros2 launch` left hanging by a node that ended; one that is ended by SIGTERM or SIGKILL and
leaves an armed node behind.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

pytest.importorskip("rclpy", reason="no ROS 2 is sourced")

from vla_ros.graph.launcher import wait_for_end


def _installed() -> bool:
    from ament_index_python.packages import PackageNotFoundError, get_package_prefix

    try:
        get_package_prefix("vla_ros")
    except PackageNotFoundError:
        return False
    return shutil.which("ros2") is not None


pytestmark = [
    pytest.mark.ros,
    pytest.mark.skipif(
        not _installed(), reason="vla_ros is not in the ament index: colcon build, source, run again"
    ),
]

QUICK = "set:=camera.width:=64;camera.height:=48;robot.urdf:=demo;control.rate_hz:=0.0"
WORDS = "instruction:=hold still"


def show_args(name: str) -> str:
    command = ["ros2", "launch", "vla_ros", name, "--show-args"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_the_command_is_on_the_path_and_finds_its_environment() -> None:
    """Built in a virtual environment, it runs without that being active."""
    command = shutil.which(
        "vla-ros", path=os.environ["PATH"].replace(os.environ.get("VIRTUAL_ENV", "-"), "/nowhere")
    )
    assert command is not None
    assert Path(command).parent.name == "vla_ros", "colcon's, not pip's"
    variables = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    answer = subprocess.run([command, "--version"], env=variables, capture_output=True, text=True, timeout=60)
    assert (answer.returncode, answer.stdout.split()[0]) == (0, "vla_ros"), answer.stderr


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("policy.launch.py", ("config", "checkpoint", "device", "quantization", "camera_topics", "middleware")),
        ("demo.launch.py", ("episodes", "seed", "policy", "checkpoint", "middleware")),
        ("replay.launch.py", ("bag", "output", "config", "checkpoint", "middleware")),
        ("middleware.launch.py", ("middleware", "interface", "width", "height", "cameras")),
    ],
)
def test_every_launch_file_explains_its_arguments(name: str, arguments: tuple[str, ...]) -> None:
    shown = show_args(name)
    for argument in arguments:
        assert f"'{argument}'" in shown
    assert "no description given" not in shown
    assert "'default', 'fastdds', 'cyclonedds', 'iceoryx', 'zenoh'" in shown


def test_the_policy_launch_file_brings_an_active_node(robot, program) -> None:
    launch = program("ros2", "launch", "vla_ros", "policy.launch.py", "policy:=hold", WORDS, QUICK)
    robot.drive()
    robot.wait(lambda: len(robot.actions) >= 3, "actions", 40)
    assert robot.state() == "active"
    assert not robot.commands
    assert "middleware default: " in launch.output
    assert launch.end(timeout=10) == 0
    assert "ended by SIGINT: the arm holds" in launch.output


def test_a_policy_that_answers_with_chunks_is_asked_ahead(robot, program) -> None:
    pytest.importorskip("torch", reason="the library torch is not installed (extra 'openvla')")
    fingers = "robot.gripper_joint_names:=[finger_left, finger_right]"
    options = f"{QUICK.replace('rate_hz:=0.0', 'rate_hz:=20.0')};{fingers};timeouts.inference:=5.0"
    launch = program(
        *("ros2", "launch", "vla_ros", "policy.launch.py", "config:=demo_pi", "schedule:=rtc"),
        *("instruction:=pick up the red cube", "armed:=true", options),
    )
    robot.drive()
    robot.wait(lambda: len(robot.commands) > 60, "commands", 200)
    assert "16 step(s), rtc; " in launch.output
    motions = [(at, message) for at, message in robot.commands if robot.is_motion(message)]
    frames = [message.header.stamp for _, message in motions]
    assert len(motions) > 40
    assert 2 < len({(stamp.sec, stamp.nanosec) for stamp in frames}) < len(frames) / 3, "several commands a chunk"
    assert launch.end(timeout=15) == 0


def test_the_life_of_the_node_under_launch_testing(program, tmp_path) -> None:
    pytest.importorskip("launch_testing", reason="launch_testing is not installed")
    results = tmp_path / "results.xml"
    life = program(
        *(sys.executable, "-m", "launch_testing.launch_test"),
        *(str(Path(__file__).with_name("life.launch_testing.py")), "--junit-xml", str(results)),
    )
    assert life.process.wait(120) == 0, life.output
    assert [case.get("name") for case in ElementTree.parse(results).iter("testcase")] == [
        "test_states_frames_and_commands",
        "test_ended_in_order",
    ]


def test_a_mistake_ends_the_launch_before_anything_starts(program) -> None:
    launch = program("ros2", "launch", "vla_ros", "policy.launch.py", "set:=control.rate:=7")
    assert launch.process.wait(40) != 0
    assert "control.rate: no such parameter; did you mean 'control.rate_hz'?" in launch.output
    assert "process started" not in launch.output


def test_a_node_that_cannot_start_ends_the_launch(program) -> None:
    pytest.importorskip("torch", reason="the library torch is not installed (extra 'openvla')")
    launch = program("ros2", "launch", "vla_ros", "policy.launch.py", "checkpoint:=/nowhere/model")
    assert launch.process.wait(60) == 1
    assert "/nowhere/model" in launch.output


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("chekpoint:=demo", "chekpoint:= is no argument of policy.launch.py; did you mean 'checkpoint'?"),
        ("python:=/nowhere/bin/python", "/nowhere/bin/python: found no such program"),
    ],
)
def test_a_wrong_argument_ends_the_launch(program, argument: str, said: str) -> None:
    launch = program("ros2", "launch", "vla_ros", "policy.launch.py", "policy:=hold", argument)
    assert launch.process.wait(40) != 0
    assert said in launch.output
    assert "Traceback" not in launch.output
    assert "process started" not in launch.output


@pytest.mark.parametrize("name", ["fastdds", "cyclonedds"])
def test_the_launch_reports_an_active_middleware(program, name: str, tmp_path, monkeypatch) -> None:
    from vla_ros.middleware.checks import check_profile
    from vla_ros.middleware.profiles import FrameLoad, sourced_distribution

    monkeypatch.setenv("ROS_HOME", str(tmp_path))
    monkeypatch.delenv("RMW_IMPLEMENTATION", raising=False)
    rmw = {"fastdds": "rmw_fastrtps_cpp", "cyclonedds": "rmw_cyclonedds_cpp"}[name]
    if check_profile(name, FrameLoad(), sourced_distribution(), {**os.environ, "RMW_IMPLEMENTATION": rmw}).fatal:
        pytest.skip(f"{rmw} is not installed")
    launch = program("ros2", "launch", "vla_ros", "policy.launch.py", "policy:=hold", f"middleware:={name}", QUICK)
    launch.wait_for("is ready", 40)
    assert f"middleware {name}: active: {rmw} for 1 camera of 64x48" in launch.output
    assert "[vla_policy]: middleware: active: " in launch.output, "the node sees it too"


@pytest.mark.skipif(shutil.which("iox-roudi") is None, reason="iox-roudi is not installed")
def test_iceoryx_starts_a_roudi_that_outlives_the_launch(program, tmp_path, monkeypatch) -> None:
    from vla_ros.middleware.checks import check_profile
    from vla_ros.middleware.daemons import roudi_is_up
    from vla_ros.middleware.profiles import FrameLoad, sourced_distribution

    if roudi_is_up():
        pytest.skip("another RouDi runs on this host, and there can be only one")
    monkeypatch.setenv("ROS_HOME", str(tmp_path))
    monkeypatch.setenv("RMW_IMPLEMENTATION", "rmw_cyclonedds_cpp")
    report = check_profile("default", FrameLoad(8, 8), sourced_distribution())
    if report.fatal:
        pytest.skip(str(report))
    launch = program("ros2", "launch", "vla_ros", "policy.launch.py", "policy:=hold", "middleware:=iceoryx", QUICK)
    try:
        launch.wait_for("is ready", 60)
        assert "middleware iceoryx: active: rmw_cyclonedds_cpp for 1 camera of 64x48" in launch.output
        assert launch.end(timeout=10) == 0
        assert roudi_is_up()
    finally:
        launch.close()
        started = re.search(r"started iox-roudi, pid (\d+)", launch.output)
        if started:
            os.kill(int(started[1]), signal.SIGKILL)


@pytest.mark.usefixtures("ros2_bag")
def test_the_replay_launch_file_records_the_live_actions_and_reports(program, recorded_bag: Path, tmp_path) -> None:
    from rosbags.rosbag2 import Reader

    output = tmp_path / "replayed"
    words = ("policy:=hold", WORDS, QUICK, f"bag:={recorded_bag}", f"output:={output}")
    launch = program("ros2", "launch", "vla_ros", "replay.launch.py", *words)
    assert launch.process.wait(120) == 0, launch.output
    with Reader(output / "actions") as actions:
        # On a busy machine newer frames overtake older ones, which is what KEEP_LAST(1) is for.
        assert 20 <= actions.message_count <= 41, launch.output
    assert (output / "report.html").exists(), launch.output
    assert "disarmed -> " not in launch.output, "a replay never arms"


def test_a_replay_whose_recorder_dies_ends(program, recorded_bag: Path, tmp_path) -> None:
    (tmp_path / "file").touch()
    words = ("policy:=hold", WORDS, QUICK, f"bag:={recorded_bag}", f"output:={tmp_path / 'file' / 'replayed'}")
    launch = program("ros2", "launch", "vla_ros", "replay.launch.py", *words)
    assert launch.process.wait(60) == 1, launch.output
    assert "the recorder (ros2 bag record) ended too early" in launch.output


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), ("openvla", "demo", "lockstep")),
        (("checkpoint:=demo-pi",), ("pi", "demo-pi", "lockstep")),
        (
            ("checkpoint:=demo-pi", "real_time:=true", "delay_ms:=100", "schedule:=rtc"),
            ("pi", "demo-pi", "real_time"),
        ),
    ],
    ids=["demo", "demo-pi", "demo-pi rtc"],
)
def test_the_demo_launch_file_solves_the_task_with_a_learned_policy(
    program, tmp_path, words: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    pytest.importorskip("torch", reason="the library torch is not installed (extra 'openvla')")
    figures = tmp_path / "demo.json"
    launch = program(
        "ros2", "launch", "vla_ros", "demo.launch.py", "episodes:=2", "seed:=8000", f"json:={figures}", *words
    )
    launch.process.wait(240)
    assert figures.exists(), launch.output
    content = json.loads(figures.read_text())
    assert (content["policy"], content["checkpoint"], content["mode"]) == expected
    if content["mode"] == "lockstep":
        assert [episode["reason"] for episode in content["episodes"]] == ["success"] * 2, launch.output
    else:  # how fast the arm gets there depends on the machine; that it moves does not
        assert content["longest_gap_ms"] is not None, launch.output
        assert content["delay_ms"] == 100
        assert "16 step(s), rtc; " in launch.output


@pytest.mark.parametrize(
    "words",
    [
        ("policy.launch.py", "policy:=hold", WORDS, QUICK),
        ("demo.launch.py", "policy:=expert", "real_time:=true", "episodes:=100"),
    ],
    ids=["policy", "demo"],
)
def test_the_console_is_served_until_the_launch_ends(program, words: tuple[str, ...]) -> None:
    from urllib.request import urlopen

    for library in ("uvicorn", "starlette", "websockets.sync.client"):
        pytest.importorskip(library, reason="a library of the extra 'console' is not installed")
    from websockets.sync.client import connect

    launch, deadline, state = program("ros2", "launch", "vla_ros", *words, "console:=true"), time.time() + 90, ""
    while not (found := re.search(r"http://([\w.]+:\d+)/\?token=(\S+)", launch.output)):
        assert time.time() < deadline, launch.output
        time.sleep(0.1)
    with urlopen(f"http://{found[1]}/healthz", timeout=10) as answer:
        assert answer.status == 200
    address, origin = f"ws://{found[1]}/live?token={found[2]}", f"http://{found[1]}"
    with connect(address, origin=origin, compression=None, proxy=None) as page:
        while state not in ("disarmed", "holding", "armed"):
            assert time.time() < deadline, launch.output
            if isinstance(said := page.recv(30), str):
                told = json.loads(said)
                page.send(json.dumps({"seen": told["beat"]}))
                state = (told["view"] or {}).get("state", "")
    assert launch.end(timeout=20) == 0
    assert "[ERROR] [console" not in launch.output, launch.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_armed_node_does_not_outlive_its_launch(robot, program, number: signal.Signals) -> None:
    """SIGTERM is what a supervisor and `docker stop` send."""
    launch = program("ros2", "launch", "vla_ros", "policy.launch.py", "policy:=hold", WORDS, QUICK, "armed:=true")
    robot.drive()
    robot.wait(lambda: len(robot.commands) > 5, "commands", 40)
    started = re.search(r"vla_policy_node.*process started with pid \[(\d+)\]", launch.output)
    assert started is not None
    told = time.monotonic()
    launch.process.send_signal(number)
    if number == signal.SIGTERM:  # the end of a container's first process kills the others
        assert launch.process.wait(10) != -number, "launch did not handle it"
        assert wait_for_end(int(started[1]), 0.0), "launch did not wait for the node"
    assert wait_for_end(int(started[1]), 8.0), "the node lives on"
    launch.process.wait(10)
    robot.wait(lambda: time.monotonic() > told + 1.5, "what is on its way")
    late = [(at - told, robot.is_motion(message)) for at, message in robot.commands if at > told]
    assert [motion for _, motion in late].count(False) == 1, "one hold"
    assert not late[-1][1], "the hold is the last"
    assert late[-1][0] < 1.0
