"""What the robot publishes as obstacles: walls that the node understands, and faults of which it takes none."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("rosbags", reason="the library rosbags is not installed (extra 'dds')")

from tools.faults import surroundings
from tools.faults.driver import ARM, HOME
from vla_ros.collision.world import make_world
from vla_ros.config import load
from vla_ros.graph.messages import message_types
from vla_ros.kinematics.solver import Kinematics
from vla_ros.node.scene import SceneTopic


@pytest.fixture
def sent() -> list:
    return []


@pytest.fixture
def robot(sent) -> surroundings.Surroundings:
    node = SimpleNamespace(create_publisher=lambda *_: SimpleNamespace(publish=sent.append))
    graph = SimpleNamespace(message=message_types().message, qos=lambda name: name)
    return surroundings.Surroundings(graph, node, lambda *_, **__: None)


def test_the_node_understands_the_walls_and_no_fault(robot, sent) -> None:
    config = load((), ["robot.urdf:=demo", "robot.tip_frame:=tool"])
    world = make_world(config, {"arm": Kinematics.from_urdf("demo")})
    taken, refused = [], []
    check = SimpleNamespace(world=world, steady=lambda: 0.0, set_scene=lambda bodies, age: taken.append(bodies))
    current = SimpleNamespace(current=config)
    context = SimpleNamespace(options=current, throttled=SimpleNamespace(log=lambda *what: refused.append(what)))
    wiring = SimpleNamespace(subscribe_from=lambda *_: None, timer=lambda *_: None)
    scene = SceneTopic(context, wiring, check)
    robot.become("walls", np.array(HOME[: len(ARM)]))
    scene.take(sent[-1])
    assert (len(taken[-1]), refused) == (4, [])
    for _ in range(len(surroundings._WRONG)):
        robot.become("malformed", np.array(HOME[: len(ARM)]))
        taken.clear()
        refused.clear()
        scene.take(sent[-1])
        assert (taken, len(refused)) == ([], 1), sent[-1]
    robot.become("mesh", np.array(HOME[: len(ARM)]))
    scene.take(sent[-1])
    assert [bool(body.unknown) for body in taken[-1]] == [True], "its shape is not known, so that the arm holds"
    scene.take(robot.cleared())
    assert taken[-1] == []
    count = len(sent)
    robot.become("silent", np.array(HOME[: len(ARM)]))
    assert len(sent) == count
