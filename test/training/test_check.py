"""`vla-ros finetune --check`: a good set says nothing wrong, and each fault is named."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from test.training.conftest import (
    DEMO,
    FAMILIES,
    FRONT,
    TURNED,
    TWO,
    WRIST,
    configuration,
    messages,
    opened,
    rewrite,
    with_events,
)
from test.training.test_reading import tiny_set
from vla_ros.cli.main import main
from vla_ros.config.checkpoints import folder_of
from vla_ros_lab.report import video
from vla_ros_lab.training.check import check as examine
from vla_ros_lab.training.cli import text_of
from vla_ros_lab.training.reading import open_samples

STATE = "arm.joint_position + arm.gripper[0..1 clipped]"
ACTION = "arm.joint_position + arm.gripper"
OPTIONS = (
    "control.rate_hz:=10.0",
    TURNED,
    *TWO,
    "features.images:=['image = front']",
    f"features.state:=['state = {STATE}']",
    "features.action:=[arm.joint_position, arm.gripper]",
)


@pytest.fixture
def check(tmp_path: Path, capsys: Any) -> Callable[..., tuple[dict[str, Any], str]]:
    """Figures and text of a check of data with the demo's pi0.5."""

    def run(data: Path, *more: str, checkpoint: str = "demo-pi", options: tuple[str, ...] = OPTIONS) -> Any:
        file = tmp_path / "check.json"
        words = [word for option in options for word in ("-p", option)]
        command = ["finetune", str(data), "--checkpoint", checkpoint, "--config", str(DEMO), "--config"]
        assert main([*command, "demo_pi", *words, "--check", "--json", str(file), *more]) == 0
        return json.loads(file.read_text()), capsys.readouterr().out

    return run


def wrong(figures: dict[str, Any]) -> list[str]:
    return [f"{one['name']}: {one['found']}" for one in figures["findings"] if one["level"] == "wrong"]


@pytest.fixture
def changed(
    export: Callable[..., Path], tmp_path: Path
) -> Callable[[Callable[[dict[str, np.ndarray]], None]], Path]:
    """A data set of the demo's bag with other numbers."""

    def make(change: Callable[[dict[str, np.ndarray]], None], lossless: bool = False) -> Path:
        folder = tmp_path / "set"
        shutil.copytree(export(STATE, ACTION, lossless), folder)
        rewrite(folder, change)
        return folder

    return make


def test_a_good_bag_and_its_export_say_nothing_wrong(check: Any, bag: Path, export: Callable[..., Path]) -> None:
    for data in (bag, export(STATE, ACTION)):
        figures, text = check(data)
        assert wrong(figures) == [], text
        assert figures["wrong"] == 0
        assert "Nothing looks wrong." in text
        assert figures["choice"] == "checkpoint"
        assert figures["summary"]["frames"] == 39
        assert [row["unit"] for row in figures["rows"][:8]] == ["rad"] * 7 + ["0..1"]
        assert "joint_1.pos" in text


def test_statistics_are_a_choice(check: Any, bag: Path) -> None:
    figures, text = check(bag, "--statistics", "data")
    assert (figures["choice"], figures["why"]) == ("data", "--statistics data")
    assert "Statistics: the data's" in text


def test_degrees_for_radians(check: Any, changed: Any) -> None:
    def degrees(columns: dict[str, np.ndarray]) -> None:
        for name in ("observation.state", "action"):
            columns[name][:, :7] *= 180 / np.pi

    figures, _ = check(changed(degrees))
    found = wrong(figures)
    assert any(one.startswith("state: degrees") for one in found), found
    assert any(one.startswith("action: degrees") for one in found), found
    assert figures["choice"] == "data"
    assert "do not fit" in figures["why"]


def test_an_inverted_gripper(check: Any, changed: Any) -> None:
    def invert(columns: dict[str, np.ndarray]) -> None:
        columns["action"][:, 7] = 1 - columns["action"][:, 7]

    [found] = [one for one in wrong(check(changed(invert))[0]) if one.startswith("gripper")]
    assert "inverted" in found


def test_numbers_in_another_order(check: Any, changed: Any) -> None:
    def swap(columns: dict[str, np.ndarray]) -> None:
        columns["observation.state"][:, [2, 3]] = columns["observation.state"][:, [3, 2]]

    found = wrong(check(changed(swap))[0])
    assert any(one.startswith("state: 2 ") and "standard deviations" in one for one in found), found


def test_another_rate(check: Any, export: Callable[..., Path]) -> None:
    figures, _ = check(export(STATE, ACTION), options=(*OPTIONS, "features.rate_hz:=30.0"))
    assert any("rate: the data have 10 Hz, the policy's step is 0.0333 s" in one for one in wrong(figures))


def stamped_copy(found: list[Any], topic: str, change: Callable[[int, list[bytes]], bytes]) -> list[Any]:
    """Replace the images of a topic by ``change(number, images)``."""
    images = [data for _, name, data in found if name == topic]
    numbers = iter(range(len(images)))
    return [(time, name, change(next(numbers), images) if name == topic else data) for time, name, data in found]


