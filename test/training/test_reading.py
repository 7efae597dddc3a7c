"""Samples of bags and LeRobot data sets: episodes, chunks, history, storage, workers, refusals."""

import bisect
import gc
import json
import pickle
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from test.training.conftest import (
    DATA,
    DEMO,
    FRONT,
    JOINT_ACTIONS,
    JOINTS,
    TWO,
    WRIST,
    as_episode,
    as_png,
    configuration,
    messages,
    opened,
    rewrite,
    with_events,
    with_told,
)
from vla_ros.cli.main import main
from vla_ros.config import load
from vla_ros.contract.spec import DeltaTimestamp, ImageFeature, PolicySpec, StateFeature
from vla_ros.errors import VlaRosError
from vla_ros.graph.messages import message_types
from vla_ros.kinematics.solver import Kinematics
from vla_ros.node.receiver import joint_state_of
from vla_ros.policies.base import Policy
from vla_ros.types import ActionChunk
from vla_ros.vision.decode import decode_compressed
from vla_ros.vision.depth import decode_depth
from vla_ros.vision.messages import encode_image, encode_points, image_stamp, with_stamp
from vla_ros_lab.training.episodes import DataError, EpisodeSamples, ReadOptions
from vla_ros_lab.training.reading import open_samples

SHARED = Path(__file__).parents[3] / "shared" / "golden" / "finetune"
CONFIG = configuration(*JOINTS, *JOINT_ACTIONS)
PARTS = "arm.joint_position + arm.gripper"


class Plain(Policy):
    """A policy of two images, a state of 8 numbers and chunks of 8 actions of 8 numbers."""

    def __init__(self, **changes: Any) -> None:
        images = ImageFeature("front"), ImageFeature("wrist")
        state = (StateFeature("state", size=8),)
        self.spec = PolicySpec(
            **{"images": images, "state": state, "action": (), "dimension": 8, "horizon": 8, **changes}
        )

    def infer(self, session: Any, observation: Any) -> ActionChunk:
        raise NotImplementedError


def read(path: Path, policy: Policy | None = None, **options: Any) -> EpisodeSamples:
    return opened(path, policy or Plain(), CONFIG, **options)


def all_actions(samples: EpisodeSamples) -> np.ndarray:
    return np.concatenate([one.actions for one in samples.data])


def same(one: EpisodeSamples, other: EpisodeSamples, exactly: bool = True) -> None:
    assert len(one) == len(other) > 0
    for row in range(len(one)):
        a, b = one[row], other[row]
        compare = np.testing.assert_array_equal if exactly else partial_compare
        for key, image in a.observation.images.items():
            np.testing.assert_array_equal(image, b.observation.images[key])
        compare(a.observation.state["state"], b.observation.state["state"])
        compare(a.actions, b.actions)
        np.testing.assert_array_equal(a.is_pad, b.is_pad)
        assert a.observation.instruction == b.observation.instruction
        assert (a.episode, a.frame) == (b.episode, b.frame)


def partial_compare(a: np.ndarray, b: np.ndarray) -> None:
    """A data set stores float32."""
    np.testing.assert_array_equal(a.astype(np.float32), b.astype(np.float32))


def test_chunks_end_as_in_lerobot(tmp_path: Path) -> None:
    """Indices and pads of LeRobot for episodes of 12 and 5 frames, and of a history of three."""
    if not SHARED.is_dir():
        pytest.skip("the numbers of published code are not here")
    golden = np.load(SHARED / "chunks.npz")
    history = StateFeature("state", size=1, delta_timestamps=tuple(map(DeltaTimestamp, (-2, -1, 0))))
    policy = Plain(images=(ImageFeature("front"),), state=(history,), dimension=1)
    folder = tiny_set(tmp_path / "set", [12, 5])
    samples = opened(folder, policy, CONFIG)
    chunks = np.stack([samples[row].actions[:, 0] for row in range(17)])
    np.testing.assert_array_equal(chunks, golden["action_index"])
    np.testing.assert_array_equal(np.stack([samples[row].is_pad for row in range(17)]), golden["action_is_pad"])
    states = np.stack([samples[row].observation.state["state"][:, 0] for row in range(17)])
    np.testing.assert_array_equal(states, golden["state_index"])
    whole = opened(folder, policy, CONFIG, whole_chunks=True)
    assert [len(one) for one in whole.episodes] == golden["oft_first_frames"].tolist()
    assert not any(whole[row].is_pad.any() for row in range(len(whole)))
    assert [whole[row].frame for row in range(5)] == list(range(5))


