import numpy as np

from vla_ros_lab.sim.scene import LIFT_HEIGHT, LIFT_STEPS, PUSH_DISTANCE, Judge, Scene, SceneObject
from vla_ros_lab.sim.tasks import make_task

OBJECTS = (SceneObject("red", "cube", (0.5, 0.1, 0.02), 0.0), SceneObject("blue", "cube", (0.4, -0.1, 0.02), 0.0))


def judge(task: str, *targets: str) -> Judge:
    targets = targets or ("red_cube",)
    return Judge(Scene(0, OBJECTS, make_task(task, *targets), np.zeros((len(targets), 3))))


def poses(red=(0.0, 0.0, 0.0), blue=(0.0, 0.0, 0.0)):
    return {thing.name: np.array(thing.position) + shift for thing, shift in zip(OBJECTS, (red, blue), strict=True)}


UP = (0.0, 0.0, LIFT_HEIGHT + 0.01)


def test_a_pick_needs_three_steps_in_a_row():
    one = judge("pick")
    for lifted in (UP, UP, (0, 0, 0), UP, UP):
        assert not one.update(poses(red=lifted))
    assert one.update(poses(red=UP))
    assert (one.success, one.reason, one.touched) == (True, "success", "")


def test_two_arms_succeed_while_both_targets_are_lifted():
    both = judge("pick", "red_cube", "blue_cube")
    for _ in range(LIFT_STEPS):
        assert not both.update(poses(red=UP))
    for _ in range(LIFT_STEPS):
        assert not both.update(poses(blue=UP))
    for _ in range(LIFT_STEPS - 1):
        assert not both.update(poses(red=UP, blue=UP))
    assert both.update(poses(red=UP, blue=UP))
    assert both.success


def test_a_lower_lift_never_counts():
    one = judge("pick")
    assert not any(one.update(poses(red=(0, 0, LIFT_HEIGHT - 0.005))) for _ in range(10))


def test_lifting_another_object_is_a_final_failure_that_names_it():
    one = judge("pick")
    for _ in range(LIFT_STEPS):
        one.update(poses(blue=UP))
    for _ in range(5):
        one.update(poses(red=UP))
    assert (one.success, one.reason, one.touched) == (False, "wrong_object", "blue_cube")


def test_a_push_counts_to_the_named_side_only():
    far = PUSH_DISTANCE + 0.01
    left, right = judge("push_left"), judge("push_right")
    left.update(poses(red=(0, far, 0)))
    right.update(poses(red=(0, far, 0)))
    assert left.success
    assert not right.decided
    right.update(poses(red=(0, -far, 0)))
    assert right.success


def test_pushing_another_object_is_the_wrong_object():
    one = judge("push_left")
    one.update(poses(blue=(0.0, -PUSH_DISTANCE - 0.01, 0)))
    assert (one.reason, one.touched) == ("wrong_object", "blue_cube")


def test_brushing_another_object_is_allowed():
    one = judge("push_left")
    one.update(poses(blue=(0.0, 0.03, 0)))
    assert not one.decided
