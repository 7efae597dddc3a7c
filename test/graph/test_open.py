import subprocess
import sys

import pytest

from vla_ros.errors import ConfigError, MissingDependencyError, install
from vla_ros.graph import open_graph


def test_unknown_backend():
    with pytest.raises(ConfigError, match=r"'ros1'.*auto, rclpy, dds"):
        open_graph("ros1")


def test_auto_takes_rclpy_where_it_imports_else_dds(conftest_reasons):
    rclpy_reason, dds_reason = conftest_reasons
    if rclpy_reason and dds_reason:
        pytest.skip("no backend is installed")
    with open_graph() as graph:
        assert graph.backend == ("dds" if rclpy_reason else "rclpy")
        assert "domain" in graph.describe()


def test_without_a_backend_the_error_names_both_remedies(monkeypatch):
    monkeypatch.setitem(sys.modules, "rclpy", None)
    monkeypatch.setitem(sys.modules, "cyclonedds", None)
    monkeypatch.setitem(sys.modules, "cyclonedds.core", None)
    with pytest.raises(MissingDependencyError) as caught:
        open_graph()
    assert install("dds") in str(caught.value)
    assert "source /opt/ros/" in str(caught.value)


def test_a_missing_rclpy_is_an_error_if_it_was_chosen(monkeypatch):
    monkeypatch.setitem(sys.modules, "rclpy", None)
    with pytest.raises(MissingDependencyError, match="source"):
        open_graph("rclpy")


def test_importing_the_room_loads_no_middleware():
    script = (
        "import sys, vla_ros.graph;"
        "assert not {'cyclonedds', 'rosbags', 'rclpy', 'torch', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