def tiny_set(folder: Path, lengths: list[int], **columns: Any) -> Path:
    """A data set as LeRobot lays it out, with one camera of PNG files; state and action count the frames."""
    count = sum(lengths)
    (folder / "data/chunk-000").mkdir(parents=True)
    (folder / "meta/episodes/chunk-000").mkdir(parents=True)
    numbers = np.arange(count, dtype=np.float64)
    episodes = np.repeat(np.arange(len(lengths)), lengths)
    frames = np.concatenate([np.arange(length) for length in lengths])
    table = {
        "observation.state": [[value] for value in numbers],
        "action": [[value] for value in numbers],
        "observation.images.front": [
            {"bytes": as_png(np.full((24, 32, 3), 20 + index % 200, np.uint8)), "path": None}
            for index in range(count)
        ],
        "timestamp": frames / 10,
        "frame_index": frames,
        "episode_index": episodes,
        "index": np.arange(count),
        "task_index": np.zeros(count, int),
        **columns,
    }
    features = {key: {"dtype": "float32", "shape": [1], "names": None} for key in table if "images" not in key}
    features["observation.images.front"] = {"dtype": "image", "shape": [24, 32, 3], "names": None}
    pq.write_table(pa.table(table), folder / "data/chunk-000/file-000.parquet")
    pq.write_table(pa.table({"task_index": [0], "task": ["push"]}), folder / "meta/tasks.parquet")
    info = {"codebase_version": "v3.0", "fps": 10, "features": features}
    (folder / "meta/info.json").write_text(json.dumps(info))
    return folder


def test_the_only_camera_is_not_taken_for_another_that_the_options_name(tmp_path: Path, write_bag: Any) -> None:
    """It was, in silence; without a name it is, and the remarks say so."""
    folder, numbers = tiny_set(tmp_path / "set", [4]), (StateFeature("state", size=1),)
    policy = Plain(images=(ImageFeature("image"),), state=numbers, dimension=1)
    assert opened(folder, policy, CONFIG).remarks == (
        "the policy's image 'image' is taken from 'observation.images.front', the only camera",
    )

    def named(camera: str) -> Plain:
        return Plain(images=(ImageFeature("image", camera=camera),), state=numbers, dimension=1)

    with pytest.raises(VlaRosError, match=r"no camera 'wrist' \(features.images\) for.*; it has .*front; name"):
        opened(folder, named("wrist"), CONFIG)
    assert opened(folder, named("front"), CONFIG).remarks == ()
    bag = write_bag([one for one in with_events(messages()) if one[1] != WRIST])
    one = ("camera.orientation:=[none]", "camera.topics:=[/hand]", "camera.keys:=[wrist]")
    other = configuration(*JOINTS, *JOINT_ACTIONS, *one)
    with pytest.raises(VlaRosError, match=r"camera.topics: found \['/hand'\], but the bag has .*; set it to one"):
        opened(bag, named("wrist"), other)


def test_a_lossless_export_of_a_bag_gives_the_same_samples(bag: Path, export: Callable[..., Path]) -> None:
    samples = read(bag)
    assert samples.rate_hz == 10
    same(samples, read(export(PARTS, PARTS, True)), exactly=False)


def test_videos_of_an_export_differ_by_their_compression(bag: Path, export: Callable[..., Path]) -> None:
    ours, theirs = read(bag), read(export(PARTS, PARTS))
    assert len(ours) == len(theirs) == 39
    rng = np.random.default_rng(0)
    for row in rng.permutation(39).tolist():
        a, b = ours[row], theirs[row]
        partial_compare(a.actions, b.actions)
        for key in ("front", "wrist"):
            change = np.abs(a.observation.images[key].astype(int) - b.observation.images[key])
            near = [
                np.abs(
                    a.observation.images[key].astype(int) - theirs[max(0, row - 1)].observation.images[key]
                ).mean()
            ]
            assert change.mean() < 3, f"{key} of frame {row}: {change.mean()}, its neighbour {near}"


def test_frames_of_a_video_are_the_ones_asked_for(bag: Path, export: Callable[..., Path]) -> None:
    """In any order, those of one after the other, and to another process."""
    samples = read(export(PARTS, PARTS))
    forwards = [samples[row].observation.images["front"] for row in range(39)]
    again = pickle.loads(pickle.dumps(samples))
    for row in (38, 0, 20, 19, 21, 5, 38):
        np.testing.assert_array_equal(again[row].observation.images["front"], forwards[row])
    assert sum(np.array_equal(a, b) for a, b in pairwise(forwards)) < 10


