"""What drivers of depth cameras do wrong: the node holds with the reason, goes on, or is not disturbed."""

from typing import Any

import numpy as np
import pytest

from test.node.test_depth import (
    CAMERAS,
    DOWN,
    DepthCamera,
    Heard,
    Inside,
    Looking,
    armed,
    binding,
    floor,
    good,
    holding,
)
from vla_ros.control.safety import State
from vla_ros.node.depth import DepthCameras
from vla_ros.vision.messages import encode_image


def without_info(robot: Any, camera: DepthCamera) -> None:
    stamp = robot.now()
    camera.depth(stamp)
    robot.send_frame(robot.noise(stamp))


@pytest.fixture
def camera(robot: Any) -> DepthCamera:
    return DepthCamera(robot)


def test_a_camera_info_that_was_latched_before_the_node_started_is_heard(robot: Any, inside: Inside) -> None:
    camera = DepthCamera(robot, latched="instruction")
    camera.info(robot.now())
    camera.transform("base_link", "optical", DOWN, 0, static=True)
    policy = Looking()
    node = inside(*CAMERAS, policy=policy)
    armed(node, robot, lambda: without_info(robot, camera))
    floor(policy.seen[-1].points["points"])


@pytest.mark.causes("camera_info_invalid")
def test_one_that_was_published_once_before_holds_and_a_later_one_ends_it(robot, inside: Inside, camera) -> None:
    camera.info(robot.now())
    camera.transform("base_link", "optical", DOWN, 0, static=True)
    node = inside(*CAMERAS, policy=Looking())
    holding(node, robot, "/depth/camera_info: no message yet", lambda: without_info(robot, camera))
    camera.info(robot.now())
    armed(node, robot, lambda: without_info(robot, camera))


@pytest.mark.causes("camera_info_invalid")
def test_another_resolution_holds_until_camera_info_follows(robot: Any, inside: Inside, camera) -> None:
    policy = Looking()
    node = inside(*CAMERAS, policy=policy)
    camera.transform("base_link", "optical", DOWN, 0, static=True)
    armed(node, robot, lambda: good(robot, camera))

    def larger(info: bool = True) -> None:
        stamp = robot.now()
        if info:
            camera.info(stamp, scale=2)
        depth = np.full((96, 128), 800, "<u2")[..., None].view(np.uint8)
        camera.send(encode_image(depth, stamp, "optical", "16UC1"))
        robot.send_frame(robot.noise(stamp))

    holding(node, robot, "/depth has the size (96, 128), and /depth/camera_info (48, 64)", lambda: larger(False))
    robot.until(lambda: node.safety.state is State.ARMED, larger)
    robot.until(lambda: policy.seen[-1].points["points"].shape == (96, 128, 3), larger)
    np.testing.assert_allclose(policy.seen[-1].points["points"][..., 2], 0, atol=1e-6)


@pytest.mark.causes("camera_info_invalid")
def test_a_depth_image_on_its_side_holds(robot: Any, inside: Inside, camera: DepthCamera) -> None:
    """CameraInfo that describes the camera, and images that its driver has turned."""
    node = inside(*CAMERAS, policy=Looking())
    camera.transform("base_link", "optical", DOWN, 0, static=True)

    def turned() -> None:
        stamp = robot.now()
        camera.info(stamp)
        depth = np.full((64, 48), 800, "<u2")[..., None].view(np.uint8)
        camera.send(encode_image(depth, stamp, "optical", "16UC1"))
        robot.send_frame(robot.noise(stamp, 64, 48))

    holding(node, robot, "/depth has the size (64, 48), and /depth/camera_info (48, 64)", turned)


def test_names_of_frames_may_begin_with_a_slash(robot: Any, inside: Inside, camera: DepthCamera) -> None:
    policy = Looking()
    node = inside(*CAMERAS, policy=policy)
    camera.transform("/base_link", "/optical", DOWN, 0, static=True)
    armed(node, robot, lambda: good(robot, camera, frame="/optical"))
    floor(policy.seen[-1].points["points"])


@pytest.mark.causes("transform_jumped")
def test_publishers_of_transforms_that_contradict_each_other_hold(robot: Any, inside: Inside, camera) -> None:
    """Both say at every time where the camera is; each publisher for itself would be obeyed."""
    other = DepthCamera(robot)
    node = inside(*CAMERAS, policy=Looking())

    def each(both: bool) -> None:
        stamp = robot.now()
        camera.transform("base_link", "optical", DOWN, stamp, static=False)
        if both:
            other.transform("base_link", "optical", (DOWN[0] + 0.1, *DOWN[1:]), stamp - 1_000_000, static=False)
        good(robot, camera)
        camera.transform("base_link", "optical", DOWN, robot.now(), static=False)

    armed(node, robot, lambda: each(False))
    holding(
        node, robot, "two publishers on /tf contradict each other about 'optical', by 0.1 m", lambda: each(True)
    )
    node.reset()
    robot.until(lambda: not node.safety.status.holds, lambda: each(False))


