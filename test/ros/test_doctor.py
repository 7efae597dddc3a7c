import os
import subprocess
import sys

import pytest

rclpy = pytest.importorskip("rclpy", reason="no ROS 2 is sourced")

pytestmark = pytest.mark.ros


def answer(rmw: str, *words: str) -> str:
    """What ``vla-ros`` prints with ``RMW_IMPLEMENTATION`` set to ``rmw``, or not set."""
    variables = {name: value for name, value in os.environ.items() if name != "RMW_IMPLEMENTATION"}
    variables |= {"RMW_IMPLEMENTATION": rmw} if rmw else {}
    command = [sys.executable, "-m", "vla_ros.cli", *words]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False).stdout


@pytest.fixture
def default(monkeypatch: pytest.MonkeyPatch) -> str:
    """The RMW that rclpy takes where none is named."""
    monkeypatch.delenv("RMW_IMPLEMENTATION", raising=False)
    question = "import rclpy; print(rclpy.get_rmw_implementation_identifier())"
    return subprocess.check_output([sys.executable, "-c", question], text=True).strip()


SMALL = ("-p", "camera.width:=64", "-p", "camera.height:=48")


@pytest.mark.parametrize("words", [("doctor",), ("middleware", "default", "--check", *SMALL)])
def test_the_rmw_of_rclpy_is_named(default: str, words: tuple[str, ...]) -> None:
    assert f" {default}" in answer("", *words)


@pytest.mark.parametrize("words", [("doctor",), ("middleware", "default", "--check")])
def test_an_rmw_that_is_not_installed_is_named_with_its_package(words: tuple[str, ...]) -> None:
    said = answer("rmw_nonsense_cpp", *words)
    assert "rmw_nonsense_cpp" in said
    assert "ros-jazzy-rmw-nonsense-cpp".replace("jazzy", os.environ["ROS_DISTRO"]) in said
