"""The printed table, and every mismatch of policy and robot."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vla_ros.cli.main import main
from vla_ros.config import build
from vla_ros.contract.binding import Binding, bind, make_arms
from vla_ros.contract.components import parse_components
from vla_ros.contract.spec import DeltaTimestamp, ImageFeature, PolicySpec, StateFeature
from vla_ros.errors import ConfigError

ROBOT: dict[str, Any] = {"robot.urdf": "demo", "robot.gripper_joint_names": ["finger_left", "finger_right"]}
ARMS = make_arms(build(ROBOT))
OPEN = PolicySpec((), action=(), dimension=0, takes_any_state=True)


def bound(spec: PolicySpec, **values: Any) -> Binding:
    config = build({**ROBOT, **{name.replace("__", "."): value for name, value in values.items()}})
    return bind(spec, config, make_arms(config))


def action(text: str, **more: Any) -> PolicySpec:
    return PolicySpec(action=parse_components(text, action=True), **{"dimension": 0, **more})


def test_the_table_shows_sources_and_targets() -> None:
    found = bound(
        OPEN,
        camera__topics=["/front", "/wrist"],
        camera__keys=["front", "wrist"],
        camera__orientation=["none", "rotate_180"],
        features__images=["obs/image = front [224x160]", "wrist", "images/low?"],
        features__state=["obs/state[16] = arm.tip_position + topic.force[6] + arm.joint_position[deg]"],
        features__action=["arm.joint_velocity[1]", "arm.gripper[1..0]", "unused[2]"],
        gripper__open_value=0.0,
        gripper__closed_value=1.0,
        features__delta_timestamps=["obs/state = -0.5, 0"],
        features__delta_indices=["wrist = -15, 0"],
        robot__state_topics=["force=/ft:WrenchStamped"],
        topics__gripper="/grip",
    )
    joints = ", ".join(f"joint_{number}" for number in range(1, 8))
    assert found.rows == (
        ("obs/image", "image", "224x160", "/front"),
        ("wrist", "image", "any", "/wrist, rotate_180 at -15, 0"),
        ("images/low", "image", "", "no camera (optional)"),
        ("obs/state", "arm.tip_position[m]", "3", "/joint_states: tool in base_link at -0.5 s, 0"),
        ("obs/state", "topic.force[6]", "6", "/ft at -0.5 s, 0"),
        ("obs/state", "arm.joint_position[deg]", "7", f"/joint_states: {joints} at -0.5 s, 0"),
        ("action", "arm.joint_velocity[1]", "7", f"/arm/joint_command: {joints}"),
        ("action", "arm.gripper[1..0]", "1", "/grip: finger_left, finger_right"),
        ("action", "unused[2]", "2", "ignored"),
    )
    assert found.table().splitlines()[-1] == "action      unused[2]                2        ignored"
    assert found.spec.dimension == 10
    assert found.cameras == {"obs/image": 0, "wrist": 1}
    assert found.spec.images[0].size == (160, 224)
    assert found.spec.images[1].delta_timestamps == (DeltaTimestamp(-15), DeltaTimestamp())


EIGHT = PolicySpec(state=(StateFeature("s", size=8),))


@pytest.mark.parametrize(
    ("spec", "values", "message"),
    [
        (
            PolicySpec((ImageFeature("front"),)),
            {},
            "needs the image 'front', but the cameras provide image;",
        ),
        (PolicySpec(), {"features__images": ["image = top"]}, "'image' from 'top'"),
        (OPEN, {"features__images": ["a = image", "b = image"]}, "'image' for 'a' and 'b'; each needs"),
        (OPEN, {"features__images": ["a", "a = image"]}, "found a twice"),
        (OPEN, {"features__images": ["a"], "features__state": ["a = arm.gripper"]}, "found a twice"),
        (OPEN, {"features__images": ["a = "]}, "expected KEY or KEY = CAMERA"),
        (OPEN, {"features__state": ["a"]}, "expected KEY = COMPONENT"),
        (OPEN, {"features__state": ["a = arm.speed"]}, "features.state: found 'speed'"),
        (OPEN, {"features__state": ["a[6] = arm.joint_position"]}, "7 numbers; the policy expects 6"),
        (OPEN, {"features__state": ["a = left.gripper"]}, "left.gripper.*the robot has the arms arm"),
        (OPEN, {"features__state": ["a = topic.force"]}, "robot.state_topics: .*'force'.*found none"),
        (OPEN, {"features__state": ["a = arm.joint_position(joint_9)"]}, "joint_9 is not among joint_1"),
        (OPEN, {"features__state": ["a = arm.gripper"], "robot__gripper_joint_names": []}, "no finger joints"),
        (OPEN, {"features__delta_indices": ["imag = -1, 0"]}, "did you mean 'image'"),
        (
            OPEN,
            {"features__delta_indices": ["image = -1.5"]},
            "features.delta_indices: .*expected KEY = steps, zero or",
        ),
        (
            OPEN,
            {"features__delta_timestamps": ["image = soon"]},
            "features.delta_timestamps: .*expected KEY = seconds",
        ),
        (OPEN, {"features__delta_timestamps": ["image = 0.5"]}, "expected KEY = seconds, zero or negative"),
        (
            OPEN,
            {"features__delta_timestamps": ["image = -0.5"], "features__delta_indices": ["image = -5"]},
            "delta_timestamps and features.delta_indices: found image twice",
        ),
        (OPEN, {}, "features.action: not set"),
        (
            EIGHT,
            {},
            "state 's' of 8 numbers is not set",
        ),
        (
            EIGHT,
            {"features__state": ["s[7] = arm.joint_position"]},
            "found 7 numbers for 's', the policy expects 8",
        ),
        (
            PolicySpec(state=(StateFeature("s", parse_components("arm.gripper")),)),
            {"features__state": ["s = arm.fingers"]},
            r"found arm.fingers\[m\] for 's', the policy expects arm.gripper\[0..1\]",
        ),
        (
            PolicySpec((ImageFeature("image", delta_timestamps=(DeltaTimestamp(-3), DeltaTimestamp())),)),
            {"features__delta_indices": ["image = -5, 0"]},
            "but the policy requires",
        ),
        (
            action("arm.joint_position"),
            {"features__action": ["arm.joint_delta"]},
            "policy's actions are arm.joint_p",
        ),
        (OPEN, {"features__action": ["arm.jiont_delta"]}, "features.action: found 'jiont_delta'"),
        (OPEN, {"features__action": ["left.joint_delta"]}, "needs left.joint_delta.*the robot has the arms arm"),
        (OPEN, {"features__action": ["arm.gripper"]}, "found nothing to move 'arm'"),
        (OPEN, {"features__action": ["arm.joint_delta", "arm.tip_delta"]}, "and arm.tip_delta to move 'arm'"),
        (OPEN, {"features__action": ["arm.joint_delta", "arm.gripper", "arm.gripper"]}, "arm.gripper twice"),
        (OPEN, {"features__action": ["arm.tip_position"]}, "tip_position and tip_rotation together"),
        (
            action("arm.joint_delta + arm.gripper[1..0]"),
            {},
            "found 0 and 1, but the policy returns",
        ),
        (action("arm.tip_delta[rotation_vector]"), {}, "found euler_xyz, expected rotation_vector"),
        (action("arm.joint_position", dimension=6), {}, "actions have 6 numbers, found .*(7)"),
        (
            action("arm.joint_position", images=tuple(ImageFeature(key, required=False) for key in "ab")),
            {"camera__topics": ["/front"], "camera__keys": ["front"]},
            "camera.keys: found front, but the policy takes a, b",
        ),
    ],
)
def test_mismatches_of_policy_and_robot_name_both_sides(
    spec: PolicySpec, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        bound(spec, **values)


def test_unused_features_are_ignored_and_open_forms_filled_in() -> None:
    found = bound(
        PolicySpec(),
        features__state=["s = arm.gripper"],
        features__action=["arm.tip_delta[rotation_vector]", "arm.gripper[1..-1]"],
        control__rotation="rotation_vector",
        gripper__open_value=-1.0,
        gripper__closed_value=1.0,
    )
    assert found.states == ()
    assert [str(part) for part, _ in found.columns] == ["arm.tip_delta[rotation_vector]", "arm.gripper[1..-1]"]


def test_two_arms_on_one_topic_have_joints_of_their_own() -> None:
    two = {"robot__arms": ["left", "right"], "left__command": "/l", "right__command": "/r"}
    spec = action("left.joint_position + left.gripper + right.joint_position + right.gripper")
    with pytest.raises(ConfigError, match=r"right\.joint_names: found 'joint_1' on .*, which belongs to 'left'"):
        bound(spec, **two, robot__gripper_joint_names=[])
    apart = {**two, "right__joint_states": "/right/joint_states", "robot__gripper_joint_names": []}
    found = bound(spec, **apart)
    assert [(place.start, place.stop) for _, place in found.columns] == [(0, 7), (7, 8), (8, 15), (15, 16)]
    with pytest.raises(ConfigError, match="found nothing to move 'right'"):
        bound(action("left.joint_position"), **apart)
    with pytest.raises(ConfigError, match=r"arm 'left': robot\.tip_frame"):
        bound(spec, **apart, left__tip_frame="tol")


def test_columns_follow_the_arms_or_share_what_is_left() -> None:
    spec = action("a.joint_position + a.gripper + b.joint_position + unused[1]", dimension=14)
    assert [place.stop for _, place in spec.columns()] == [6, 7, 13, 14]
    assert [place.stop for _, place in spec.columns({"a": 5, "b": 7})] == [5, 6, 13, 14]
    assert spec.grippers == (6,)
    assert spec.motion == "joint_position"
    assert replace(spec, action=parse_components("a.joint_delta + b.joint_position", action=True)).motion == ""
    with pytest.raises(ConfigError, match="actions have 14 numbers"):
        spec.columns({"a": 5, "b": 5})
    assert np.array_equal(PolicySpec().columns()[1][1].indices(7), (6, 7, 1))


def test_a_dry_run_prints_the_table_and_loads_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["run", "--config", "demo", "-p", "policy.name:=expert", "--dry-run"]
    assert main(arguments) == 0
    table = capsys.readouterr().out
    assert "topic.objects[36]" in table
    assert "/camera/image_raw, rotate_180" in table
    assert main([*arguments, "-p", "robot.state_topics:=[]"]) != 0
    assert "needs the state topic 'objects', found none" in capsys.readouterr().err


PIECES = ("image", "arm.gripper", "[0..1]", "[6]", "=", "+", "?", " ", "-15", ",", "-0.5", "left", "topic.f", "(a)")
WORDS = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)
TEXTS = st.lists(WORDS | st.text(max_size=12), max_size=2)


@given(images=TEXTS, state=TEXTS, parts=TEXTS | st.just(["arm.joint_delta"]), timestamps=TEXTS, indices=TEXTS)
@settings(max_examples=300)
def test_any_text_binds_or_is_refused_with_a_reason(
    images: list[str], state: list[str], parts: list[str], timestamps: list[str], indices: list[str]
) -> None:
    names = {"images": images, "state": state, "action": parts}
    names |= {"delta_timestamps": timestamps, "delta_indices": indices}
    config = build(ROBOT | {f"features.{name}": value for name, value in names.items()})
    said = "features."
    try:
        bind(OPEN, config, ARMS)
    except ConfigError as error:
        said = str(error)
    assert said.startswith(("features.", "camera.", "robot.", "gripper.", "control.", "the policy's"))


def test_one_entry_can_name_several_vectors_of_the_policy() -> None:
    keys = ("x", "y", "z", "grip")
    spec = action("arm.joint_position", state=tuple(StateFeature(key, size=1 + (key == "grip")) for key in keys))
    found = bound(spec, features__state=["x + y + z[1] + grip = arm.tip_position + arm.fingers"])
    (reader,) = found.states
    assert (reader.feature.key, reader.feature.size) == ("x + y + z + grip", 5)
    vector = np.arange(10.0).reshape(2, 5)
    split = {key: each.tolist() for key, each in reader.feature.split(vector).items()}
    assert split == {"x": [[0], [5]], "y": [[1], [6]], "z": [[2], [7]], "grip": [[3, 4], [8, 9]]}
    assert reader.feature.split(vector[0])["grip"].tolist() == [3, 4]
    learned = replace(spec, state=tuple(replace(one, middle=(0.5,) * one.size) for one in spec.state))
    (reader,) = bound(learned, features__state=["x + y + z[1] + grip = arm.tip_position + arm.fingers"]).states
    assert (reader.feature.middle, reader.feature.largest) == ((0.5,) * 5, ())
    stated = replace(
        spec, state=(replace(spec.state[0], components=parse_components("arm.gripper")), *spec.state[1:])
    )
    with pytest.raises(ConfigError, match="found a part of a longer vector for 'x', the policy expects"):
        bound(stated, features__state=["x + y + z + grip = arm.tip_position + arm.fingers"])
    # Names that the policy does not take are ignored, as with single vectors; an open policy takes them all.
    other = "a + b = arm.tip_position"
    assert bound(action("arm.joint_position"), features__state=[other]).states == ()
    moved = {"features__action": ["arm.joint_position"]}
    (both,) = bound(OPEN, features__state=["a[1] + b[2] = arm.tip_position"], **moved).states
    assert both.feature.parts == (("a", 1), ("b", 2))
    for state, message in (
        (["x + y + z + grip = arm.tip_position"], r"arm.tip_position\[m\] \(3\), 3 numbers; the policy expects 5"),
        (["x + other = arm.tip_position"], "found 'x \\+ other', but the policy takes only x"),
        (["x + y = arm.gripper", "y = arm.gripper"], "found y twice"),
        (["x + y[2] = arm.tip_position"], "found 2 numbers for 'y', the policy expects 1"),
        (["x +  = arm.gripper"], "expected KEY = COMPONENT"),
        (["x + y ="], "expected KEY = COMPONENT"),
    ):
        with pytest.raises(ConfigError, match=message):
            bound(spec, features__state=state)
    with pytest.raises(ConfigError, match="'b' needs a size, as in"):
        bound(OPEN, features__state=["a[1] + b = arm.tip_position"], **moved)
    with pytest.raises(ConfigError, match="but 'y' has other times"):
        bound(spec, features__state=["x + y + z + grip = arm.tip_position + arm.fingers"],
              features__delta_indices=["y = -1, 0"])  # fmt: skip


def test_groots_libero_binds_with_its_preset() -> None:
    """The vectors and cameras of ``libero_sim``, as in ``test/data/groot/two``."""
    keys = ("x", "y", "z", "roll", "pitch", "yaw", "gripper")
    images = tuple(ImageFeature(key) for key in ("image", "wrist_image"))
    vectors = tuple(StateFeature(key, size=1 + (key == "gripper")) for key in keys)
    found = bound(PolicySpec(images, vectors, (), dimension=7, horizon=16), preset="gr00t_libero")
    assert [row[0] for row in found.rows] == ["image", "wrist_image", *[" + ".join(keys)] * 3, "action", "action",
                                              "action", "frames"]  # fmt: skip
    assert [size for _, size in found.states[0].feature.parts] == [1, 1, 1, 1, 1, 1, 2]
