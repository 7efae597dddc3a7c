"""Topics are found by type and name, asked about when several fit, and refused with the candidates otherwise."""

import pytest

from vla_ros.config import Config, build
from vla_ros.replay.records import BagError
from vla_ros.replay.topics import parse_overrides, select

IMAGE, JPEG = "sensor_msgs/msg/Image", "sensor_msgs/msg/CompressedImage"
JOINTS, ARRAY, TEXT = "sensor_msgs/msg/JointState", "std_msgs/msg/Float64MultiArray", "std_msgs/msg/String"
TWIST = "geometry_msgs/msg/TwistStamped"


def topics(**named):
    return {"/" + name.replace("__", "/"): kind for name, kind in named.items()}


def test_the_nodes_own_names_come_first():
    found = select(
        topics(
            other__image=IMAGE,
            camera__image_raw=IMAGE,
            joint_states=JOINTS,
            arm__joint_command=JOINTS,
            vla_policy__action=ARRAY,
            vla_policy__instruction=TEXT,
        ),
        Config(),
        {},
    )
    assert found.cameras == ("/camera/image_raw",)
    assert found.transport == "raw"
    assert found.joint_states == "/joint_states"
    assert found.instruction == "/vla_policy/instruction"
    assert (found.truth, found.truth_type) == ("/vla_policy/action", ARRAY)


def test_foreign_names_are_found_by_type():
    found = select(
        topics(cam0__rgb=IMAGE, cam0__depth=IMAGE, robot__states=JOINTS, servo__twist=TWIST), Config(), {}
    )
    assert found.cameras == ("/cam0/rgb",)
    assert found.joint_states == "/robot/states"
    assert (found.truth, found.truth_type) == ("/servo/twist", TWIST)
    assert found.instruction is None


def test_raw_wins_over_its_own_compressed_copy():
    found = select({"/a/image": IMAGE, "/a/image/compressed": JPEG}, Config(), {})
    assert (found.cameras, found.transport) == (("/a/image",), "raw")


def test_only_compressed():
    found = select({"/camera/image_raw/compressed": JPEG}, Config(), {})
    assert (found.cameras, found.transport) == (("/camera/image_raw/compressed",), "compressed")


def test_joint_states_alone_are_differenced():
    found = select(topics(camera__image_raw=IMAGE, joint_states=JOINTS), Config(), {})
    assert (found.truth, found.truth_type) == (None, JOINTS)
    assert "differenced" in found.described["truth"]


def test_nothing_to_compare_with():
    found = select(topics(camera__image_raw=IMAGE), Config(), {})
    assert found.truth_type == ""


def test_several_cameras_are_asked_about_or_refused():
    two = topics(left__image=IMAGE, right__image=IMAGE)
    with pytest.raises(BagError, match=r"--topics camera=/left/image\n  --topics camera=/right/image"):
        select(two, Config(), {})
    asked = []

    def ask(question, candidates):
        asked.append((question, list(candidates)))
        return candidates[1]

    assert select(two, Config(), {}, ask).cameras == ("/right/image",)
    assert asked == [("Which topic is the camera?", ["/left/image", "/right/image"])]


def test_overrides_win_and_are_checked():
    bag = topics(left__image=IMAGE, right__image=IMAGE, joint_states=JOINTS)
    found = select(bag, Config(), parse_overrides(["camera=/left/image", "truth=none"]))
    assert found.cameras == ("/left/image",)
    assert found.truth_type == ""
    with pytest.raises(BagError, match="has no such topic; it has /joint_states"):
        select(bag, Config(), {"camera": "/nowhere"})
    with pytest.raises(BagError, match="expected sensor_msgs/msg/Image or"):
        select(bag, Config(), {"camera": "/joint_states"})
    with pytest.raises(BagError, match="expected role=/topic"):
        parse_overrides(["kamera=/left/image"])


def test_two_cameras_of_a_policy():
    config = build({"camera.topics": ["/front", "/wrist"], "camera.keys": ["image", "wrist"]})
    assert select(topics(wrist=IMAGE, front=IMAGE), config, {}).cameras == ("/front", "/wrist")
    with pytest.raises(BagError, match="--topics camera=/a,/b"):
        select(topics(front=IMAGE, top=IMAGE), config, {})
    assert select(topics(front=IMAGE, top=IMAGE), config, {"camera": "/top,/front"}).cameras == ("/top", "/front")


def test_a_bag_without_images_is_refused_with_what_it_has():
    with pytest.raises(BagError, match=r"no sensor_msgs/Image or CompressedImage; it has /joint_states"):
        select(topics(joint_states=JOINTS), Config(), {})


def test_a_topic_without_messages_plays_no_part_unless_it_is_named():
    """Recorders list what they subscribed to: a raw camera that was silent beside its compressed images."""
    topics = {"/camera/image_raw": IMAGE, "/camera/image_raw/compressed": JPEG}
    empty = {"/camera/image_raw"}
    assert select(topics, Config(), {}, empty=empty).cameras == ("/camera/image_raw/compressed",)
    named = {"camera": "/camera/image_raw"}
    assert select(topics, Config(), named, empty=empty).cameras == ("/camera/image_raw",)


def test_a_feed_is_no_joint_state():
    config = build({"robot.state_topics": ["objects=/sim/objects"]})
    found = select(topics(camera__image_raw=IMAGE, sim__objects=JOINTS), config, {})
    assert found.joint_states is None
    assert found.state == (("objects", "/sim/objects"),)
