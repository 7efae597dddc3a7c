"""Transforms at a time against tf2's answers (``data/depth``), and what is no transform."""

import json
import math
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest

from vla_ros.kinematics.rotations import read_rotation
from vla_ros.kinematics.transforms import TransformBuffer, TransformError

FILE = Path(__file__).parents[1] / "data" / "depth" / "golden.json"
SECOND = 1_000_000_000
HERE = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0)


def buffer(*added: tuple[str, str, int, tuple[float, ...], bool], seconds: float = 10.0) -> TransformBuffer:
    made = TransformBuffer(seconds)
    for parent, child, stamp, pose, static in added:
        made.add(parent, child, stamp, pose, static=static)
    return made


def at_x(x: float) -> tuple[float, ...]:
    return (x, *HERE[1:])


def test_transforms_are_those_of_tf2() -> None:
    golden = json.loads(FILE.read_text(encoding="utf-8"))
    lines = [line.split() for line in golden["transforms"]]
    kinds = {kind == "q": list(group) for kind, group in groupby(lines, lambda one: one[0] == "q" and "q")}
    added = [(*words[1:3], int(words[3]), tuple(map(float, words[4:])), words[0] == "s") for words in kinds[False]]
    made, compared = buffer(*added), 0
    for (_, target, source, stamp), answer in zip(kinds[True], golden["answers"], strict=True):
        if answer in ("extrapolation", "lookup", "connectivity"):
            with pytest.raises(TransformError):
                made.at(target, source, int(stamp))
            continue
        numbers = np.array(answer.split(), float)
        found = made.at(target, source, int(stamp))
        np.testing.assert_allclose(found[:3, 3], numbers[:3], atol=1e-9)
        np.testing.assert_allclose(found[:3, :3], read_rotation(numbers[3:], "quaternion_xyzw"), atol=1e-9)
        compared += 1
    assert compared == 26


def test_nothing_is_extrapolated() -> None:
    made = buffer(*(("base", "hand", stamp * SECOND, at_x(stamp), False) for stamp in (5, 6)))
    assert made.at("base", "hand", 5 * SECOND)[0, 3] == 5
    assert made.at("base", "hand", 5 * SECOND + SECOND // 4)[0, 3] == pytest.approx(5.25)
    with pytest.raises(TransformError, match=r"newest transform of 'hand' is 0\.5 s older than the image"):
        made.at("base", "hand", 6 * SECOND + SECOND // 2)
    with pytest.raises(TransformError, match="oldest transform of 'hand' is 1 s newer than the image"):
        made.at("base", "hand", 4 * SECOND)
    with pytest.raises(TransformError, match="do not connect 'eye' with 'base'; found base, hand"):
        made.at("base", "eye", 5 * SECOND)


def test_only_the_transforms_between_two_frames_are_needed() -> None:
    """What is above both, such as odometry, may be missing or late."""
    made = buffer(
        ("map", "base", SECOND, at_x(9), False),
        ("base", "left", 0, at_x(1), True),
        ("/base", "/right", 0, at_x(3), True),
    )
    assert made.at("left", "right", 7 * SECOND)[0, 3] == 2
    assert made.at("base", "base", 7 * SECOND)[0, 3] == 0
    with pytest.raises(TransformError, match="newest transform of 'base'"):
        made.at("map", "left", 7 * SECOND)


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (("base", at_x(1), True), ("base", at_x(1.02), True), "on /tf_static, but changed by 0.02 m"),
        (("base", HERE, True), ("base", (0, 0, 0, 0, 0, 0.1, math.sqrt(0.99)), True), "or in rotation"),
        (("base", at_x(1), True), ("base", at_x(1), False), "changed and is on /tf now"),
        (("base", at_x(1), False), ("base", at_x(1), True), "was on /tf and is on /tf_static now"),
        (("base", at_x(1), False), ("hand", at_x(1), False), "the parent of 'eye' was 'base' and is 'hand' now"),
    ],
)
def test_a_constant_transform_that_changes_waits_until_accepted(before, after, text):
    made = buffer(("world", "base", 0, HERE, True), ("world", "hand", 0, HERE, True))
    for stamp, (parent, pose, static) in enumerate((before, before, after), 1):
        made.at("world", "hand", stamp)
        made.add(parent, "eye", stamp, pose, static=static)
    for _ in range(2):
        with pytest.raises(TransformError, match=text) as error:
            made.at("world", "eye", 3)
        assert error.value.jumped
    assert made.at("world", "hand", 3)[0, 3] == 0  # others are not concerned
    made.accept()
    assert made.at("world", "eye", 3)[0, 3] == after[1][0]


