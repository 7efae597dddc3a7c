"""Markers of ``collision.scene`` as obstacles: what they are, where they are, and what is refused."""

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vla_ros.config import build
from vla_ros.control.collision import CollisionCheck
from vla_ros.control.command import Command
from vla_ros.control.reasons import Reason, Refused
from vla_ros.graph.messages import message_types
from vla_ros.graph.origin import Origin
from vla_ros.kinematics.solver import Kinematics
from vla_ros.node.scene import SceneTopic
from vla_ros.types import JointState

ARM = Kinematics.from_urdf("demo")
HOME = np.array([0.0, 0.438, 0.0, 1.834, 0.0, 0.8696, 0.0])
FINGERS = ("finger_left", "finger_right")
SECOND = 1_000_000_000


def joints(q: np.ndarray, stamp: int = 1) -> JointState:
    return JointState((*ARM.joint_names, *FINGERS), np.array([*q, 0.04, 0.04]), stamp)


class Scene:
    """The demo's check and its topic; joint states by stamp, and time that stands still."""

    def __init__(self, **options: Any) -> None:
        values = {"robot.urdf": "demo", "robot.gripper_joint_names": list(FINGERS), "collision.check": True}
        values |= {"collision.deceleration": 10.0, "collision.scene": "/obstacles"}
        config = build(values | {f"collision.{name}": value for name, value in options.items()})
        self.check, self.now, self.said = CollisionCheck(config, {"arm": ARM}), 0.0, list[str]()
        self.check.steady = clock = lambda: self.now
        self.states: dict[int, JointState] = {}
        context: Any = SimpleNamespace(
            options=SimpleNamespace(current=config),
            clock=SimpleNamespace(awake=clock, steady=clock),
            suspension=SimpleNamespace(note_arrival=lambda *_: self.now),
            throttled=SimpleNamespace(log=lambda kind, text, severity: self.said.append(text)),
        )
        wiring: Any = SimpleNamespace(timer=lambda *_: None)
        self.topic = SceneTopic(context, wiring, self.check, self._joints_at)

    def _joints_at(self, stamp: int) -> dict[str, JointState]:
        return {"arm": self.states[stamp]} if stamp in self.states else {}

    def take(self, *markers: Any, origin: Origin = Origin()) -> None:  # noqa: B008 - it is immutable
        self.topic.take(
            message_types().message("visualization_msgs/msg/MarkerArray")(markers=list(markers)), origin
        )

    def place(self) -> np.ndarray:
        """Where the only obstacle is, with the arm at home."""
        [body] = self.check.scene
        assert self.check.world is not None
        frames = self.check.world.tree.forward(np.array([[*HOME, 0.04, 0.04]]))[:, 0]
        found: np.ndarray = (frames[body.frame] @ body.pieces[0].place)[:3, 3]
        return found

    def limit(self, step: float = 0.0) -> float:
        q = HOME + step
        command = Command((*ARM.joint_names, *FINGERS), joints(q).positions, 1, velocity=np.zeros(7), duration=0.1)
        return self.check.limit([command], {"arm": joints(HOME)})


def marker(kind: int = 1, at: Any = (0.9, 0.0, 0.3), size: float = 0.1, **fields: Any) -> Any:
    make = message_types().message
    found = make("visualization_msgs/msg/Marker")()
    found.type, found.header.frame_id, found.ns = kind, fields.pop("frame", "base_link"), fields.pop("ns", "camera")
    found.header.stamp.sec, found.header.stamp.nanosec = divmod(fields.pop("stamp", 0), SECOND)
    for name, value in zip("xyz", at, strict=True):
        setattr(found.pose.position, name, float(value))
        setattr(found.scale, name, float(size))
    found.pose.orientation.w = 1.0
    point = make("geometry_msgs/msg/Point")
    found.points = [point(x=0.1 * number, y=0.0, z=0.0) for number in range(fields.pop("points", 0))]
    for name, value in fields.items():
        setattr(found, name, value)
    return found


def test_a_marker_in_the_frame_of_a_moving_link_stays_where_it_was_at_its_stamp() -> None:
    scene, then = Scene(), HOME + 0.3 * np.eye(7)[0]
    seen = 0.2 * np.eye(3)[2]
    scene.states = {5 * SECOND: joints(then), 6 * SECOND: joints(HOME), 0: joints(HOME)}
    for stamp, q in ((5 * SECOND, then), (6 * SECOND, HOME), (0, HOME)):
        scene.take(marker(2, seen, frame="tool", stamp=stamp))
        tip = ARM.forward(q)
        np.testing.assert_allclose(scene.place(), tip.position + tip.rotation @ seen, atol=1e-6)
        assert scene.check.scene[0].frame == 0, "it does not move with the link"
    assert scene.said == []