def test_storage_makes_no_difference(bag: Path, write_bag: Callable[..., Path]) -> None:
    """SQLite is unpacked to a temporary file, which goes with the samples."""
    other = read(write_bag(with_events(messages()), storage="sqlite"))
    same(read(bag), other)
    spool = Path(other.pictures._files[0])
    assert spool.exists()
    del other
    gc.collect()
    assert not spool.exists()


@pytest.mark.parametrize("kind", ["bag", "set"])
def test_workers_read_samples(bag: Path, export: Callable[..., Path], kind: str) -> None:
    """In processes that were forked after this one had decoded images."""
    samples = read(bag if kind == "bag" else export(PARTS, PARTS))
    alone = [collate([samples[row]]) for row in range(len(samples))]
    loader = torch.utils.data.DataLoader(samples, batch_size=None, num_workers=2, collate_fn=collate_one)
    for _ in range(2):
        for ours, theirs in zip(alone, loader, strict=True):
            for one, other in zip(ours, theirs, strict=True):
                np.testing.assert_array_equal(one, np.asarray(other))


def collate(samples: list[Any]) -> tuple[np.ndarray, ...]:
    [one] = samples
    return (
        one.observation.images["front"],
        one.observation.images["wrist"],
        one.actions,
        one.observation.state["state"],
    )


def collate_one(sample: Any) -> tuple[np.ndarray, ...]:
    return collate([sample])


def test_failures_and_discarded_episodes_are_left_out(write_bag: Callable[..., Path]) -> None:
    path = write_bag(with_events(messages(), ("failure", "success")))
    samples = read(path)
    assert [one.label for one in samples.data] == ["success"]
    assert samples.notes["failed episodes"] == 1
    assert [one.label for one in read(path, failures=True).data] == ["failure", "success"]
    discarded = write_bag(with_events(messages(), ("discard", "discard")))
    with pytest.raises(VlaRosError, match=r"no episode to train on.*\n.*discarded episodes \(2\)"):
        read(discarded)


def test_of_an_episode_with_corrections_only_those_are_learned(write_bag: Callable[..., Path]) -> None:
    """What moves the arm then is the person's command, which is the target; the policy's is not."""
    found = messages()
    times = [time for time, topic, _ in found if topic == FRONT]
    events = [*as_episode(times[20] - 1, times[40], "success", (times[25] - 1, times[30] - 1))]
    path = write_bag(with_told(found, events))
    whole = read(write_bag(with_events(messages())))
    samples = read(path)
    assert [one.corrected for one in samples.data] == [True]
    assert [one.label for one in samples.data] == [""]  # the episode went on
    assert len(samples) == 4  # the last image ends the action before it
    at = next(row for row in range(39) if newest(whole[row]) == newest(samples[0]))
    np.testing.assert_array_equal(samples[0].actions[0], whole[at].actions[0])
    assert samples[3].is_pad.tolist() == [False] + 7 * [True]


def test_a_slower_policy_gets_resampled_actions(write_bag: Callable[..., Path], bag: Path) -> None:
    """The camera has 10 Hz, the policy 5: half of the frames, whose actions lead twice as far."""
    found = evenly(messages())
    fast = opened(write_bag(found), Plain(), CONFIG)
    unset = configuration(*JOINTS, *JOINT_ACTIONS, "control.rate_hz:=-1.0")
    slow = opened(write_bag(found), Plain(rate_hz=5.0), unset)
    assert opened(write_bag(found), Plain(), unset).rate_hz == 10  # the camera's
    assert (fast.rate_hz, slow.rate_hz) == (10, 5)
    at = next(row for row in range(len(fast)) if newest(fast[row]) == newest(slow[0]))
    for frame in range(5):
        np.testing.assert_allclose(slow[frame].actions[0], fast[at + 2 * frame].actions[1], atol=1e-9)
        assert newest(slow[frame]) == newest(fast[at + 2 * frame])


def newest(sample: Any) -> int:
    return max(image.stamp for image in sample.observation.raw_images.values())


