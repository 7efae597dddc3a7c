from dataclasses import asdict

import pytest

from vla_ros.config import Config, build
from vla_ros_lab.replay.storage import BagError
from vla_ros_lab.replay.topics import parse_overrides, select_topics

IMAGE, JPEG = "sensor_msgs/msg/Image", "sensor_msgs/msg/CompressedImage"
JOINTS, ARRAY, TEXT = "sensor_msgs/msg/JointState", "std_msgs/msg/Float64MultiArray", "std_msgs/msg/String"
TWIST = "geometry_msgs/msg/TwistStamped"
TRAJECTORY = "trajectory_msgs/msg/JointTrajectory"
CAMERA = {"/camera/image_raw": IMAGE}
OWN = {"/joint_states": JOINTS, "/arm/joint_command": JOINTS, "/vla_policy/action": ARRAY}
FEED = {"robot.state_topics": ["objects=/sim/objects"]}
TWO = {"camera.topics": ["/front", "/wrist"], "camera.keys": ["image", "wrist"]}


@pytest.mark.parametrize(
    ("topics", "options", "expected"),
    [
        pytest.param(
            {"/other/image": IMAGE, **CAMERA, **OWN, "/vla_policy/instruction": TEXT},
            {},
            {"cameras": ("/camera/image_raw",), "transport": "raw", "joint_states": ("/joint_states",)}
            | {"instruction": "/vla_policy/instruction", "truth": ("/vla_policy/action",), "truth_type": ARRAY},
            id="the node's own names come first",
        ),
        pytest.param(
            {"/cam0/rgb": IMAGE, "/cam0/depth": IMAGE, "/robot/states": JOINTS, "/servo/twist_cmd": TWIST},
            {},
            {"cameras": ("/cam0/rgb",), "joint_states": ("/robot/states",), "instruction": None}
            | {"truth": ("/servo/twist_cmd",), "truth_type": TWIST},
            id="other names are found by type",
        ),
        pytest.param(
            {**CAMERA, "/joint_states": JOINTS, "/current_twist": TWIST, "/target_joint": JOINTS},
            {},
            {"joint_states": ("/joint_states",), "truth": ("/target_joint",), "truth_type": JOINTS},
            id="a command's name counts more than a command's type",
        ),
        pytest.param(
            {**CAMERA, "/joint_states": JOINTS, "/base/measured_twist": TWIST},
            {},
            {"truth": (), "truth_type": JOINTS},
            id="a measured twist is no command",
        ),
        pytest.param(
            {
                **CAMERA,
                "/arm_controller/joint_trajectory": TRAJECTORY,
                "/joint_states": JOINTS,
                "/base/twist": TWIST,
            },
            {},
            {"truth": ("/arm_controller/joint_trajectory",), "truth_type": TRAJECTORY},
            id="a trajectory is always a command",
        ),
        pytest.param(
            {"/a/image": IMAGE, "/a/image/compressed": JPEG},
            {},
            {"cameras": ("/a/image",), "transport": "raw"},
            id="raw before its own compressed copy",
        ),
        pytest.param(
            {"/camera/image_raw/compressed": JPEG},
            {},
            {"cameras": ("/camera/image_raw/compressed",), "transport": "compressed", "truth_type": ""},
            id="compressed only, nothing to compare with",
        ),
        pytest.param(
            {**CAMERA, "/joint_states": JOINTS}, {}, {"truth": (), "truth_type": JOINTS}, id="differenced"
        ),
        pytest.param(
            {**CAMERA, "/sim/objects": JOINTS},
            FEED,
            {"joint_states": (), "state": (("objects", "/sim/objects"),)},
            id="a feed is not a joint state",
        ),
        pytest.param({"/wrist": IMAGE, "/front": IMAGE}, TWO, {"cameras": ("/front", "/wrist")}, id="two cameras"),
        pytest.param(
            {"/wrist/video": IMAGE, "/front/video": IMAGE},
            TWO,
            {"cameras": ("/front/video", "/wrist/video")},
            id="two cameras whose only transport has a name of its own",
        ),
    ],
)
def test_each_role_gets_its_topic(topics, options, expected):
    found = select_topics(topics, build(options), {})
    assert expected.items() <= asdict(found).items()
    if found.truth_type == JOINTS and not found.truth:
        assert "differenced" in found.described["truth"]


def test_several_cameras_are_asked_about_or_refused():
    two = {"/left/image": IMAGE, "/right/image": IMAGE}
    with pytest.raises(BagError, match=r"--topics camera=/left/image\n  --topics camera=/right/image"):
        select_topics(two, Config(), {})
    asked = []

    def ask(question, candidates):
        asked.append((question, list(candidates)))
        return candidates[1]

    assert select_topics(two, Config(), {}, ask).cameras == ("/right/image",)
    assert asked == [("Which topic is the camera?", ["/left/image", "/right/image"])]