def test_a_marker_that_is_locked_to_a_moving_link_moves_with_it() -> None:
    scene = Scene()
    scene.take(marker(2, (0, 0, 0.2), frame="tool", frame_locked=True))
    tip = ARM.forward(HOME)
    np.testing.assert_allclose(scene.place(), tip.position + tip.rotation @ [0, 0, 0.2], atol=1e-6)
    assert scene.check.scene[0].frame != 0


def test_without_a_joint_state_at_its_stamp_a_marker_in_a_moving_frame_is_refused() -> None:
    scene = Scene(scene_required=True)
    scene.take(marker())
    scene.now = 1.5
    scene.take(marker(2, (0, 0, 0.2), frame="tool", stamp=7 * SECOND))
    assert [each.frame for each in scene.check.scene] == [0]
    assert "'tool' moves" in scene.said[-1]
    assert "no joint state of arm" in scene.said[-1]
    with pytest.raises(Refused) as refused:
        scene.limit()
    assert refused.value.reason is Reason.SCENE_STALE


def test_a_mesh_of_unknown_shape_holds_the_arm_until_it_is_gone() -> None:
    scene = Scene()
    assert scene.limit() == 1.0
    scene.take(marker(10, (5.0, 0, 0), mesh_resource="/tmp/secret\x1b[2J.stl"))
    with pytest.raises(
        Refused, match=r"scene:camera/0: the mesh '/tmp/secret.* not in collision.scene_meshes"
    ) as found:
        scene.limit()
    assert found.value.reason is Reason.COLLISION_SCENE
    assert "\x1b" not in found.value.detail
    scene.take(marker(action=2))
    assert scene.limit() == 1.0


def test_a_second_publisher_changes_nothing_and_does_not_keep_the_scene_fresh() -> None:
    scene = Scene(scene_required=True)
    first, second = (Origin(bytes([number]) * 16, 1) for number in (1, 2))
    scene.take(marker(), origin=first)
    for tenth in range(100):
        scene.now = 0.1 * tenth
        scene.take(marker(action=3), marker(ns="other"), origin=second)
        assert [body.name for body in scene.check.scene] == ["scene:camera/0"]
    assert scene.topic.competing() is not None
    assert "second publisher" in scene.said[-1]
    with pytest.raises(Refused, match=r"9\.9 s old"):
        scene.limit()


@pytest.mark.parametrize(
    "wrong",
    [
        [marker(6, points=201)],
        [marker(6, points=100_000)],
        [marker(id=number) for number in range(201)],
        [marker(action=2)] * 401,
        [marker(size=1e300)],
        [marker(at=(1e300, 0, 0))],
        [marker(at=(float("nan"), 0, 0))],
        [marker(10)],
        [marker(9)],
        [marker(action=7)],
        [marker(frame="nowhere")],
    ],
    ids=lambda wrong: f"{len(wrong)} of type {wrong[0].type}",
)
def test_what_is_too_large_or_no_obstacle_changes_nothing_at_once(wrong: list[Any]) -> None:
    scene = Scene()
    scene.take(marker(ns="before"))
    begin = time.thread_time()
    scene.said.clear()
    scene.take(marker(), *wrong)
    assert time.thread_time() - begin < 0.2
    assert [body.name for body in scene.check.scene] == ["scene:before/0"]
    assert len(scene.said) == 1


def test_two_hundred_cubes_are_an_obstacle_and_lifetimes_end() -> None:
    scene = Scene()
    short = marker(ns="short")
    short.lifetime.sec = 2
    scene.take(marker(6, points=199), short)
    assert sum(len(body.pieces) for body in scene.check.scene) == 200
    scene.now = 2.1
    scene.topic.refresh()
    assert [body.name for body in scene.check.scene] == ["scene:camera/0"]


@pytest.mark.parametrize("text", ["\x1b]0;x\x07\x1b[2J", "a\nb", "\x9b2J", "‮txt", "\x00", "\ud800"])
def test_text_of_a_marker_reaches_the_log_without_control_characters(text: str) -> None:
    scene = Scene()
    for wrong in (
        marker(9, ns=text),
        marker(frame=text),
        marker(10, mesh_resource=text),
        marker(10, mesh_resource="x", ns=text),
    ):
        scene.said.clear()
        scene.take(wrong)
        assert scene.said
        assert all(each.isprintable() for said in scene.said for each in said), scene.said
