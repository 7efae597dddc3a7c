import numpy as np
import pytest

from vla_ros_lab.sim import arm
from vla_ros_lab.sim.expert import positions_of
from vla_ros_lab.sim.tasks import COLOURS, KINDS
from vla_ros_lab.sim.world import TableTop, WorldOptions


def wander(world: TableTop, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Final state and image after a few fixed commands."""
    world.reset(seed)
    start = world.joint_positions()
    for step in range(8):
        world.step(start + 0.02 * step)
    return np.concatenate([world.joint_positions(), *world.object_positions().values()]), world.render()


def test_the_same_seed_gives_bit_equal_states_and_images(world):
    state, image = wander(world, 3)
    wander(world, 4)
    again, image_again = wander(world, 3)
    np.testing.assert_array_equal(state, again)
    np.testing.assert_array_equal(image, image_again)
    with TableTop() as fresh:
        other, other_image = wander(fresh, 3)
    np.testing.assert_array_equal(state, other)
    np.testing.assert_array_equal(image, other_image)


def test_reset_puts_the_hand_at_the_start_open_and_at_rest(world):
    for seed in range(5):
        scene = world.reset(seed)
        np.testing.assert_allclose(world.tool_position(), scene.starts[0], atol=2e-3)
        np.testing.assert_allclose(world.tool_rotation(), arm.TOOL_DOWN, atol=5e-3)
        np.testing.assert_allclose(world.joint_positions()[7:], arm.FINGER_TRAVEL, atol=1e-3)
        assert np.abs(world.joint_velocities()).max() < 0.01
        for thing in scene.objects:
            np.testing.assert_allclose(world.object_positions()[thing.name], thing.position, atol=2e-3)


def test_a_command_is_reached_within_its_step(world):
    """0.1 s is enough for what a policy asks at 10 Hz: the servo lags by a fraction of it."""
    target = world.joint_positions()
    target[:7] += 0.04
    world.step(target)
    assert np.abs(world.joint_positions()[:7] - target[:7]).max() < 0.02
    world.step(target)
    assert np.abs(world.joint_positions()[:7] - target[:7]).max() < 0.004


def test_a_step_in_ticks_equals_one_step(world):
    """Real time advances in small ticks."""
    target = world.joint_positions() + 0.02
    world.step(target)
    whole = world.joint_positions()
    world.reset(0)
    world.command(target)
    for _ in range(5):
        world.advance(10)
    np.testing.assert_array_equal(world.joint_positions(), whole)


def test_joint_and_object_states_are_named(world):
    [joints], objects = world.joint_states(7), world.object_state(7)
    assert joints.names == world.joint_names == (*arm.JOINT_NAMES, "finger_left", "finger_right")
    assert joints.stamp == objects.stamp == 7
    places = positions_of(objects.positions)
    assert set(places) == {thing.name for thing in world.scene.objects}
    assert set(objects.names) == {f"{name}/{axis}" for name in KINDS for axis in "xyz"}
    for name, place in world.object_positions().items():
        np.testing.assert_array_equal(places[name], place)


def test_sensors_give_copies(world):
    joints, tool = world.joint_positions(), world.tool_position()
    saved = joints.copy(), tool.copy()
    world.step(joints + 0.05)
    np.testing.assert_array_equal(joints, saved[0])
    np.testing.assert_array_equal(tool, saved[1])


@pytest.mark.parametrize(
    ("names", "positions"),
    [(("joint_1",), (float("nan"),)), (("joint_1", "joint_2"), (0.0,)), (("joint_8",), (0.0,))],
)
def test_a_bad_command_is_refused_and_changes_nothing(world, names, positions):
    before = world.joint_positions()
    with pytest.raises(ValueError, match="expected"):
        world.command_named(names, positions)
    world.step()
    np.testing.assert_allclose(world.joint_positions(), before, atol=1e-3)


def test_a_velocity_moves_its_joints_until_they_are_commanded_again(world):
    before = world.joint_positions()
    world.command_velocities(("joint_1", "joint_7"), (0.5, -0.3))
    for _ in range(5):
        world.step()
    np.testing.assert_allclose(world.joint_velocities()[[0, 6]], (0.5, -0.3), atol=0.01)
    moved = world.joint_positions() - before
    np.testing.assert_allclose(moved[[0, 6]], (0.25, -0.15), atol=0.01)
    np.testing.assert_allclose(moved[1:6], 0.0, atol=0.003)
    world.command_velocities(("joint_1",), (0.0,))
    world.step()
    world.command_named(("joint_7",), (before[6],))
    for _ in range(3):
        world.step()
    np.testing.assert_allclose(world.joint_velocities(), 0.0, atol=0.01)
    np.testing.assert_allclose((world.joint_positions() - before)[[0, 6]], (0.25, 0.0), atol=0.01)


def test_a_velocity_ends_at_the_joint_limit(world):
    low, high = np.array([joint.limits for joint in arm.CHAIN]).T
    world.command_velocities(arm.JOINT_NAMES, (2.0, 0, 0, 0, -2.0, 0, 0))
    for _ in range(30):
        world.step()
    np.testing.assert_allclose(world.joint_positions()[[0, 4]], (high[0], low[4]), atol=0.02)
    world.command_velocities(("joint_1",), (-1.0,))
    world.step()
    assert world.joint_positions()[0] < high[0] - 0.03, "no velocity adds up beyond the limit"


def test_each_of_two_arms_obeys_its_own_commands():
    with TableTop(WorldOptions(arms=2)) as world:
        before = world.joint_positions()
        world.command_named(("left_joint_1", "left_finger_left", "left_finger_right"), (before[0] + 0.1, 0.0, 0.0))
        world.command_velocities(("right_joint_1",), (1.0,))
        world.step()
        world.step()
        moved = world.joint_positions() - before
        np.testing.assert_allclose(
            moved[[0, 7, 8, 9]], (0.1, -arm.FINGER_TRAVEL, -arm.FINGER_TRAVEL, 0.2), atol=0.02
        )
        np.testing.assert_allclose(np.delete(moved, [0, 7, 8, 9]), 0.0, atol=0.005)


def where(image: np.ndarray, colour: str) -> np.ndarray:
    """Mean (row, column) of the pixels of an object's colour."""
    rgb = np.array(COLOURS[colour]) / np.linalg.norm(COLOURS[colour])
    pixels = image.astype(float)
    share = (pixels @ rgb) / np.maximum(np.linalg.norm(pixels, axis=-1), 1.0)
    rows, columns = np.nonzero((share > 0.97) & (pixels.max(-1) > 60) & (np.ptp(pixels, axis=-1) > 70))
    assert len(rows) > 20, f"no {colour} in the image"
    return np.array([rows.mean(), columns.mean()])


def places(world: TableTop) -> np.ndarray:
    """Places of objects on the table and in the image: x, y, row, column [4, N]."""
    seen = []
    for seed in range(12):
        scene = world.reset(seed)
        image = world.render()
        assert image.shape == (224, 224, 3)
        assert image.dtype == np.uint8
        for thing in scene.objects:
            same = [other for other in scene.objects if other.colour == thing.colour]
            if thing.colour in ("red", "blue", "green") and len(same) == 1:
                seen.append((*thing.position[:2], *where(image, thing.colour)))
    assert len(seen) > 8
    return np.array(seen).T


def test_the_image_is_upright_and_shows_the_objects_where_they_are(world):
    """The camera faces the robot: nearer to it (larger x) is lower, the robot's left (larger y) is to the right."""
    x, y, row, column = places(world)
    assert np.corrcoef(x, row)[0, 1] > 0.8
    assert np.corrcoef(y, column)[0, 1] > 0.9
    sky, table = world.render()[:4].mean(axis=(0, 1)), world.render()[-4:].mean(axis=(0, 1))
    assert table[0] - table[2] > sky[0] - sky[2] + 20, "the brown table is below, the grey background above"


def test_the_camera_moves_around_the_table():
    """A quarter turn counter-clockwise: what has a larger y is nearer, what has a larger x further left."""
    with TableTop(WorldOptions(camera_turn=90.0)) as world:
        x, y, row, column = places(world)
    assert np.corrcoef(y, row)[0, 1] > 0.8
    assert np.corrcoef(x, column)[0, 1] < -0.6


def test_gain_dims_the_camera(world):
    bright = world.render()
    with TableTop(WorldOptions(camera_gain=0.5)) as dim:
        dim.reset(0)
        np.testing.assert_allclose(dim.render(), bright * 0.5, atol=1.0)


def test_bumps_move_the_tool_are_bounded_and_repeat():
    options = WorldOptions(bump=0.05, bump_chance=1.0)
    paths = []
    for _ in range(2):
        world = TableTop(options)
        world.reset(1)
        path = [world.tool_position()]
        for _ in range(5):
            world.step()
            path.append(world.tool_position())
        paths.append(np.array(path))
    np.testing.assert_array_equal(paths[0], paths[1])
    moved = np.linalg.norm(np.diff(paths[0], axis=0), axis=1)
    assert moved.max() > 0.01
    assert moved.max() < 0.056
