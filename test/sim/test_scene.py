import numpy as np
import pytest

from vla_ros.errors import ConfigError
from vla_ros_lab.sim.arm import TWO_ARMS
from vla_ros_lab.sim.scene import CLEARANCE, TABLE_X, TABLE_Y, draw, shuffled_instruction
from vla_ros_lab.sim.tasks import SIDES, TASK_NAMES, Task, make_task, parse_instruction


def test_a_seed_always_gives_the_same_scene():
    for seed in range(20):
        first, second = draw(seed, TASK_NAMES), draw(seed, TASK_NAMES)
        assert first == second
        np.testing.assert_array_equal(first.starts, second.starts)
    assert len({draw(seed).objects for seed in range(20)}) == 20


def test_seeds_keep_their_meaning():
    assert [draw(seed, TASK_NAMES).instruction for seed in range(3)] == [
        "push the green cylinder to the right",
        "push the blue cube to the right",
        "push the yellow cube to the right",
    ]


@pytest.mark.parametrize("tasks", [("pick",), ("push_left", "push_right")])
def test_scenes_are_well_formed(tasks):
    counts, shared, targets = set(), 0, set()
    for seed in range(200):
        scene = draw(seed, tasks)
        names = [thing.name for thing in scene.objects]
        counts.add(len(names))
        targets.add(names[0])
        assert len(set(names)) == len(names), "an instruction must name one object only"
        assert scene.task.name in tasks
        assert scene.task.targets == (names[0],)
        places = np.array([thing.position[:2] for thing in scene.objects])
        assert np.all((places[:, 0] >= TABLE_X[0]) & (places[:, 0] <= TABLE_X[1]))
        assert np.all((places[:, 1] >= TABLE_Y[0]) & (places[:, 1] <= TABLE_Y[1]))
        for index, place in enumerate(places):
            others = np.delete(places, index, axis=0)
            assert np.all(np.linalg.norm(others - place, axis=1) > CLEARANCE)
        colour, shape = scene.objects[0].colour, scene.objects[0].shape
        shared += any(thing.colour == colour or thing.shape == shape for thing in scene.objects[1:])
    assert counts == {3, 4}
    assert len(targets) == 12, "every object becomes a target"
    assert shared > 150, "distractors mostly share the target's colour or shape"


@pytest.mark.parametrize("count", [1, 2, 4])
def test_as_many_objects_as_asked_for(count):
    assert {len(draw(seed, objects=count).objects) for seed in range(20)} == {count}


def test_each_of_two_arms_has_a_target_and_a_distractor_on_its_side():
    for seed in range(100):
        scene = draw(seed, mounts=TWO_ARMS)
        assert [thing.name for thing in scene.objects[:2]] == list(scene.task.targets)
        assert len({thing.name for thing in scene.objects}) == 4
        assert scene.starts.shape == (2, 3)
        assert parse_instruction(scene.instruction) == scene.task
        assert parse_instruction(shuffled_instruction(scene)).targets == tuple(
            thing.name for thing in scene.objects[2:]
        )
        for thing, mount in zip(scene.objects, TWO_ARMS * 2, strict=True):
            assert TABLE_Y[0] <= thing.position[1] - mount.position[1] <= TABLE_Y[1]
    with pytest.raises(ConfigError, match="'push_left' for 2 arms"):
        draw(0, ("push_left",), TWO_ARMS)


@pytest.mark.parametrize("name", TASK_NAMES)
def test_instructions_parse_to_their_task(name):
    task = make_task(name, "blue_cylinder")
    assert task.name == name
    assert parse_instruction(task.instruction) == task
    assert parse_instruction("  " + task.instruction.upper() + ". ") == task


@pytest.mark.parametrize(
    "words", ["", "pick up the", "pick up the pink cube", "fold the towel", "push the red ball"]
)
def test_other_text_is_no_task(words):
    assert parse_instruction(words) is None


def test_left_is_the_robots_left():
    assert parse_instruction("push the red ball to the left") == Task("push", ("red_ball",), "left")
    assert SIDES["left"] > 0  # REP 103: y is left


def test_an_unknown_task_is_refused_with_the_names_that_exist():
    with pytest.raises(ConfigError, match=r"push_up.*pick, push_left, push_right"):
        make_task("push_up", "red_cube")
