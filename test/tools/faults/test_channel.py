import random

import numpy as np
import pytest

pytest.importorskip("rosbags", reason="the library rosbags is not installed (extra 'dds')")

from tools.faults.channel import KINDS, Channel, Fault, read_stamp, spoil_joints
from vla_ros.errors import ImageError
from vla_ros.graph.messages import message_types
from vla_ros.vision.decode import decode_image
from vla_ros.vision.messages import encode_image, image_header, image_stamp

IMAGE = np.arange(8 * 6 * 3, dtype=np.uint8).reshape(6, 8, 3)


def message(stamp: int = 1_000_000_001) -> bytes:
    return encode_image(IMAGE, stamp, "camera")


def through(kind: str, amount: float, count: int = 200, seed: int = 3) -> list[tuple[float, bytes]]:
    channel = Channel(random.Random(seed), Fault(kind, amount))
    sent = [item for index in range(count) for item in channel.push(message(1_000_000_001 + index))]
    return sent + channel.set(None)


def test_without_a_fault_messages_are_unchanged() -> None:
    assert Channel(random.Random(0)).push(message()) == [(0.0, message())]


def test_stamps_are_read_and_replaced_as_the_decoder_reads_them() -> None:
    assert read_stamp(message(7_123_456_789)) == image_stamp(message(7_123_456_789)) == 7_123_456_789


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_same_seed_gives_the_same_faults(kind: str) -> None:
    assert through(kind, 2) == through(kind, 2)


def test_drop_loses_the_given_share() -> None:
    assert 60 < len(through("drop", 0.5)) < 140
    assert through("drop", 1.0) == []


@pytest.mark.parametrize(("kind", "amount"), [("reorder", 4), ("burst", 6)])
def test_messages_held_back_are_sent_after_the_fault(kind: str, amount: float) -> None:
    stamps = [read_stamp(item) for _, item in through(kind, amount, count=21)]
    assert sorted(stamps) == list(range(1_000_000_001, 1_000_000_022))
    assert (stamps != sorted(stamps)) == (kind == "reorder")


def test_frozen_frames_have_new_stamps_and_repeated_ones_have_not() -> None:
    frozen, repeated = ([item for _, item in through(kind, 1, count=5)] for kind in ("freeze", "repeat"))
    assert len({read_stamp(item) for item in frozen}) == 5
    assert len({item[12:] for item in frozen}) == 1
    assert len(set(repeated)) == 1


def test_delays_and_shifts() -> None:
    assert {seconds for seconds, _ in through("delay", 0.4)} == {0.4}
    assert all(0 <= seconds <= 0.1 for seconds, _ in through("jitter", 0.1))
    assert len(through("duplicate", 2, count=1)) == 3
    assert read_stamp(through("shift", 5.0, count=1)[0][1]) == 6_000_000_001


def test_corrupt_messages_differ_and_huge_ones_claim_their_size() -> None:
    assert all(item != message(1_000_000_001 + index) for index, (_, item) in enumerate(through("corrupt", 1)))
    header = image_header(through("huge", 1, count=1)[0][1])
    assert (header.height, header.width, header.encoding) == (2**31 - 1, 2**31 - 1, "rgb8")


@pytest.mark.parametrize("kind", ["short", "garbage", "encoding", "huge", "empty"])
def test_invalid_images_are_valid_messages_of_their_type(kind: str) -> None:
    types = message_types("jazzy")
    for _, item in through(kind, 1, count=50):
        parsed = types.deserialize(item, types.message("sensor_msgs/msg/Image"))
        assert parsed.height == image_header(item).height
        with pytest.raises(ImageError):
            decode_image(item)


@pytest.mark.parametrize("kind", ["nan", "infinite", "outside", "missing", "short", "renamed", "none"])
def test_spoiled_joint_states_differ_as_their_kind_says(kind: str) -> None:
    names, positions = [f"joint_{index}" for index in range(7)], [0.1] * 7
    new_names, new_positions = spoil_joints(kind, names, positions, random.Random(1))
    assert (new_names, new_positions) != (names, positions)
    assert (names, positions) == ([f"joint_{index}" for index in range(7)], [0.1] * 7)
    finite = np.isfinite(new_positions).all()
    assert finite == (kind not in ("nan", "infinite"))
    assert (len(new_names) == len(new_positions)) == (kind != "short")
