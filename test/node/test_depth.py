"""A depth camera on the graph: its points as the policy gets them, and each reason why it does not."""

import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest

from vla_ros.config import load
from vla_ros.contract.binding import bind, make_arms
from vla_ros.contract.spec import ImageFeature, PolicySpec
from vla_ros.control.reasons import Refused
from vla_ros.control.safety import State
from vla_ros.errors import ConfigError
from vla_ros.graph.messages import message_types
from vla_ros.kinematics.solver import Kinematics
from vla_ros.node.depth import DepthCameras
from vla_ros.node.pipeline import build_pipeline
from vla_ros.node.policy_node import PolicyNode
from vla_ros.policies import Policy, Session
from vla_ros.types import ActionChunk, JointState, Observation
from vla_ros.vision.messages import encode_compressed, encode_image
from vla_ros_lab.replay import evaluate
from vla_ros_lab.replay.bag import Bag
from vla_ros_lab.replay.play import ReplayOptions
from vla_ros_lab.replay.prepare import read_transforms

CAMERAS = (
    "camera.topics:=[/camera/image_raw, /depth]",
    "camera.keys:=[image, points]",
    "camera.info:=['', /depth/camera_info]",
    "robot.base_frame:=base_link",
)
POINTS = PolicySpec((ImageFeature("image"),), points=(("image", "points"),))
DATA = Path(__file__).parents[1] / "data"
HERE = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0)
DOWN = (0.3, 0.0, 0.8, math.sqrt(0.5), -math.sqrt(0.5), 0.0, 0.0)  # looks down; the image's top is in front
FOCAL, HEIGHT, WIDTH = 50.0, 48, 64

Inside = Callable[..., PolicyNode]


class Looking(Policy):
    """Remembers what it saw, and moves slowly."""

    def __init__(self, spec: PolicySpec = POINTS) -> None:
        self.spec, self.seen = spec, list[Observation]()

    def infer(self, session: Session, observation: Observation) -> ActionChunk:
        self.seen.append(observation)
        return ActionChunk(np.array([[0.005, 0, 0, 0, 0, 0, 1]]), observation.stamp)


