"""README, docs/ and the package's papers: links, extras, dependencies and the site, without a network."""

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from tools.docs_site import FENCE, LINK, anchors
from tools.size import ROOT

PAGES = (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))
ROSDEP_KEYS = {
    "action_msgs", "ament_flake8", "ament_index_python", "ament_pep257", "builtin_interfaces", "control_msgs",
    "cv_bridge", "diagnostic_msgs", "geometry_msgs", "launch", "launch_ros", "launch_testing", "lifecycle_msgs",
    "python3-hypothesis", "python3-numpy", "python3-pil", "python3-prometheus-client", "python3-pytest",
    "python3-pytest-timeout", "python3-yaml", "rcl_interfaces", "rclpy", "ros2bag", "ros2launch",
    "rosbag2_storage_mcap", "sensor_msgs", "std_msgs", "std_srvs", "tf2_msgs", "trajectory_msgs",
    "visualization_msgs",
}  # fmt: skip
"""Keys of rosdep/python.yaml, and packages that Humble and Jazzy released; rosdistro of 2026-08-22 (8468e88)."""
OPTIONAL = {"moveit_msgs", "foxglove_msgs", "ffmpeg_image_transport_msgs", "franka_msgs", "interbotix_xs_msgs"}
"""Packages of messages that are only read in bags, or used with one driver, which brings them."""
OF_RCLPY = {"rosgraph_msgs"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for _, target in LINK.findall(FENCE.sub("", page.read_text("utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{target}: no such file"
        assert not anchor or anchor in anchors(found.read_text("utf-8")), f"{target}: no such heading"


def test_package_xml_names_what_rosdep_knows_and_every_package_of_messages() -> None:
    package = ElementTree.parse(ROOT / "package.xml").getroot()
    keys = {
        each.text
        for kind in ("exec_depend", "test_depend", "depend", "build_depend")
        for each in package.iter(kind)
    }
    assert keys <= ROSDEP_KEYS, "look it up in rosdistro, then add it here"
    text = "".join(path.read_text("utf-8") for path in (ROOT / "src/vla_ros").rglob("*.py"))
    used = set(re.findall(r"[\"'/]([a-z][a-z0-9_]*_(?:msgs|srvs))/(?:msg|srv|action)/", text))
    assert {"sensor_msgs", "std_srvs", "control_msgs"} <= used
    assert used - keys <= OPTIONAL | OF_RCLPY


def test_ci_runs_what_a_contributor_runs() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yaml").read_text("utf-8"))["jobs"]
    for job in jobs.values():
        assert job["steps"][-1] == {"run": ".ci/run"}
    run = (ROOT / ".ci/run").read_text("utf-8")
    assert all(command in run for command in ("make test", "make docs-check", ".ci/lerobot", ".ci/colcon"))


def test_the_readme_is_short_and_its_moving_picture_small() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert len(text.split()) <= 1200
    pictures = [ROOT / target for _, target in LINK.findall(text) if target.endswith((".webp", ".gif"))]
    assert len(pictures) == 1
    from PIL import Image

    with Image.open(pictures[0]) as picture:
        assert picture.n_frames > 20  # type: ignore[attr-defined]
    assert pictures[0].stat().st_size < 2e6


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed (extra 'dev')")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    assert (tmp_path / "safety.html").exists()