def evenly(found: list[Any]) -> list[Any]:
    """Messages at times 0.1 s apart, those of a step in their order."""
    result, step, start = [], -1, found[0][0]
    order = dict.fromkeys(topic for _, topic, _ in found)
    for _, topic, data in found:
        step += topic == "/joint_states"
        time = start + max(step, 0) * 100_000_000 + list(order).index(topic) * 1_000
        stamped = topic in (FRONT, WRIST, "/joint_states", "/arm/joint_command")
        result.append((time, topic, with_stamp(data, start + max(step, 0) * 100_000_000) if stamped else data))
    return result


def test_past_images_are_those_that_the_node_remembers(write_bag: Callable[..., Path]) -> None:
    bag = write_bag(with_events(evenly(messages())))
    images = (
        ImageFeature("front", delta_timestamps=tuple(map(DeltaTimestamp, (-2, -1, 0)))),
        ImageFeature("wrist"),
    )
    samples, plain = opened(bag, Plain(images=images), CONFIG), read(bag)
    for row in (0, 1, 5, 15, 16, 20, 38):
        stack = samples[row].observation.images["front"]
        first = plain.episodes[plain[row].episode].start
        past = [plain[max(first, row - back)].observation.images["front"] for back in (2, 1, 0)]
        np.testing.assert_array_equal(stack, np.stack(past))


def test_a_frame_that_the_node_would_refuse_is_no_sample(write_bag: Callable[..., Path]) -> None:
    """The other camera's images are 0.3 s older, which timeouts.camera_skew does not allow."""
    config = configuration(*JOINTS, *JOINT_ACTIONS, "timeouts.camera_skew:=0.25")
    samples = opened(write_bag(with_events(messages())), Plain(), config)
    assert len(samples) < 39
    [note] = [note for note in samples.notes if "refuses" in note]
    assert "camera_skew" in note


def test_points_are_read_as_the_node_reads_them(write_bag: Callable[..., Path]) -> None:
    def raw(time: int, topic: str, data: bytes) -> tuple[int, str, bytes]:
        if topic == FRONT:
            decoded = decode_compressed(data)
            data = encode_image(np.ascontiguousarray(decoded.image), decoded.stamp, "camera")
        elif topic == WRIST:
            data = encode_points(np.full((8, 8, 3), time % 10**9, np.float32), image_stamp(data), "base_link")
        return time, topic.removesuffix("/compressed"), data

    kinds = dict.fromkeys(("/camera/image_raw", "/wrist/image_raw"), "sensor_msgs/msg/Image")
    bag = write_bag([raw(*message) for message in with_events(messages())], more=kinds)
    policy = Plain(images=(ImageFeature("front"),), points=(("front", "wrist"),))
    config = configuration(*JOINTS, *JOINT_ACTIONS, "robot.base_frame:=base_link")
    samples = opened(bag, policy, config)
    assert len(samples) > 30
    for row in range(3):
        points = samples[row].observation.points["wrist"]
        assert points.shape == (8, 8, 3)
        assert np.isfinite(points).all()


DEPTH = ("camera.info:=['', /info]", "camera.orientation:=[none]", "robot.base_frame:=base_link")


def depth_bag(write_bag: Callable[..., Path], storage: str) -> tuple[Path, dict[int, np.ndarray]]:
    """The demo's bag with a depth camera on the tip, of which one image is damaged, and its joint positions."""
    make = message_types().message
    found, measured, height, width = [], dict[int, np.ndarray](), 32, 32
    for time, topic, data in with_events(messages()):
        if topic == FRONT:
            decoded = decode_compressed(data)
            data = encode_image(np.ascontiguousarray(decoded.image), decoded.stamp, "camera")
        elif topic == WRIST:
            depth = np.full((height, width), 500 + time % 100, "<u2")
            depth[0, 0] = 0
            stamp = image_stamp(data)
            info = make("sensor_msgs/msg/CameraInfo")(
                header=make("std_msgs/msg/Header")(
                    stamp=make("builtin_interfaces/msg/Time")(sec=0, nanosec=0), frame_id="tool"
                ),
                height=height,
                width=width,
                distortion_model="plumb_bob",
                d=np.zeros(5),
                k=np.array([20.0, 0, 15.5, 0, 20, 15.5, 0, 0, 1]),
                r=np.eye(3).ravel(),
                p=np.zeros(12),
                binning_x=0,
                binning_y=0,
                roi=make("sensor_msgs/msg/RegionOfInterest")(
                    x_offset=0, y_offset=0, height=0, width=0, do_rectify=False
                ),
            )
            found.append((time, "/info", bytes(message_types().serialize(info))))
            data = encode_image(depth[..., None].view(np.uint8), stamp, "tool", "16UC1")
            data = data[: -8 if len(measured) == 40 else None]
        elif topic == "/joint_states":
            joints = joint_state_of(message_types().deserialize(data, make("sensor_msgs/msg/JointState")), time)
            measured[joints.stamp] = joints.positions[:7]
        found.append((time, topic.removesuffix("/compressed"), data))
    kinds = dict.fromkeys(("/camera/image_raw", "/wrist/image_raw"), "sensor_msgs/msg/Image")
    return write_bag(found, storage=storage, more={**kinds, "/info": "sensor_msgs/msg/CameraInfo"}), measured