def test_the_same_static_transform_may_be_sent_again() -> None:
    opposite = tuple(-number for number in HERE)  # the same rotation
    made = buffer(("base", "eye", 0, HERE, True), ("base", "eye", 5, opposite, True))
    assert not made.jumps


@pytest.mark.parametrize(
    ("parent", "child", "pose"),
    [
        ("base", "base", HERE),
        ("", "eye", HERE),
        ("base", "", HERE),
        ("base", "eye", (math.nan, *HERE[1:])),
        ("base", "eye", (math.inf, *HERE[1:])),
        ("base", "eye", (0,) * 7),
        ("base", "eye", (0, 0, 0, 0, 0, 0, 1.1)),
    ],
)
def test_what_is_no_pose_is_ignored(parent: str, child: str, pose: tuple[float, ...]) -> None:
    made = buffer((parent, child, 1, pose, False), (parent, child, 1, pose, True))
    with pytest.raises(TransformError, match="found none"):
        made.at("base", "eye", 1)


def test_a_loop_of_frames_ends() -> None:
    made = buffer(*((one, other, 0, HERE, True) for one, other in (("a", "b"), ("b", "c"), ("c", "a"))))
    with pytest.raises(TransformError, match="do not connect 'a' with 'base'"):
        made.at("base", "a", 0)


def test_memory_is_bounded() -> None:
    made = buffer(*(("base", f"frame {number}", 0, HERE, True) for number in range(5000)))
    with pytest.raises(TransformError):
        made.at("base", "frame 4999", 0)
    assert made.at("base", "frame 4000", 0)[0, 3] == 0
    for stamp in range(4000):
        made.add("base", "frame 1", stamp * SECOND // 100, HERE, static=False)
    assert len(made._samples["frame 1"]) <= 1501
    made.accept()
    with pytest.raises(TransformError, match="oldest"):
        made.at("base", "frame 1", 20 * SECOND)
    assert made.at("base", "frame 1", 35 * SECOND)[0, 3] == 0


def test_transforms_may_arrive_out_of_order_and_begin_anew_after_a_jump_of_the_clock() -> None:
    made = buffer(*(("base", "hand", stamp * SECOND, at_x(stamp), False) for stamp in (100, 102, 101, 102)))
    assert made.at("base", "hand", 100 * SECOND + SECOND // 2)[0, 3] == pytest.approx(100.5)
    made.add("base", "hand", 3 * SECOND, at_x(3), static=False)
    made.add("base", "hand", 4 * SECOND, at_x(4), static=False)
    assert made.at("base", "hand", 3 * SECOND + SECOND // 2)[0, 3] == pytest.approx(3.5)


def test_publishers_that_contradict_each_other_are_a_jump_and_a_restart_is_none() -> None:
    made = buffer()

    def say(publisher: bytes, stamp: int, x: float) -> None:
        made.add("base", "hand", stamp * SECOND, at_x(x), static=False, publisher=publisher)

    for stamp in range(5):  # both say the same, or one after the other: nothing is wrong
        say(b"a", stamp, 0.1 * stamp)
        say(b"b", stamp, 0.1 * stamp)
    for stamp in range(5, 9):
        say(b"c", stamp, 0.5)
    assert not made.jumps
    say(b"d", 9, 0.7)
    assert not made.jumps  # it may have replaced c
    say(b"c", 10, 0.5)
    with pytest.raises(TransformError, match=r"contradict each other about .hand., by 0\.2 m") as error:
        made.at("base", "hand", 9 * SECOND)
    assert error.value.jumped
    made.accept()
    say(b"c", 11, 0.5)
    assert made.at("base", "hand", 11 * SECOND)[0, 3] == 0.5
    for number in range(20):
        say(bytes([number]), 12 + number, float(number))
    assert len(made._said["hand"]) == 8
    assert not made.jumps


def test_publishers_that_agree_in_turn_about_a_motion_do_not_contradict_each_other() -> None:
    """Each at 20 Hz, of an arm that turns back at 10 m/s2."""
    made = buffer()
    for step in range(-50, 50):
        pose, publisher = at_x(5 * (step / 40) ** 2), b"a" if step % 2 else b"b"
        made.add("base", "hand", SECOND + step * SECOND // 40, pose, static=False, publisher=publisher)
    assert not made.jumps


def test_after_a_clock_jump_no_transform_from_before_is_used() -> None:
    made = buffer(("base", "hand", 5 * SECOND, HERE, False), ("hand", "eye", 0, at_x(1), True))
    made.forget()
    with pytest.raises(TransformError, match="there is no transform of 'hand' yet"):
        made.at("base", "hand", 5 * SECOND)
    made.add("base", "hand", SECOND, at_x(2), static=False)
    assert made.at("base", "eye", SECOND)[0, 3] == 3
