"""Recorded H.264: every frame that can be decoded is the encoder's, and none is guessed after a loss."""

from fractions import Fraction

import numpy as np
import pytest

av = pytest.importorskip("av")
writer = pytest.importorskip("mcap.writer")

from vla_ros.cli.main import main  # noqa: E402
from vla_ros.vision.decode import decode_image  # noqa: E402
from vla_ros.vision.messages import encode_compressed, image_stamp  # noqa: E402
from vla_ros_lab.replay.bag import Bag  # noqa: E402

VIDEO = "foxglove_msgs/msg/CompressedVideo"
START, PERIOD = 1_790_002_000_000_000_000, 100_000_000
COUNT, KEY = 30, 10
SIZE = 64, 96


def scene(index):
    """A checked floor that moves, so that a frame guessed from another one is wrong."""
    base = np.random.default_rng(0).integers(0, 255, (SIZE[0] // 8, SIZE[1] // 8, 3), np.uint8)
    return np.roll(base.repeat(8, 0).repeat(8, 1), 6 * index, axis=1)


def encoded(count=COUNT, *, key=KEY, **options):
    """Packets of H.264, one per frame, as an image_transport for CompressedVideo sends them."""
    context = av.CodecContext.create("libx264", "w")
    context.width, context.height, context.pix_fmt = SIZE[1], SIZE[0], "yuv420p"
    context.time_base, context.framerate = Fraction(1, 10), Fraction(10)
    context.options = {"preset": "ultrafast", "tune": "zerolatency", "g": str(key), "crf": "10", **options}
    packets = []
    for index in range(count):
        frame = av.VideoFrame.from_ndarray(scene(index), format="rgb24")
        frame.pts = index
        packets += context.encode(frame)
    return [bytes(packet) for packet in [*packets, *context.encode(None)]]


def message(data, stamp, name="h264"):
    """CDR of CompressedVideo: as CompressedImage, but the format comes after the data."""
    cdr = encode_compressed(b"", stamp, "cam", "")
    head = cdr[: cdr.index(b"cam\0") + 4]
    body = head + len(data).to_bytes(4, "little") + data
    body += bytes(-(len(body) - 4) % 4)
    return body + (len(name) + 1).to_bytes(4, "little") + name.encode() + b"\0"


def write(path, records, others=()):
    """An MCAP file of the video /cam with (time, CDR) of each message, and of other (time, topic, type, CDR)."""
    with path.open("wb") as file:
        out = writer.Writer(file, chunk_size=4000)
        out.start("ros2", "test")
        channels = {}
        for time, topic, kind, data in sorted([(t, "/cam", VIDEO, d) for t, d in records] + list(others)):
            if topic not in channels:
                schema = out.register_schema(kind, "ros2msg", b"")
                channels[topic] = out.register_channel(topic, "cdr", schema)
            out.add_message(channels[topic], time, data, time)
        out.finish()
    return path


def frames(path, start=0):
    """Number to image of each frame, and the losses."""
    with Bag(path) as bag:
        assert bag.topics["/cam"] == "sensor_msgs/msg/Image"
        found = {}
        for record in bag.records(["/cam"], start):
            assert image_stamp(record.data) == record.time
            found[(record.time - START) // PERIOD] = decode_image(record.data).image
        return found, bag.losses


def timed(packets, name="h264"):
    return [(START + i * PERIOD, message(data, START + i * PERIOD, name)) for i, data in enumerate(packets)]


def are_right(found):
    return all(np.abs(image.astype(int) - scene(index)).mean() < 12 for index, image in found.items())


def test_every_frame_of_a_whole_recording(tmp_path):
    path = write(tmp_path / "bag.mcap", timed(encoded()))
    found, losses = frames(path)
    assert list(found) == list(range(COUNT))
    assert are_right(found)
    assert not losses
    assert np.abs(found[3].astype(int) - scene(4)).mean() > 30, "the scenes differ enough to tell them apart"


@pytest.mark.parametrize("first", [1, 9, 10, 11, 25])
def test_from_a_time_on_the_same_images(tmp_path, first):
    path = write(tmp_path / "bag.mcap", timed(encoded()))
    whole, _ = frames(path)
    found, losses = frames(path, START + first * PERIOD)
    assert list(found) == list(range(first, COUNT))
    assert all((found[index] == whole[index]).all() for index in found)
    assert not losses


@pytest.mark.parametrize("lost", [0, 1, 4, 9, 10, 15])
@pytest.mark.parametrize("profile", ["baseline", "high"])
def test_after_a_lost_message_no_frame_is_guessed(tmp_path, lost, profile):
    kept = timed(encoded(profile=profile))
    del kept[lost]
    found, losses = frames(write(tmp_path / "bag.mcap", kept))
    nothing = set(range(lost, (lost // KEY + 1) * KEY))
    assert set(found) == set(range(COUNT)) - nothing
    assert are_right(found)
    wanted = "which come with a key frame" if not lost else "a frame is missing"
    assert [wanted in str(loss) for loss in losses] == [True] * (lost != 9), (
        "frame 9 is the last before a key frame"
    )


def test_a_damaged_or_cut_frame_loses_its_group_only(tmp_path):
    packets = encoded()
    for index, change in ((4, lambda data: data[: len(data) // 2]), (12, lambda data: b"no video"), (27, bytes)):
        packets[index] = change(packets[index])
    packets[27] = b""
    found, losses = frames(write(tmp_path / "bag.mcap", timed(packets)))
    assert are_right(found)
    assert {0, 1, 2, 3, 10, 11, *range(20, 27)} <= set(found)
    assert len(losses) == 3


def test_a_message_recorded_twice_is_shown_twice(tmp_path):
    once = timed(encoded())
    path = write(tmp_path / "bag.mcap", sorted([*once, (once[5][0] + 1, once[5][1])]))
    with Bag(path) as bag:
        assert len(list(bag.records(["/cam"]))) == COUNT + 1
        assert not bag.losses


@pytest.mark.parametrize(
    ("options", "name", "problem"),
    [({"bf": "2", "tune": "film"}, "h264", "B frames"), ({}, "av1", "found video in 'av1', expected h264")],
)
def test_video_that_cannot_be_read_says_so_once_a_group(tmp_path, options, name, problem):
    found, losses = frames(write(tmp_path / "bag.mcap", timed(encoded(**options), name)))
    assert not found or are_right(found)
    assert losses
    assert len(losses) <= 2 * COUNT // KEY
    assert problem in str(losses[0])


def test_video_is_replayed_and_exported(tmp_path, make, store, capsys):
    from vla_ros.graph.messages import message_types

    serialize = message_types("jazzy").serialize
    others = [(START, "/vla_policy/instruction", "std_msgs/msg/String", serialize(make.text("push")))]
    for step in range(150):
        time, joints = START + step * PERIOD // 5, [step / 50, 0.0, 0.04]
        state = serialize(make.joints(time, joints, ["a", "b", "finger"]))
        others += [(time, topic, "sensor_msgs/msg/JointState", state) for topic in ("/joint_states", "/target")]
    kept = timed(encoded())
    del kept[14]
    path = write(tmp_path / "bag.mcap", kept, others)
    options = "robot.joint_names:=[a, b]", "robot.gripper_joint_names:=[finger]", "camera.topics:=[/cam]"
    arguments = [word for option in (*options, "topics.command:=/target") for word in ("-p", option)]
    assert main(["export", str(path), "--output", str(tmp_path / "set"), *arguments]) == 0
    said = capsys.readouterr().out
    assert "a frame is missing; frames are lost until the next key frame" in said
    with av.open(str(next((tmp_path / "set").glob("videos/*/*/*.mp4")))) as video:
        shown = [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]
    # Ticks at 14 to 18 show frame 13 until it is stale (timeouts.camera), 19 has none.
    expected = [*range(14), *[13] * 5, *range(20, 30)]
    assert len(shown) == len(expected)
    assert all(np.abs(a.astype(int) - scene(b)).mean() < 15 for a, b in zip(shown, expected, strict=True))
    result = tmp_path / "result.json"
    replay = ["replay", str(path), "-p", "policy.name:=hold", *arguments, "--no-trials", "--json", str(result)]
    assert main(replay) == 0
    import json

    assert json.loads(result.read_text())["frames"]["used"] == COUNT - 6
