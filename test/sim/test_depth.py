"""The table's depth camera: where points are, what a stereo camera makes of them, and a wrong calibration."""

import math

import numpy as np
import pytest

from vla_ros_lab.sim.depth import misplaced, sensed, unproject
from vla_ros_lab.sim.scene import TABLE_X, TABLE_Y, draw
from vla_ros_lab.sim.table import IMAGE_TOPIC, POINTS_TOPIC, TableEnvironment, TableOptions
from vla_ros_lab.sim.tasks import TASK_NAMES
from vla_ros_lab.sim.world import TableTop, WorldOptions


@pytest.mark.parametrize("turn", [0.0, 22.5])
def test_points_are_where_the_camera_projects_them_from(turn):
    """Each pixel's point is projected back into it by the world's own camera, and the table is at its height."""
    with TableTop(WorldOptions(camera_turn=turn)) as world:
        world.reset(3)
        image, points = world.render_points()
        np.testing.assert_array_equal(image, world.render())
        random = np.random.default_rng(0)
        for row, column in random.integers(0, 224, (60, 2)):
            if np.isfinite(points[row, column]).all():
                np.testing.assert_allclose(world.project(points[row, column]), [row + 0.5, column + 0.5], atol=0.02)
        on_table = np.abs(points[..., 2]) < 1e-3
        assert 0.4 < on_table.mean() < 0.9
        for thing, place in zip(world.scene.objects, world.object_positions().values(), strict=True):
            row, column = map(int, world.project(place))
            assert np.linalg.norm(points[row, column] - place) < 0.05, thing
            assert points[row, column][2] > 0.02


def test_a_pixel_is_unprojected_through_its_centre():
    depth = np.full((2, 4), 2.0)
    depth[1, 3] = np.nan
    found = unproject(depth, 90.0, np.array([1.0, 0, 0]), np.eye(3))
    np.testing.assert_allclose(found[0, 0], [1 - 3.0, 1.0, -2.0])
    np.testing.assert_allclose(found[1, 2], [1 + 1.0, -1.0, -2.0])
    assert np.isnan(found[1, 3]).all()


@pytest.mark.parametrize("metres", [0.5, 1.0, 2.0])
def test_the_error_of_a_stereo_camera_grows_with_the_square(metres):
    found = sensed(np.full((224, 224), metres), 36.0, np.random.default_rng(1))
    known = found[np.isfinite(found)]
    assert 0.95 < len(known) / found.size < 0.99
    assert np.std(known) == pytest.approx(metres**2 * 0.08 / (640 * 0.05), rel=0.1)
    np.testing.assert_allclose(known, np.round(known, 3))


def test_a_stereo_camera_does_not_see_behind_an_edge():
    """What is nearer on the right hides a band on its left, as wide as the disparities differ."""
    depth = np.full((64, 64), 1.0)
    depth[:, 32:] = 0.5
    focal = 32 / math.tan(math.radians(20))
    band = int(focal * 0.05 * (1 / 0.5 - 1 / 1.0))
    known = np.isfinite(sensed(depth, 40.0, np.random.default_rng(2)))
    assert band >= 3
    assert known[:, 32 - band : 32].mean() < 0.02
    assert known[:, : 30 - band].mean() > 0.9


def test_a_wrong_calibration_is_wrong_by_as_much():
    position, rotation = misplaced(np.zeros(3), np.eye(3), 0.02, 3.0, np.random.default_rng(0))
    assert np.linalg.norm(position) == pytest.approx(0.02)
    assert math.degrees(math.acos((np.trace(rotation) - 1) / 2)) == pytest.approx(3.0)


def test_the_options_of_the_world_reach_the_points():
    """The same scene: exact twice, with the sensor's holes, and moved as a whole by the calibration."""
    found = {}
    for name, options in {
        "exact": {}, "again": {}, "sensor": {"depth_sensor": True}, "wrong": {"extrinsics": (0.02, 0.0)},
    }.items():  # fmt: skip
        with TableTop(WorldOptions(**options)) as world:
            world.reset(5)
            found[name] = world.render_points()[1]
    np.testing.assert_array_equal(found["exact"], found["again"])
    assert np.isnan(found["sensor"]).mean() > np.isnan(found["exact"]).mean() + 0.02
    shift = (found["wrong"] - found["exact"])[np.isfinite(found["exact"]).all(-1)]
    np.testing.assert_allclose(np.linalg.norm(shift, axis=1), 0.02, atol=1e-5)
    np.testing.assert_allclose(shift, np.broadcast_to(shift[0], shift.shape), atol=1e-5)


def test_the_camera_sends_points_upside_down_as_its_image():
    with TableTop() as world:
        table = TableEnvironment(world, TableOptions(points=True))
        table.reset(1)
        sent = table.observe(table.cameras, 0).images
        image, points = world.render_points()
    np.testing.assert_array_equal(sent[POINTS_TOPIC], points[::-1, ::-1])
    np.testing.assert_array_equal(sent[IMAGE_TOPIC], image[::-1, ::-1])
    with TableTop() as world:
        assert POINTS_TOPIC not in TableEnvironment(world).cameras


@pytest.mark.parametrize("displace", [0.0, 0.04, 0.12])
def test_targets_are_that_far_outside_of_the_region(displace):
    shrink, sides = 0.06, set()
    for seed in range(40):
        scene = draw(seed, TASK_NAMES[:1], shrink=shrink, displace=displace)
        places = np.array([thing.position[:2] for thing in scene.objects])
        low, high = np.array([TABLE_X, TABLE_Y]).T + np.array([[shrink], [-shrink]])
        outside = np.maximum(low - places, places - high)
        assert outside[0].max() == pytest.approx(displace) if displace else outside[0].max() <= 0
        assert (outside[1:] <= 0).all()
        axis = int(outside[0].argmax())
        sides.add((axis, bool(places[0, axis] > (low + high)[axis] / 2)))
    assert draw(3, displace=0.0) == draw(3)
    assert len(sides) == 4
