import ast
import json
import re
import runpy
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from vla_ros.config import Config, node_topics
from vla_ros.errors import EXTRAS

CONFIG = Path(__file__).parent.parent / "config"
NAMES = (*Config().camera.topics, *vars(Config().topics).values(), *vars(node_topics).values(), "/camera/image_raw")
TOPICS = {topic.replace("~", "/vla_policy") for topic in NAMES if isinstance(topic, str)}


def test_foxglove_shows_topics_that_exist_and_every_panel_is_placed() -> None:
    layout = json.loads((CONFIG / "foxglove.json").read_text())
    text = json.dumps(layout["configById"])
    named = {
        name.split(".")[0]
        for name in re.findall(r'"(?:imageTopic|topicPath|value|topicToRender)": "([^"]+)"', text)
    }
    assert named <= TOPICS, named - TOPICS
    placed = set(re.findall(r'"(\w+!\w+)"', json.dumps(layout["layout"])))
    assert placed == set(layout["configById"])


def test_rviz_shows_topics_that_exist() -> None:
    displays = yaml.safe_load((CONFIG / "vla_ros.rviz").read_text())["Visualization Manager"]["Displays"]
    named = {display["Topic"]["Value"] for display in displays if "Topic" in display}
    assert named
    assert named <= TOPICS


def test_package_xml_names_the_packages_of_the_messages_that_every_node_can_need() -> None:
    """Others come with the driver (a gripper, MoveIt Servo) or the client (rosetta) that needs them."""
    named = set(ElementTree.parse(CONFIG.parent / "package.xml").getroot().itertext())
    code = "".join(file.read_text() for file in (CONFIG.parent / "src" / "vla_ros" / "node").rglob("*.py"))
    used = set(re.findall(r'"(\w+)/(?:msg|srv|action)/\w+"', code))
    assert "sensor_msgs" in used
    assert used - {"control_msgs", "franka_msgs", "moveit_msgs", "rosetta_interfaces"} <= named


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What setup.py tells setuptools."""
    words: dict[str, Any] = {}
    monkeypatch.setattr("setuptools.setup", lambda **given: words.update(given))
    monkeypatch.chdir(CONFIG.parent)
    runpy.run_path("setup.py")
    return words


def test_a_policy_whose_library_is_missing_can_name_an_extra(described: dict[str, Any]) -> None:
    """``policy.name: pi`` without torch advised ``pip install vla_ros``, which was installed."""
    policies = {point.split(" = ")[0] for point in described["entry_points"]["vla_ros.policies"]}
    assert policies - set(described["extras_require"]) == {"expert", "hold", "wiggle"}


REQUIRED = {"PIL", "cv2", "numpy", "pinocchio", "rich", "simplejpeg", "yaml"}
EXPLAINED = {"coal", "draccus", "hppfcl", "jinja2", "lerobot", "triton", "vla_eval"}
"""Come with another library or belong into a Python of their own; the code that imports them says so."""
ROS = {"launch", "launch_ros", "rcl_interfaces", "rclpy"}


def test_every_optional_library_has_an_extra_that_installs_it(described: dict[str, Any]) -> None:
    imported = set[str]()
    for path in (CONFIG.parent / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(str(node.module).partition(".")[0])
    optional = (
        imported
        - REQUIRED
        - EXPLAINED
        - ROS
        - {"vla_ros", "vla_ros_models", "vla_ros_lab"}
        - sys.stdlib_module_names
    )
    assert optional == EXTRAS.keys()
    distributions = packages_distributions()
    for library, extra in EXTRAS.items():
        listed = {re.split(r"[^\w-]", each)[0] for each in described["extras_require"][extra]}
        names = {name.replace("_", "-") for name in (library, f"py{library}", *distributions.get(library, ()))}
        assert listed & names, f"extra '{extra}' does not install {library}"


def test_every_extra_that_is_asked_for_exists(described: dict[str, Any]) -> None:
    """In pages, in the Dockerfile and in messages."""
    root = CONFIG.parent
    pages = [root / "README.md", root / "Dockerfile", root / "Makefile", *root.glob(".ci/*")]
    asked = set[str]()
    for path in (*pages, *root.glob("docs/**/*.md"), *(root / "src").rglob("*.py")):
        for listed in re.findall(r"(?:vla_ros|['\" ]\.)\[([a-z, ]+)\]", path.read_text("utf-8")):
            asked |= {extra.strip() for extra in listed.split(",")}
    assert {"openvla", "replay", "sim", "serve"} <= asked
    assert asked <= set(described["extras_require"])


def test_package_xml_names_what_the_suite_needs() -> None:
    root = ElementTree.parse(CONFIG.parent / "package.xml").getroot()
    named = {depend.text for depend in root.iter("test_depend")}
    assert {"python3-pytest", "python3-pytest-timeout", "python3-hypothesis"} <= named