@pytest.mark.causes("clock_jump")
def test_after_a_jump_of_simulated_time_the_camera_is_where_it_is_now(robot: Any, inside: Inside, camera) -> None:
    """It moved before the jump, so that a transform from before, at the same stamp, says something else."""
    kind = robot.graph.message("rosgraph_msgs/msg/Clock")
    clock = robot.node.create_publisher(kind, "/clock", robot.graph.qos("state_publisher"))
    behind, at = 0, 0.5
    robot.now = lambda: type(robot).now(robot) - behind

    def tick() -> None:
        stamp = robot.now()
        time = robot.graph.message("builtin_interfaces/msg/Time")(sec=stamp // 10**9, nanosec=stamp % 10**9)
        clock.publish(kind(clock=time))
        for apart in (-40_000_000, 40_000_000):  # those from before the jump are nearer
            camera.transform("base_link", "optical", (at, *DOWN[1:]), stamp + apart, static=False)
        good(robot, camera)

    policy = Looking()
    node = inside(*CAMERAS, policy=policy, ros_args=("--ros-args", "-p", "use_sim_time:=true"))
    began = robot.now()
    armed(node, robot, tick)
    robot.until(lambda: robot.now() > began + 3_000_000_000, tick)
    behind, at = 2_000_000_000, DOWN[0]
    robot.until(lambda: "clock_jump" in node.safety.counters, tick)
    before = len(policy.seen)
    robot.until(lambda: len(policy.seen) > before + 5 and node.safety.state is State.ARMED, tick)
    floor(policy.seen[-1].points["points"])


@pytest.mark.causes("image_invalid")
def test_depth_of_which_nothing_is_known_is_dropped(robot: Any, inside: Inside, camera: DepthCamera) -> None:
    """A lens that is covered, or a projector that has failed: the policy would go on without depth."""
    node = inside(*CAMERAS, policy=Looking())
    camera.transform("base_link", "optical", DOWN, 0, static=True)
    armed(node, robot, lambda: good(robot, camera))

    def blind() -> None:
        stamp = robot.now()
        camera.info(stamp)
        depth = np.zeros((48, 64, 2), np.uint8)
        camera.send(encode_image(depth, stamp, "optical", "16UC1"))
        robot.send_frame(robot.noise(stamp))

    holding(node, robot, "no readable frame", blind)
    robot.until(lambda: node.safety.state is State.ARMED, lambda: good(robot, camera))


@pytest.mark.causes("camera_stale")
def test_a_camera_whose_stamps_start_again_holds(robot: Any, inside: Inside, camera: DepthCamera) -> None:
    """After it was plugged in again; its transforms have the host's clock."""
    node = inside(*CAMERAS, policy=Looking())
    camera.transform("base_link", "optical", DOWN, 0, static=True)
    armed(node, robot, lambda: good(robot, camera))
    began = robot.now()

    def replugged() -> None:
        camera.info(robot.now() - began)
        camera.depth(robot.now() - began)
        robot.send_frame(robot.noise(robot.now()))

    robot.until(lambda: node.safety.state is State.HOLDING, replugged)
    assert "/depth" in node.safety.explain(), node.safety.explain()
    robot.until(lambda: node.safety.state is State.ARMED, lambda: good(robot, camera))


@pytest.mark.causes("input_missing")
def test_a_node_that_starts_before_its_camera_waits_for_it(robot: Any, inside: Inside) -> None:
    policy = Looking()
    node = inside(*CAMERAS, policy=policy)
    robot.until(lambda: "input_missing" in node.safety.counters, robot.send_frame)
    assert not policy.seen
    camera = DepthCamera(robot)
    camera.transform("base_link", "optical", DOWN, 0, static=True)
    armed(node, robot, lambda: good(robot, camera))
    floor(policy.seen[-1].points["points"])


def decoded(data: bytes, *assignments: str) -> Any:
    heard = Heard()
    camera, cameras = DepthCamera(heard), DepthCameras(binding(*CAMERAS, *assignments))
    camera.info(5)
    camera.transform("base_link", "optical", DOWN, 5, static=True)
    heard.tell(cameras, "/depth/camera_info")
    heard.tell(cameras, "/tf_static")
    return cameras.decode(1, data, 0.0)


@pytest.mark.parametrize("form", ["big-endian", "padded", "big-endian and padded"])
def test_forms_of_images(form: str) -> None:
    values = np.full((48, 64), 800, ">u2" if "big" in form else "<u2")
    values[:8, :8] = 0
    rows = values[..., None].view(np.uint8).reshape(48, 128)
    step = 160 if "padded" in form else 128
    data = bytearray(encode_image(rows.reshape(48, 64, 2), 5, "optical", "16UC1", step))
    if "big" in form:
        at = data.index(b"16UC1\0") + 6
        assert data[at] == 0
        data[at] = 1
    floor(decoded(bytes(data))[0].points)


def test_a_pixel_at_the_end_of_its_range_is_unknown() -> None:
    """Drivers store what is beyond their range as 65535, which is no surface at 65.5 m."""
    values = np.full((48, 64), 800, "<u2")
    values[:8, :8] = 65535
    floor(decoded(encode_image(values[..., None].view(np.uint8), 5, "optical", "16UC1"))[0].points)
