"""What the command line of ``vla-ros run`` makes of its arguments; the node itself is tested in test/node."""

from __future__ import annotations

import pytest

from vla_ros.cli import main as cli
from vla_ros.config import Config
from vla_ros.node import run


@pytest.fixture
def served(monkeypatch):
    """What was to be served: the tree of options and the ROS arguments."""
    calls: list[tuple[Config, list[str]]] = []

    def serve(config, ros_args, *, stats):
        calls.append((config, ros_args))
        return 0

    monkeypatch.setattr(run, "serve", serve)
    return calls


def test_ros_parameters_are_options_too(served, tmp_path):
    file = tmp_path / "robot.yaml"
    file.write_text("/**:\n  ros__parameters:\n    policy: {name: hold}\n    control: {rate_hz: 4.0}\n")
    ros_args = ["--ros-args", "--params-file", str(file), "-p", "control.rate_hz:=7.0", "-p", "use_sim_time:=true"]
    assert cli.main(["run", "-p", "policy.instruction:=wave", *ros_args]) == 0
    [(config, passed_on)] = served
    assert (config.policy.name, config.policy.instruction, config.control.rate_hz) == ("hold", "wave", 7.0)
    assert passed_on == ros_args


def test_a_wrong_name_after_ros_args_is_refused(served, capsys):
    assert cli.main(["run", "--ros-args", "-p", "policy.nmae:=hold"]) == 1
    assert "did you mean 'policy.name'?" in capsys.readouterr().err
    assert not served