class DepthCamera:
    """Publishes colour, depth (16UC1, on a floor 0.8 m below), CameraInfo and transforms of one time."""

    def __init__(self, robot: Any, optical: str = "optical", latched: str = "state_publisher") -> None:
        self._robot, self.optical, make = robot, optical, robot.graph.message
        qos = robot.graph.qos

        def publisher(kind: str, topic: str, profile: str) -> Any:
            return robot.node.create_publisher(make(kind), topic, qos(profile))

        self._depth = publisher("sensor_msgs/msg/Image", "/depth", "camera")
        self.send = self._depth.publish
        self._infos = {
            topic: publisher("sensor_msgs/msg/CameraInfo", topic, latched)
            for topic in ("/depth/camera_info", "/camera/camera_info")
        }
        self._moving = publisher("tf2_msgs/msg/TFMessage", "/tf", "diagnostics")
        self._fixed = publisher("tf2_msgs/msg/TFMessage", "/tf_static", "event")

    def transform(self, parent: str, child: str, pose: Any, stamp: int, *, static: bool) -> None:
        make = self._robot.graph.message
        header = self._header(stamp, parent)
        at = make("geometry_msgs/msg/Vector3")(**dict(zip("xyz", map(float, pose[:3]), strict=True)))
        turned = make("geometry_msgs/msg/Quaternion")(**dict(zip("xyzw", map(float, pose[3:]), strict=True)))
        whole = make("geometry_msgs/msg/Transform")(translation=at, rotation=turned)
        one = make("geometry_msgs/msg/TransformStamped")(header=header, child_frame_id=child, transform=whole)
        message = make("tf2_msgs/msg/TFMessage")(transforms=[one])
        (self._fixed if static else self._moving).publish(message)

    def info(self, stamp: int, topic: str = "/depth/camera_info", scale: int = 1, frame: str | None = None) -> None:
        make = self._robot.graph.message
        k = [FOCAL * scale, 0, (WIDTH * scale - 1) / 2, 0, FOCAL * scale, (HEIGHT * scale - 1) / 2, 0, 0, 1]
        region = make("sensor_msgs/msg/RegionOfInterest")(
            x_offset=0, y_offset=0, height=0, width=0, do_rectify=False
        )
        message = make("sensor_msgs/msg/CameraInfo")(
            header=self._header(stamp, self.optical if frame is None else frame),
            height=HEIGHT * scale,
            width=WIDTH * scale,
            distortion_model="plumb_bob",
            d=np.zeros(5),
            k=np.array(k, float),
            r=np.eye(3).ravel(),
            p=np.insert(np.array(k, float), (3, 6, 9), 0),
            binning_x=0,
            binning_y=0,
            roi=region,
        )
        self._infos[topic].publish(message)

    def depth(self, stamp: int, encoding: str = "16UC1") -> None:
        """A floor, with a hole in the left upper corner."""
        values = np.full((HEIGHT, WIDTH), 800, "<u2")
        values[:8, :8] = 0
        if encoding == "32FC1":
            values = np.where(values, values * np.float32(0.001), np.nan).astype("<f4")
        if encoding == "rgb8":
            values = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
            self._depth.publish(encode_image(values, stamp, self.optical))
            return
        self._depth.publish(encode_image(values[..., None].view(np.uint8), stamp, self.optical, encoding))

    def _header(self, stamp: int, frame: str) -> Any:
        make = self._robot.graph.message
        time = make("builtin_interfaces/msg/Time")(sec=stamp // 10**9, nanosec=stamp % 10**9)
        return make("std_msgs/msg/Header")(stamp=time, frame_id=frame)


@pytest.fixture
def camera(robot: Any) -> DepthCamera:
    return DepthCamera(robot)


def good(robot: Any, camera: DepthCamera, **changed: Any) -> None:
    """Publish all that one inference needs, but for static transforms."""
    stamp = robot.now()
    camera.info(stamp, **changed)
    camera.depth(stamp)
    robot.send_frame(robot.noise(stamp))


def armed(node: PolicyNode, robot: Any, each: Callable[[], None]) -> None:
    robot.until(lambda: node.safety.state is State.ARMED and robot.commands, each)


def holding(node: PolicyNode, robot: Any, text: str, each: Callable[[], None]) -> None:
    robot.until(lambda: node.safety.state is State.HOLDING and text in node.safety.explain(), each)


def floor(points: np.ndarray) -> None:
    """Check that the points are those of the floor below the camera, each where its pixel looks."""
    assert points.shape == (HEIGHT, WIDTH, 3)
    assert np.isnan(points[:8, :8]).all()
    known = points[~np.isnan(points[..., 0])]
    assert len(known) == HEIGHT * WIDTH - 64
    np.testing.assert_allclose(known[:, 2], 0, atol=1e-6)
    down, right = ((np.arange(size) - (size - 1) / 2) * 0.8 / FOCAL for size in (HEIGHT, WIDTH))
    np.testing.assert_allclose(points[20, :, 1], -right, atol=1e-6)
    np.testing.assert_allclose(points[:, 20, 0], 0.3 - down, atol=1e-6)


def test_the_policy_gets_points_in_the_base_frame(robot, inside: Inside, camera: DepthCamera) -> None:
    """Of a camera on a link that moves: its pose at the frame's stamp, between two that were published."""
    policy = Looking(replace(POINTS, depth=POINTS.points))
    node = inside(*CAMERAS, policy=policy)
    camera.transform("hand", "optical", DOWN, 0, static=True)

    def each() -> None:
        stamp = robot.now()
        for at in (-1, 1):  # the hand passes the middle at the frame's stamp
            camera.transform("base_link", "hand", (0.1 * at, 0, 0, *HERE[3:]), stamp + at * 2_000_000, static=False)
        camera.info(stamp)
        camera.depth(stamp)
        robot.send_frame(robot.noise(stamp))

    armed(node, robot, each)
    floor(policy.seen[-1].points["points"])
    depth = policy.seen[-1].depth["points"]
    assert np.isnan(depth[:8, :8]).all()
    assert np.nanmin(depth) == np.nanmax(depth) == np.float32(0.8)


class OnALink:
    """A depth camera 10 cm beyond the demo arm's tip, which turns and passes HOME at each frame's stamp."""

    def __init__(self, robot: Any) -> None:
        self.robot, self.camera = robot, DepthCamera(robot)
        self.camera.transform("tool", "optical", (0, 0, 0.1, *HERE[3:]), 0, static=True)
        kind, qos = robot.graph.message("sensor_msgs/msg/JointState"), robot.graph.qos("state_publisher")
        self.other = robot.node.create_publisher(kind, "/joint_states", qos)

    def send(self, late: int = 0, stray: float = 0.0) -> None:
        """Publish a frame and two joint states, ``late`` ns too early, and a stray one of another publisher."""
        robot, stamp = self.robot, self.robot.now()
        self.camera.info(stamp)
        self.camera.depth(stamp)
        for at, side, publisher in (
            (-2_000_000, -1, robot.joint_publisher),
            (0, 0, self.other),
            (2_000_000, 1, robot.joint_publisher),
        ):
            turned = [robot.positions[0] + (0.001 * side or stray), *robot.positions[1:]]
            if side or stray:
                publisher.publish(robot.joint_state(robot.names, turned, stamp + at - late))
        robot.send_frame(robot.noise(stamp), joints=False)

    def check(self, observation: Observation, atol: float = 1e-6) -> None:
        tip = Kinematics.from_urdf("demo", tip_frame="tool").forward(np.array(self.robot.positions))
        pixels = np.stack(np.meshgrid(np.arange(WIDTH), np.arange(HEIGHT)), axis=-1)
        rays = pixels - (np.array([WIDTH, HEIGHT]) - 1) / 2
        seen = np.dstack((rays * 0.8 / FOCAL, np.full((HEIGHT, WIDTH), 0.8 + 0.1)))
        seen[:8, :8] = np.nan
        np.testing.assert_allclose(observation.points["points"], seen @ tip.rotation.T + tip.position, atol=atol)


@pytest.mark.causes("transform_missing")
def test_a_camera_on_a_link_needs_no_tf(robot: Any, inside: Inside) -> None:
    """Its pose at the frame's stamp follows from the URDF and two joint states, and its driver's own frame."""
    arm, policy = OnALink(robot), Looking()
    node = inside(*CAMERAS, policy=policy)
    armed(node, robot, arm.send)
    arm.check(policy.seen[-1])
    used = {"optical": "/tf_static", "tool": "robot.urdf", "link_1": "robot.urdf"}
    robot.until(lambda: used.items() <= robot.status.get("poses", {}).items(), arm.send)
    text = "newest position of joint 'joint_7', which moves 'link_7', is"
    holding(node, robot, text, lambda: arm.send(200_000_000))
    robot.until(lambda: node.safety.state is State.ARMED, arm.send)


def test_a_stray_joint_state_does_not_move_the_camera(robot: Any, inside: Inside) -> None:
    """The one that the node follows says where the arm is."""
    arm, policy = OnALink(robot), Looking()
    node = inside(*CAMERAS, policy=policy)
    armed(node, robot, arm.send)
    for _ in range(3):
        before = len(policy.seen)
        arm.send(stray=0.2)
        robot.until(lambda: len(policy.seen) > before + 2, arm.send)  # noqa: B023
    assert node.inputs.snapshot.joints is not None
    for observation in policy.seen:  # the joint state after it may not be used, either
        arm.check(observation, 2e-3)


def test_depth_of_another_camera_is_registered_to_the_colour_image(robot, inside: Inside, camera) -> None:
    policy = Looking()
    colour = "camera.info:=[/camera/camera_info, /depth/camera_info]"
    node = inside(*CAMERAS, colour, policy=policy)
    camera.transform("base_link", "optical", DOWN, 0, static=True)
    camera.transform("optical", "colour", (0.032, 0, 0, *HERE[3:]), 0, static=True)  # two pixels to the right

    def each() -> None:
        camera.info(robot.now(), "/camera/camera_info", frame="colour")
        good(robot, camera)

    armed(node, robot, each)
    points = policy.seen[-1].points["points"]
    assert np.isnan(points[:8, :6]).all()
    assert np.isnan(points[:, -2:]).all()
    at = points[20, 10:60]
    np.testing.assert_allclose(at[:, 1], -(np.arange(10, 60) + 2 - (WIDTH - 1) / 2) * 0.8 / FOCAL, atol=1e-6)
    np.testing.assert_allclose(at[:, 2], 0, atol=1e-6)


def test_depth_alone_needs_no_camera_info(robot: Any, inside: Inside, camera: DepthCamera) -> None:
    policy = Looking(PolicySpec(POINTS.images, depth=POINTS.points))
    node = inside(*CAMERAS[:2], policy=policy)

    def each(encoding: str = "32FC1") -> None:
        stamp = robot.now()
        camera.depth(stamp, encoding)
        robot.send_frame(robot.noise(stamp))

    armed(node, robot, each)
    assert not policy.seen[-1].points
    depth = policy.seen[-1].depth["points"]
    assert np.isnan(depth[:8, :8]).all()
    assert np.nanmin(depth) == np.nanmax(depth) == np.float32(0.8)
    holding(node, robot, "no readable frame", lambda: each("rgb8"))


def test_depth_that_is_registered_needs_no_base(robot: Any, inside: Inside, camera: DepthCamera) -> None:
    policy = Looking(PolicySpec(POINTS.images, depth=POINTS.points))
    node = inside(*CAMERAS, "camera.info:=[/camera/camera_info, /depth/camera_info]", policy=policy)
    camera.transform("optical", "colour", (0.032, 0, 0, *HERE[3:]), 0, static=True)

    def each() -> None:
        camera.info(robot.now(), "/camera/camera_info", frame="colour")
        good(robot, camera)

    armed(node, robot, each)
    depth = policy.seen[-1].depth["points"]
    assert np.isnan(depth[:8, :6]).all()
    assert np.isnan(depth[:, -2:]).all()
    np.testing.assert_allclose(depth[20, :60], 0.8, atol=1e-6)


@pytest.mark.causes("camera_info_invalid")
def test_points_of_other_proportions_than_the_image_are_refused(robot: Any, inside: Inside, camera) -> None:
    """Depth that is not aligned must not pass for depth that is."""
    node = inside(*CAMERAS, policy=Looking())
    camera.transform("base_link", "optical", DOWN, 0, static=True)

    def each() -> None:
        stamp = robot.now()
        camera.info(stamp)
        camera.depth(stamp)
        robot.send_frame(robot.noise(stamp, 40, 64))

    holding(node, robot, "found 64x48 points of an image of 64x40: not aligned", each)
    armed(node, robot, lambda: good(robot, camera))


@pytest.mark.causes("camera_stale")
def test_stale_depth_holds(robot, inside: Inside, camera: DepthCamera) -> None:
    node = inside(*CAMERAS, policy=Looking())
    camera.transform("base_link", "optical", DOWN, 0, static=True)
    armed(node, robot, lambda: good(robot, camera))
    holding(node, robot, "/depth: none for", robot.send_frame)
    robot.until(lambda: node.safety.state is State.ARMED, lambda: good(robot, camera))


@pytest.mark.causes("transform_missing")
def test_a_missing_transform_holds_and_the_newest_is_not_taken_instead(robot, inside: Inside, camera) -> None:
    node = inside(*CAMERAS, policy=Looking())
    text = "/tf and /tf_static do not connect 'optical' with 'base_link'"
    holding(node, robot, text, lambda: good(robot, camera))

    def moving(late: int) -> None:
        camera.transform("base_link", "optical", DOWN, robot.now() - late, static=False)
        good(robot, camera)
        camera.transform("base_link", "optical", DOWN, robot.now() - late, static=False)

    armed(node, robot, lambda: moving(0))
    holding(node, robot, "older than the image (waited 0.1 s)", lambda: moving(200_000_000))
    robot.until(lambda: node.safety.state is State.ARMED, lambda: moving(0))


@pytest.mark.causes("transform_jumped")
def test_a_static_transform_that_changes_holds_until_a_reset(robot, inside: Inside, camera) -> None:
    policy = Looking()
    node = inside(*CAMERAS, policy=policy)
    camera.transform("base_link", "optical", DOWN, 0, static=True)
    armed(node, robot, lambda: good(robot, camera))
    moved = (DOWN[0] + 0.02, *DOWN[1:])
    camera.transform("base_link", "optical", moved, 0, static=True)
    text = "'optical' in 'base_link' is on /tf_static, but changed by 0.02 m"
    holding(node, robot, text, lambda: good(robot, camera))
    camera.transform("base_link", "optical", DOWN, 0, static=True)  # also if it changes back
    static = node._pipeline.observer.depth.transforms._static  # type: ignore[union-attr]
    robot.until(lambda: static["optical"][0] == DOWN[0], lambda: good(robot, camera))
    before = len(policy.seen)
    for _ in range(10):
        good(robot, camera)
        holding(node, robot, "transform_jumped", lambda: good(robot, camera))
    assert len(policy.seen) == before
    node.reset()
    robot.until(lambda: not node.safety.status.holds, lambda: good(robot, camera))
    node.enable(True)
    robot.until(lambda: node.safety.state is State.ARMED, lambda: good(robot, camera))


@pytest.mark.causes("camera_info_invalid")
def test_a_camera_info_that_does_not_fit_holds(robot, inside: Inside, camera: DepthCamera) -> None:
    node = inside(*CAMERAS, policy=Looking())
    camera.transform("base_link", "optical", DOWN, 0, static=True)

    def without() -> None:
        stamp = robot.now()
        camera.depth(stamp)
        robot.send_frame(robot.noise(stamp))

    holding(node, robot, "/depth/camera_info: no message yet", without)
    armed(node, robot, lambda: good(robot, camera))
    text = "/depth has the size (48, 64), and /depth/camera_info (96, 128)"
    holding(node, robot, text, lambda: good(robot, camera, scale=2))
    robot.until(lambda: node.safety.state is State.ARMED, lambda: good(robot, camera))
    text = "/depth has the frame_id optical, and /depth/camera_info colour"
    holding(node, robot, text, lambda: good(robot, camera, frame="colour"))
    robot.until(lambda: node.safety.state is State.ARMED, lambda: good(robot, camera))
    holding(node, robot, "the camera is not calibrated", lambda: good(robot, camera, scale=0))


def test_a_recorded_episode_is_replayed_with_its_transforms(robot: Any, inside: Inside, tmp_path: Path) -> None:
    """Static transforms came before the episode, each in a message of its own, and so did one CameraInfo."""
    camera = DepthCamera(robot, latched="instruction")
    camera.info(robot.now(), "/camera/camera_info", frame="colour")
    colour = "camera.info:=[/camera/camera_info, /depth/camera_info]"
    recorded = "record.what:=episodes", f"record.folder:={tmp_path}"
    node = inside("control.armed:=false", *CAMERAS[:2], colour, CAMERAS[3], *recorded, policy=Looking())
    camera.transform("base_link", "hand", HERE, 0, static=True)
    camera.transform("hand", "optical", DOWN, 0, static=True)
    camera.transform("hand", "colour", DOWN, 0, static=True)

    def each() -> None:
        good(robot, camera)

    robot.until(lambda: robot.says("waiting (episodes)", "recording"), each, 60.0)
    robot.until(lambda: not node.safety.status.holds, each)
    node.enable(True)
    armed(node, robot, each)
    before = len(robot.commands)
    robot.until(lambda: len(robot.commands) > before + 20, each)
    node.enable(False)
    label = robot.node.create_publisher(
        robot.graph.message("std_msgs/msg/String"), "/vla_policy/label", robot.graph.qos("command")
    )
    said = robot.graph.message("std_msgs/msg/String")(data="success")
    robot.until(lambda: list(tmp_path.glob("*/metadata.yaml")), lambda: (each(), label.publish(said)), 60.0)
    config = load([], ["robot.urdf:=demo", "control.rate_hz:=0", *CAMERAS[:2], colour, CAMERAS[3]])
    for speed in (0.0, 1.0):
        policy = Looking()
        [bag] = [path.parent for path in tmp_path.glob("*/metadata.yaml")]
        job = evaluate.BagJob(bag, config, ReplayOptions(speed=speed), None)
        outcome = evaluate.play(job, lambda: policy)  # noqa: B023
        assert len(policy.seen) >= 5, outcome
        for observation in policy.seen:
            floor(observation.points["points"])
    observer = build_pipeline(config, POINTS).observer
    with Bag(bag) as opened:
        read_transforms(opened, observer, ("/joint_states",))
    tip = Kinematics.from_urdf("demo", tip_frame="tool").forward(np.array(robot.positions))
    found = observer.depth.transforms.at("base_link", "tool", policy.seen[len(policy.seen) // 2].stamp)
    np.testing.assert_allclose(found[:3], np.column_stack((tip.rotation, tip.position)), atol=1e-9)


def binding(*assignments: str, spec: PolicySpec = POINTS) -> Any:
    config = load([], ["robot.urdf:=demo", *assignments])
    return bind(spec, config, make_arms(config))


class Heard:
    """The bytes of what a :class:`DepthCamera` publishes, by topic, without a graph."""

    def __init__(self) -> None:
        self._types, self.sent = message_types(), dict[str, bytes]()
        self.graph, self.node = SimpleNamespace(message=self._types.message, qos=lambda _: None), self

    def create_publisher(self, kind: Any, topic: str, qos: Any) -> Any:
        def publish(message: Any) -> None:
            self.sent[topic] = message if isinstance(message, bytes) else bytes(self._types.serialize(message))

        return SimpleNamespace(publish=publish)

    def tell(self, cameras: DepthCameras, topic: str) -> str:
        kind = "tf2_msgs/msg/TFMessage" if topic.startswith("/tf") else "sensor_msgs/msg/CameraInfo"
        read = lambda data: self._types.deserialize(data, self._types.message(kind))  # noqa: E731
        return cameras.hear(topic, self.sent[topic], read)


def test_a_transform_that_comes_a_little_later_is_waited_for() -> None:
    heard = Heard()
    camera, cameras = DepthCamera(heard), DepthCameras(binding(*CAMERAS))
    camera.info(5)
    camera.depth(5)
    heard.tell(cameras, "/depth/camera_info")
    with pytest.raises(Refused, match=r"transform_missing: .* \(waited 0\.01 s\)"):
        cameras.decode(1, heard.sent["/depth"], 0.01)
    camera.transform("base_link", "optical", DOWN, 5, static=False)
    timer = threading.Timer(0.05, heard.tell, (cameras, "/tf"))
    timer.start()
    floor(cameras.decode(1, heard.sent["/depth"], 20.0)[0].points)
    timer.join()
    floor(cameras.decode(1, heard.sent["/depth"], 0.0)[0].points)


def test_a_joint_state_that_comes_a_little_later_is_waited_for() -> None:
    heard = Heard()
    camera, cameras = DepthCamera(heard, "tool"), DepthCameras(binding(*CAMERAS))
    camera.info(5)
    camera.depth(5)
    heard.tell(cameras, "/depth/camera_info")
    with pytest.raises(Refused, match=r"transform_missing: there is no position of joint 'joint_7'"):
        cameras.decode(1, heard.sent["/depth"], 0.01)
    names = tuple(f"joint_{number}" for number in range(1, 8))
    timer = threading.Timer(0.05, cameras.transforms.measure, (JointState(names, np.zeros(7), 5),))
    timer.start()
    began = time.monotonic()
    cameras.decode(1, heard.sent["/depth"], 20.0)
    assert time.monotonic() - began < 15
    timer.join()


def test_compressed_depth_gives_the_same_points_as_raw_depth() -> None:
    """Of the published codec's data (``data/depth``)."""
    golden, points = np.load(DATA / "depth" / "golden.npz"), {}
    for transport, topic in (("raw", "/depth"), ("compressed", "/depth/compressedDepth")):
        heard = Heard()
        topics = f"camera.topics:=[/camera/image_raw, {topic}]"
        camera = DepthCamera(heard)
        cameras = DepthCameras(binding(*CAMERAS, topics, f"camera.transport:={transport}"))
        camera.info(5)
        camera.transform("base_link", "optical", DOWN, 5, static=True)
        assert not heard.tell(cameras, "/depth/camera_info") + heard.tell(cameras, "/tf_static")
        depth = golden["decoded_16UC1"][..., None].view(np.uint8)
        message = encode_image(depth, 5, "optical", "16UC1")
        if transport == "compressed":
            data = golden["rvl_16UC1"].tobytes()
            message = encode_compressed(data, 5, "optical", "16UC1; compressedDepth rvl")
        points[transport] = cameras.decode(1, message, 0.0)[0].points
    assert np.isfinite(points["raw"]).any()
    np.testing.assert_array_equal(points["raw"], points["compressed"])


def test_a_huge_message_of_transforms_is_ignored() -> None:
    heard = Heard()
    camera, cameras = DepthCamera(heard), DepthCameras(binding(*CAMERAS))
    camera.transform("base_link", "optical", DOWN, 5, static=True)
    assert not heard.tell(cameras, "/tf_static")
    heard.sent["/tf_static"] += bytes(1 << 16)
    assert "expected at most 65536" in heard.tell(cameras, "/tf_static")


def test_the_binding_names_what_depth_needs() -> None:
    found = binding(*CAMERAS, "camera.info:=[/camera/camera_info, /depth/camera_info]").table()
    assert "points[m] in base_link" in found
    assert "/depth, /depth/camera_info, /tf or else robot.urdf, onto /camera/image_raw" in found
    aligned = binding(*CAMERAS).table()
    assert "onto" not in aligned
    only = PolicySpec(POINTS.images, depth=POINTS.points)
    assert "depth[m]" in binding(*CAMERAS[:2], spec=only).table()


@pytest.mark.parametrize(
    ("assignments", "text"),
    [
        ((CAMERAS[0], "camera.keys:=[image, other]", *CAMERAS[2:]), "needs the points 'points' of 'image'"),
        ((*CAMERAS[:3], "robot.base_frame:=''"), "robot.base_frame: not set"),
        ((*CAMERAS[:2], "robot.base_frame:=base_link", "camera.transport:=compressed"), "points 'points' are raw"),
        ((*CAMERAS, "camera.crop_area:=0.9"), "camera.crop_area: set for 'image'"),
        ((*CAMERAS, "node.clock:=inputs"), "no time to wait for transforms"),
    ],
)
def test_what_does_not_fit_is_refused_at_start(assignments: tuple[str, ...], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        binding(*assignments)


def test_raw_and_compressed_cameras_may_be_mixed(robot: Any, inside: Inside, camera: DepthCamera) -> None:
    """The colour camera's topic ends as image_transport's do; depth is raw."""
    topics = "camera.topics:=[/camera/image_raw/compressed, /depth]"
    policy = Looking()
    node = inside(*CAMERAS, topics, policy=policy)
    camera.transform("base_link", "optical", DOWN, 0, static=True)
    kind, qos = robot.graph.message("sensor_msgs/msg/CompressedImage"), robot.graph.qos("camera")
    colour = robot.node.create_publisher(kind, "/camera/image_raw/compressed", qos)

    def each() -> None:
        stamp = robot.now()
        camera.info(stamp)
        camera.depth(stamp)
        robot.send_joints()
        pixels = np.random.default_rng(stamp).integers(0, 255, (HEIGHT, WIDTH, 3), np.uint8)
        colour.publish(encode_compressed(cv2.imencode(".jpg", pixels)[1].tobytes(), stamp, "colour"))

    armed(node, robot, each)
    floor(policy.seen[-1].points["points"])


@pytest.mark.parametrize("transport", ["raw", "compressed"])
def test_a_topic_says_its_transport(transport: str) -> None:
    topics = "camera.topics:=[/a/image_raw, /a/image_raw/compressed, /b/image_raw/compressedDepth]"
    config = load([], [topics, "camera.keys:=[a, b, c]", f"camera.transport:={transport}"])
    assert [one.transport for one in config.camera.each] == [transport, "compressed", "compressed"]