@pytest.mark.parametrize(
    ("topics", "candidates"),
    [
        ({"/desired_twist": TWIST, "/target_joint": JOINTS}, ["/desired_twist", "/target_joint"]),
        ({"/left/action": ARRAY, "/right/action": ARRAY}, ["/left/action", "/right/action"]),
        ({"/a/trajectory": TRAJECTORY, "/b/trajectory": TRAJECTORY}, ["/a/trajectory", "/b/trajectory"]),
        ({"/base/twist": TWIST}, ["/base/twist", "joint_states"]),
    ],
)
def test_two_that_could_be_the_truth_are_refused_with_the_option(topics, candidates):
    bag = {**CAMERA, "/joint_states": JOINTS, **topics}
    listed = "\n".join(f"  --topics truth={name}" for name in candidates)
    with pytest.raises(BagError) as refused:
        select_topics(bag, Config(), {})
    assert listed in str(refused.value)
    for name in candidates:
        found = select_topics(bag, Config(), parse_overrides([f"truth={name}"]))
        assert found.truth == (() if name == "joint_states" else (name,))
        asked = select_topics(bag, Config(), {}, lambda question, names, name=name: name)
        assert (asked.truth, asked.truth_type) == (found.truth, found.truth_type)


def test_two_topics_of_the_truth_have_one_type():
    bag = {**CAMERA, "/a": JOINTS, "/b": JOINTS, "/c": TWIST}
    assert select_topics(bag, Config(), {"truth": "/a,/b", "joint_states": "none"}).truth == ("/a", "/b")
    with pytest.raises(BagError, match="expected one type"):
        select_topics(bag, Config(), {"truth": "/a,/c", "joint_states": "none"})


def test_named_topics_win_and_are_checked():
    bag = {"/left/image": IMAGE, "/right/image": IMAGE, "/joint_states": JOINTS}
    found = select_topics(bag, Config(), parse_overrides(["camera=/left/image", "truth=none"]))
    assert (found.cameras, found.truth_type) == (("/left/image",), "")
    assert select_topics(bag, build(TWO), {"camera": "/right/image,/left/image"}).cameras == (
        "/right/image",
        "/left/image",
    )
    with pytest.raises(BagError, match="expected role=/topic"):
        parse_overrides(["kamera=/left/image"])


@pytest.mark.parametrize(
    ("topics", "options", "named", "message"),
    [
        (CAMERA, {}, "/nowhere", "has no such topic; it has /camera/image_raw"),
        ({**CAMERA, "/joint_states": JOINTS}, {}, "/joint_states", "expected sensor_msgs/msg/Image or"),
        ({"/front": IMAGE, "/top": IMAGE}, TWO, "", "--topics camera=/a,/b"),
        ({"/joint_states": JOINTS}, {}, "", "no sensor_msgs/Image or CompressedImage; it has /joint_states"),
    ],
)
def test_a_bag_that_does_not_fit_is_refused_with_what_it_has(topics, options, named, message):
    with pytest.raises(BagError, match=message):
        select_topics(topics, build(options), {"camera": named})


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (
            {"camera.topics": ["/wrist"]},
            r"camera.topics: found \['/wrist'\], but the bag has \['/camera/image_raw'\]",
        ),
        (
            {"topics.joint_states": "/right/states"},
            r"found \['/right/states'\], but the bag has \['/left/states'\]",
        ),
    ],
)
def test_a_topic_that_the_options_name_is_not_replaced_by_the_only_one(options, found):
    """It was, in silence: a wrist's images or the other arm's joints, if they have the same names."""
    bag = {**CAMERA, "/left/states": JOINTS}
    assert select_topics(bag, Config(), {}).joint_states == ("/left/states",)
    with pytest.raises(BagError, match=found):
        select_topics(bag, build(options), {})


def test_a_topic_without_messages_is_ignored_unless_it_is_named():
    """Recorders list everything they subscribed to, such as a silent raw camera beside its compressed images."""
    topics = {"/camera/image_raw": IMAGE, "/camera/image_raw/compressed": JPEG}
    empty = {"/camera/image_raw"}
    assert select_topics(topics, Config(), {}, empty=empty).cameras == ("/camera/image_raw/compressed",)
    named = {"camera": "/camera/image_raw"}
    assert select_topics(topics, Config(), named, empty=empty).cameras == ("/camera/image_raw",)