@pytest.mark.parametrize("storage", ["mcap", "sqlite"])
def test_depth_becomes_the_points_that_the_node_computes(write_bag: Callable[..., Path], storage: str) -> None:
    """Of a camera on a link, by URDF and joint states around each image's stamp; also in another process."""
    bag, measured = depth_bag(write_bag, storage)
    policy = Plain(images=(ImageFeature("front"),), points=(("front", "wrist"),))
    samples = opened(bag, policy, configuration(*JOINTS, *JOINT_ACTIONS, *DEPTH))
    assert len(samples) > 30, samples.notes
    assert "image_invalid: sensor_msgs/Image: data needs 2048 bytes" in str(samples.notes)
    stamps = sorted(measured)
    arm = Kinematics.from_urdf("demo", tip_frame="tool")
    again = pickle.loads(pickle.dumps(samples))
    for row in (30, 0, 17):
        observation = again[row].observation
        message = samples.pictures.message(1, int(samples.data[again[row].episode].rows[1, again[row].frame]))
        depth, stamp, _ = decode_depth(message)
        at = bisect.bisect_left(stamps, stamp)
        before, after = (measured[stamps[index]] for index in (at - 1, at))
        share = (stamp - stamps[at - 1]) / (stamps[at] - stamps[at - 1])
        tip = arm.forward(before + share * (after - before))
        pixels = np.stack(np.meshgrid(np.arange(32), np.arange(32)), axis=-1) - 15.5
        seen = np.dstack((pixels / 20, np.ones((32, 32)))) * depth[..., None]
        np.testing.assert_allclose(observation.points["wrist"], seen @ tip.rotation.T + tip.position, atol=1e-4)
        assert np.isnan(observation.points["wrist"][0, 0]).all()


@pytest.mark.parametrize("kind", ["points", "depth"])
def test_points_and_depth_are_refused_of_a_data_set(export: Callable[..., Path], kind: str) -> None:
    """Training began, and advised after a while to bind them with camera.topics, which a data set has not."""
    policy = Plain(**{kind: (("front", "wrist"),)})
    with pytest.raises(DataError, match=r"takes points or depth \('wrist' of 'front'\).*train on the bags"):
        read(export(PARTS, PARTS), policy)


def test_binary_grippers_are_open_or_closed(bag: Path) -> None:
    assert set(np.unique(all_actions(read(bag))[:, -1])) == {0.0, 1.0}


