"""The houses without their neighbours: imports that a house does not need are blocked in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools.size import ROOT

BLOCKED = """
import importlib.abc, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"{{name}} is blocked in this test", name=name)

sys.meta_path.insert(0, Blocked())
"""
ROBOT_NEEDS_NOT = ("torch", "triton", "transformers", "mujoco", "lerobot", "vla_ros_models", "vla_ros_lab")
MODELS_NEED_NOT = ("rclpy", "cyclonedds", "mujoco", "launch", "vla_ros_lab")
NO_ROS = {"launch", "launch_ros", "rclpy", "rosidl_runtime_py", "ament_index_python", "rcl_interfaces", "ray"}


def run(blocked: tuple[str, ...], script: str, status: int = 0) -> str:
    """Run a script with imports blocked; return what it printed."""
    command = [sys.executable, "-c", BLOCKED.format(blocked=blocked) + script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def modules(house: str) -> list[str]:
    folder = ROOT / "src" / house
    names = (path.relative_to(folder.parent).with_suffix("").parts for path in folder.rglob("*.py"))
    return sorted(".".join(name).removesuffix(".__init__") for name in names if name[-1] != "__main__")


IMPORT_ALL = """
import importlib
for name in {names!r}:
    try:
        importlib.import_module(name)
    except Exception as error:
        missing = error if isinstance(error, ModuleNotFoundError) else error.__cause__
        if str(getattr(missing, "name", "")).split(".")[0] not in {optional!r}:
            raise
"""


def test_every_module_of_the_robot_is_imported_without_torch_and_the_other_houses() -> None:
    names = modules("vla_ros")
    assert len(names) > 150
    run(ROBOT_NEEDS_NOT, IMPORT_ALL.format(names=names, optional=NO_ROS))


def test_every_module_of_the_models_is_imported_without_a_graph_and_the_laboratory() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    names = modules("vla_ros_models")
    assert len(names) > 60
    run(MODELS_NEED_NOT, IMPORT_ALL.format(names=names, optional={"lerobot"}))


RUN = "from vla_ros.cli.main import main; sys.exit(main({command!r}))"
ROBOT = """
vla_policy:
  ros__parameters:
    policy: {name: hold, instruction: wait}
    robot: {urdf: demo, tip_frame: tool, gripper_joint_names: [finger_left, finger_right]}
    gripper: {open_position: 0.04}
"""


def test_the_options_are_printed_without_torch_and_the_other_houses() -> None:
    assert "rate_hz" in run(ROBOT_NEEDS_NOT, RUN.format(command=["config"]))


def test_a_policy_that_needs_no_model_runs_without_torch_and_the_other_houses(tmp_path: Path) -> None:
    (tmp_path / "robot.yaml").write_text(ROBOT, encoding="utf-8")
    command = ["run", "--dry-run", "--config", str(tmp_path / "robot.yaml")]
    assert "image" in run(ROBOT_NEEDS_NOT, RUN.format(command=command))


LAUNCH_NEEDS_NOT = ("cv2", "PIL", "simplejpeg", "rich", "pinocchio", *ROBOT_NEEDS_NOT[:4])


@pytest.mark.parametrize("checkpoint", ["demo", "demo-pi"])
def test_a_launch_process_plans_the_demo_with_what_the_python_of_ros_has(checkpoint: str) -> None:
    """``demo.launch.py`` failed with "No module named 'cv2'" where OpenCV is in the node's environment only."""
    plan = "from vla_ros_lab.eval.arguments import parse, plan_demo\n"
    plan += f"plan_demo(parse('--checkpoint', {checkpoint!r}))\n"
    names = [name for name in modules("vla_ros") if name.startswith("vla_ros.launching")]
    assert len(names) > 4
    launches = [*names, "vla_ros_lab.launches"]
    run(LAUNCH_NEEDS_NOT, plan + IMPORT_ALL.format(names=launches, optional={"launch", "launch_ros"}))


def test_doctor_names_a_house_that_cannot_be_imported() -> None:
    found = run(("vla_ros_lab",), RUN.format(command=["doctor"]), status=1)
    assert "house laboratory" in found
    assert "house models" not in found


def test_a_policy_infers_from_plain_python() -> None:
    """The example of docs/house-models.md, without a node and without anything that belongs to a graph."""
    pytest.importorskip("torch")
    page = (ROOT / "docs" / "house-models.md").read_text(encoding="utf-8")
    example = page.split("```python\n")[1].split("```")[0]
    assert "(1, 7)" in run(MODELS_NEED_NOT, example)


@pytest.mark.parametrize("module", ["types", "errors", "config", "files", "process", "houses"])
def test_what_every_row_may_import_is_imported_alone(module: str) -> None:
    """``files`` and ``config`` imported each other: whoever began with ``files`` failed."""
    command = [sys.executable, "-c", f"import vla_ros.{module}"]
    assert subprocess.run(command, capture_output=True, text=True, check=False).stderr == ""