def jpeg(data: bytes, pixels: np.ndarray | None = None) -> bytes:
    """The message with another picture."""
    import io

    from PIL import Image

    from vla_ros.vision.messages import encode_compressed, image_stamp

    out = io.BytesIO()
    Image.fromarray(np.zeros((224, 224, 3), np.uint8) if pixels is None else pixels).save(out, "JPEG")
    return encode_compressed(out.getvalue(), image_stamp(data), "camera")


ONE = (*OPTIONS, "camera.keys:=[front]", "camera.topics:=[/a]", "camera.orientation:=[none]")
"""Options of a data set with one camera."""


def test_a_black_camera(check: Any, write_bag: Callable[..., Path]) -> None:
    found = stamped_copy(messages(), FRONT, lambda number, images: jpeg(images[number]))
    figures, _ = check(write_bag(with_events(found)))
    [finding] = [one for one in figures["findings"] if "black" in one["found"]]
    assert finding["level"] == "wrong"
    assert "a black one is not" in finding["fix"]  # the checkpoint masks a camera that is missing


def test_a_frozen_camera(check: Any, write_bag: Callable[..., Path]) -> None:
    from vla_ros.vision.messages import image_stamp, with_stamp

    found = stamped_copy(
        messages(),
        FRONT,
        lambda number, images: with_stamp(images[min(number, 20) // 20 * 20], image_stamp(images[number])),
    )
    figures, _ = check(write_bag(with_events(found)))
    assert any("image: frozen" in one and "2 of the 2" in one for one in wrong(figures)), wrong(figures)


@pytest.fixture
def two_cameras() -> Any:
    """Options for the golden SmolVLA, which takes two cameras."""
    from test.training.conftest import FAMILIES

    return ("policy.name:=smolvla", TURNED, *TWO, "control.rate_hz:=10.0", *FAMILIES["smolvla"])


def test_swapped_cameras(write_bag: Callable[..., Path]) -> None:
    """In one of four episodes, each camera's images are the other's."""
    from vla_ros.contract.spec import ImageFeature, PolicySpec

    red = np.full((224, 224, 3), 90, np.uint8)
    red[:, :112, 0] = 250
    found = stamped_copy(
        messages(), WRIST, lambda number, images: jpeg(images[number], np.roll(red, 3 * number, 1))
    )
    times = [time for time, topic, _ in found if topic == FRONT]
    inside = [one for one in found if times[24] <= one[0] < times[30]]
    other = {FRONT: WRIST, WRIST: FRONT}
    swapped = [
        (time, other.get(topic, topic), data) if one in inside else one
        for one in found
        for time, topic, data in [one]
    ]
    from test.training.conftest import as_episode, with_told

    events = [
        event
        for begin, end in ((18, 23), (24, 29), (30, 35), (36, 41))
        for event in as_episode(times[begin] - 1, times[end], "success")
    ]
    spec = PolicySpec(images=(ImageFeature("front"), ImageFeature("wrist")), horizon=2)
    config = configuration("policy.name:=hold", "camera.orientation:=[none, none]")
    for data, faulty in ((found, False), (swapped, True)):
        path = write_bag(with_told(sorted(data, key=lambda one: one[0]), events))
        report = examine(open_samples([path], spec, config), None, config)
        assert any("swapped in 1 of the 4" in one.found for one in report.wrong) == faulty, report.wrong


def test_a_missing_camera_is_said(check: Any, bag: Path, tmp_path: Path, two_cameras: Any, capsys: Any) -> None:
    options = (*two_cameras, "features.images:=['front = front', 'wrist = top']")
    words = [word for option in options for word in ("-p", option)]
    command = ["finetune", str(bag), "--config", str(DEMO), *words, "--check", "--checkpoint"]
    checkpoint = next(one.split(":=")[1] for one in two_cameras if "checkpoint" in one)
    assert main([*command, checkpoint]) == 0
    assert "wrist: has no camera in the data; the policy masks it" in capsys.readouterr().out


def test_idle_starts(check: Any, changed: Any) -> None:
    def idle(columns: dict[str, np.ndarray]) -> None:
        for episode in (0, 1):
            rows = np.flatnonzero(columns["episode_index"] == episode)[:10]
            for name in ("observation.state", "action"):
                columns[name][rows] = columns[name][rows[0]]

    assert any("idle starts" in one for one in wrong(check(changed(idle))[0]))


def test_failures_labelled_as_successes(check: Any, tmp_path: Path) -> None:
    """Six episodes with the label success; the last one ends early, the one before never moves."""
    lengths = [60, 60, 60, 60, 60, 12]
    count = sum(lengths)
    wave = np.sin(np.arange(count) / 7)[:, None] * np.ones(8) * 0.1 + np.array([0, 0.7, 0, 1.7, 0, 0.7, 0, 0.5])
    wave[240:300] = wave[240]
    done = np.zeros(count, bool)
    done[np.cumsum(lengths) - 1] = True
    columns = {"observation.state": wave.tolist(), "action": wave.tolist(), "next.success": done.tolist()}
    folder = tiny_set(tmp_path / "set", lengths, **columns)
    figures, _ = check(folder, options=ONE)
    [found] = [one for one in wrong(figures) if one.startswith("labels")]
    assert "2 of 6" in found
    assert "episode 4" in found
    assert "episode 5" in found


def test_episodes_shorter_than_a_chunk(check: Any, tmp_path: Path) -> None:
    wave = (np.sin(np.arange(29) / 7)[:, None] * np.ones(8) * 0.1).tolist()
    folder = tiny_set(tmp_path / "set", [5, 20, 4], **{"observation.state": wave, "action": wave})
    assert any("2 of 3 are shorter than a chunk of 16" in one for one in wrong(check(folder, options=ONE)[0]))


def test_nan(check: Any, changed: Any) -> None:
    found = wrong(check(changed(lambda columns: columns["action"].__setitem__((3, 0), np.nan)))[0])
    assert any("frames with NaN or infinite numbers (1)" in one for one in found)


def test_one_frame(check: Any, tmp_path: Path) -> None:
    columns = {"observation.state": [[0.0] * 8], "action": [[0.0] * 8]}
    folder = tiny_set(tmp_path / "set", [1], **columns)
    found = wrong(check(folder, options=ONE)[0])
    assert any("1 frame in all" in one for one in found)


def test_a_hundred_thousand_frames_of_one_pose(check: Any, tmp_path: Path) -> None:
    """200 episodes of 500 frames are read in seconds, and the standstill is told."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    count, length, folder, key = 100_000, 500, tmp_path / "set", "observation.images.front"
    tiny_set(folder, [2])
    path = folder / f"videos/{key}/chunk-000/file-000.mp4"
    path.parent.mkdir(parents=True)
    video.encode(path, (np.full((24, 32, 3), 90, np.uint8) for _ in range(length)), 10, 30)
    info = json.loads((folder / "meta/info.json").read_text())
    info["features"][key]["dtype"] = "video"
    info["video_path"] = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
    (folder / "meta/info.json").write_text(json.dumps(info))
    of = {f"videos/{key}/{name}": np.zeros(200, int) for name in ("chunk_index", "file_index", "from_timestamp")}
    table = {"episode_index": np.arange(200), **of}
    pq.write_table(pa.table(table), folder / "meta/episodes/chunk-000/file-000.parquet")
    pose = pa.FixedSizeListArray.from_arrays(pa.array(np.full(8 * count, 0.5)), 8)
    frames = np.arange(count)
    numbers = {"timestamp": frames % length / 10, "frame_index": frames % length, "episode_index": frames // length}
    more = {"index": frames, "task_index": np.zeros(count, int)}
    pq.write_table(
        pa.table({"observation.state": pose, "action": pose, **numbers, **more}),
        folder / "data/chunk-000/file-000.parquet",
    )
    figures, text = check(folder, options=ONE)
    assert figures["summary"]["frames"] == count
    assert any("neither the arm nor an action moves" in one for one in wrong(figures)), text


def test_no_episode_and_no_data_end_with_a_message(
    write_bag: Callable[..., Path], capsys: Any, tmp_path: Path
) -> None:
    discarded = write_bag(with_events(messages(), ("discard", "discard")))
    words = [word for option in OPTIONS for word in ("-p", option)]
    command = ["--checkpoint", "demo-pi", "--config", str(DEMO), "--config", "demo_pi", *words, "--check"]
    for data, message in (
        (discarded, "no episode to train on"),
        (tmp_path, "no bag"),
        (tmp_path / "x", "does not exist"),
    ):
        assert main(["finetune", str(data), *command]) == 1
        assert message in capsys.readouterr().err


def test_the_openvla_of_the_demo_has_statistics_too(check: Any, bag: Path, capsys: Any) -> None:
    assert main(["finetune", str(bag), "--checkpoint", "demo", "--config", str(DEMO), "--check"]) == 0
    text = capsys.readouterr().out
    assert "tip_delta.0" in text
    assert "as it is" in text  # the gripper is not normalised
    assert folder_of("demo").is_dir()


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_compared(name: str, family: Any, bag: Path) -> None:
    """Each number that the checkpoint normalises has its statistics beside the data's."""
    config, policy = family(name)
    samples, learned = opened(bag, policy, config), policy.learned()
    report = examine(samples, learned, config)
    actions = [row for row in report.rows if row.feature == "action"]
    assert len(actions) == policy.spec.dimension
    assert [row.checkpoint is not None for row in actions] == learned.action.used.tolist()
    assert [row.name for row in actions] == list(samples.names["action"])
    states = [row for row in report.rows if row.feature == "state"]
    assert len(states) == sum(one.size for one in policy.spec.state)
    assert "checkpoint" in text_of(report)
    assert np.isfinite([end for row in report.rows for end in row.data]).all()