BAD: dict[str, tuple[Callable[[dict[str, np.ndarray]], None], str]] = {
    "another action size": (lambda columns: columns.update(action=columns["action"][:, :6]), "6 numbers.*have 8"),
    "another state size": (
        lambda columns: columns.update({"observation.state": columns["observation.state"][:, :5]}),
        "5 numbers.*expected 8",
    ),
    "only NaN": (
        lambda columns: columns["action"].fill(np.nan),
        "no episode.*\n.*NaN or infinite numbers \\(39\\)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_data_are_refused(name: str, export: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "set"
    shutil.copytree(export(PARTS, PARTS), folder)
    change, message = BAD[name]
    rewrite(folder, change)
    with pytest.raises(VlaRosError, match=message):
        read(folder)


def test_what_is_missing_is_named(export: Callable[..., Path], tmp_path: Path, bag: Path) -> None:
    def broken(change: Callable[[Path], None]) -> Path:
        folder = tmp_path / f"set{len(list(tmp_path.iterdir()))}"
        shutil.copytree(export(PARTS, PARTS), folder)
        change(folder)
        return folder

    def refused(path: Path, message: str, policy: Policy | None = None) -> None:
        with pytest.raises(VlaRosError, match=message):
            len(read(path, policy)) and read(path, policy)[0].observation.images["front"]

    video = "videos/observation.images.front/chunk-000/file-000.mp4"
    refused(tmp_path / "nowhere", "does not exist")
    refused(broken(lambda folder: (folder / video).unlink()), "file-000.mp4: does not exist")
    refused(broken(lambda folder: (folder / video).write_bytes(b"no video")), "cannot be read as a video")
    refused(broken(lambda folder: shutil.rmtree(folder / "data")), "no parquet files")
    refused(broken(lambda folder: (folder / "meta/info.json").write_text("{")), "not the description")
    refused(
        broken(lambda folder: (folder / "data/chunk-000/file-000.parquet").write_bytes(b"PAR1")), "cannot be read"
    )
    third = Plain(images=(ImageFeature("front"), ImageFeature("third")))
    refused(export(PARTS, PARTS), "no camera for the policy's image 'third'; it has .*front.*wrist", third)
    refused(bag, "the policy needs the image 'third'", third)
    with pytest.raises(VlaRosError, match="beside others"):
        open_samples([export(PARTS, PARTS), bag], Plain().spec, CONFIG, ReadOptions())


def test_a_damaged_image_names_its_recording(write_bag: Callable[..., Path]) -> None:
    found = with_events(messages())
    row = [index for index, one in enumerate(found) if one[1] == WRIST][8]
    time, topic, data = found[row]
    found[row] = time, topic, data[:200] + bytes(len(data) - 200)
    samples = read(write_bag(found))
    with pytest.raises(VlaRosError, match=r"bag at \d+\.\d+ s, frame \d+: /wrist"):
        [samples[index].observation.images["wrist"] for index in range(len(samples))]


def test_a_bag_that_goes_away_is_named(write_bag: Callable[..., Path]) -> None:
    path = write_bag(with_events(messages()))
    samples = pickle.loads(pickle.dumps(read(path)))
    shutil.rmtree(path)
    with pytest.raises(VlaRosError, match="was changed or removed"):
        samples[0].observation.images["front"]


def test_numbers_that_are_not_finite_end_an_episode(export: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "set"
    shutil.copytree(export(PARTS, PARTS), folder)
    rewrite(folder, lambda columns: columns["action"].__setitem__((5, 2), np.nan))
    samples = read(folder)
    assert len(samples) == 38
    assert np.isfinite(all_actions(samples)).all()
    assert [len(one) for one in samples.episodes] == [5, 10, 23]
    assert samples.notes["frames with NaN or infinite numbers"] == 1


def test_a_set_that_lerobot_wrote_is_read_as_lerobot_reads_it() -> None:
    """In random order; another decoder of AV1 may round differently."""
    folder = DATA / "lerobot_set"
    golden = np.load(folder / "answers.npz")
    samples = opened(folder, Plain(state=(StateFeature("state", size=6),), dimension=6), load([], []))
    assert (len(samples), samples.rate_hz, samples.names["action"][1]) == (73, 30, "j1.pos")
    for row in np.random.default_rng(0).permutation(73).tolist():
        sample = samples[row]
        np.testing.assert_array_equal(sample.actions.astype(np.float32), golden["action"][row])
        np.testing.assert_array_equal(sample.is_pad, golden["pad"][row])
        np.testing.assert_array_equal(sample.observation.state["state"].astype(np.float32), golden["state"][row])
        assert sample.observation.instruction == golden["task"][row]
        for key in ("front", "wrist"):
            change = np.abs(sample.observation.images[key][::16, ::16].astype(int) - golden[key][row])
            assert change.max() <= 2


def test_depth_is_exported_as_depth(write_bag: Callable[..., Path], tmp_path: Path) -> None:
    bag, _ = depth_bag(write_bag, "mcap")
    options = [word for option in (*TWO, "camera.info:=['', /info]") for word in ("-p", option)]
    made = ["--state", "arm.joint_position", "--action", "arm.joint_position", "--fps", "10", "--clock", "frames"]
    assert (
        main(["export", str(bag), "--config", str(DEMO), *options, *made, "--output", str(tmp_path / "set")]) == 0
    )
    features = json.loads((tmp_path / "set" / "meta" / "info.json").read_text())["features"]
    assert features["observation.images.wrist"]["shape"] == [32, 32, 1]
    assert features["observation.images.wrist"]["info"]["is_depth_map"]
    assert not features["observation.images.front"]["info"]["is_depth_map"]
    stats = json.loads((tmp_path / "set" / "meta" / "stats.json").read_text())["observation.images.wrist"]
    assert 500 <= np.ravel(stats["max"])[0] < 600
