"""The commands of `vla-ros` with which a person at a terminal operates running nodes."""

import json
from pathlib import Path

import pytest

from vla_ros.cli.main import main
from vla_ros.control.safety import State
from vla_ros.graph import open_graph

WITH = ("--backend", "dds")


def states(*nodes: object) -> list[State]:
    return [node.safety.state for node in nodes]


def test_one_node_is_armed_instructed_stopped_and_reset(robot, inside, capsys, tmp_path: Path) -> None:
    node = inside("control.armed:=false")
    robot.until(lambda: "state" in robot.status, robot.send_frame)
    assert main(["arm", *WITH]) == 0
    assert node.safety.state in (State.ARMED, State.HOLDING)
    assert main(["instruct", "wave at the door", *WITH]) == 0
    assert node.inputs.snapshot.instruction == "wave at the door"
    assert main(["stop", *WITH]) == 0
    assert states(node) == [State.STOPPED]
    assert "stopped by operator_stop" in capsys.readouterr().out
    assert main(["arm", *WITH]) == 1, "a stop holds until a reset"
    assert main(["reset", *WITH]) == 0
    assert main(["status", *WITH, "--json", str(tmp_path / "status.json")]) == 0
    told = json.loads((tmp_path / "status.json").read_text(encoding="utf-8"))["nodes"]["/vla_policy"]
    assert (told["state"], told["instruction"]) == ("disarmed", "wave at the door")
    assert main(["instruct", "x" * 600, *WITH]) == 1
    assert "/vla_policy: refused" in capsys.readouterr().out


def test_several_nodes_are_stopped_and_disarmed_together_but_armed_by_name(robot, inside, capsys) -> None:
    first = inside("control.armed:=false")
    apart = ("-r", "__node:=second", "-r", "/arm/joint_command:=/second/joint_command")
    second = inside("control.armed:=false", ros_args=("--ros-args", *apart))
    assert main(["arm", *WITH]) == 1
    error = capsys.readouterr().err
    assert "found 2 nodes; name one:" in error
    assert "--node /second" in error
    assert states(first, second) == [State.DISARMED] * 2
    assert main(["arm", "--node", "second", *WITH]) == 0
    assert first.safety.state is State.DISARMED
    assert main(["disarm", *WITH]) == 0
    assert states(first, second) == [State.DISARMED] * 2
    assert main(["stop", *WITH]) == 0
    assert states(first, second) == [State.STOPPED] * 2


def test_a_name_that_two_nodes_have_is_not_armed(robot, inside, capsys) -> None:
    node = inside("control.armed:=false")
    with open_graph("dds") as graph:
        graph.create_node("vla_policy")
        assert main(["arm", *WITH]) == 1
    assert "2 nodes are called /vla_policy" in capsys.readouterr().err
    assert states(node) == [State.DISARMED]


@pytest.mark.parametrize(("node", "said"), [("", "no policy node within"), ("nobody", "no node /nobody within")])
def test_nobody_to_stop_is_an_error(robot, capsys, node: str, said: str) -> None:
    assert main(["stop", *WITH, "--timeout", "0.3", "--node", node]) == 1
    assert said in capsys.readouterr().err
