"""What is odd in a recording costs a part of it, never all, and nothing is chosen in silence.

Pins: bags that cannot be read, damaged images and images of another size, receive times that are equal, zero or
come in bursts, stamps in another order, a rate that is guessed, instructions that only the node's events have.
"""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from test.replay.conftest import make, store  # noqa: F401

av = pytest.importorskip("av")
pq = pytest.importorskip("pyarrow.parquet")
writer = pytest.importorskip("mcap.writer")

from vla_ros.cli.main import main  # noqa: E402
from vla_ros.graph.messages import message_types  # noqa: E402

START, PERIOD = 1_790_002_000_000_000_000, 100_000_000
OPTIONS = "robot.joint_names:=[a, b]", "robot.gripper_joint_names:=[finger]", "camera.topics:=[/camera]"
ROBOT = [word for option in OPTIONS for word in ("-p", option)]
COUNT = 20
TYPES = {
    "/camera": "sensor_msgs/msg/Image",
    "/joint_states": "sensor_msgs/msg/JointState",
    "/arm/joint_command": "sensor_msgs/msg/JointState",
    "/vla_policy/instruction": "std_msgs/msg/String",
    "/vla_policy/event": "std_msgs/msg/String",
    "/vla_policy/status": "std_msgs/msg/String",
}


@pytest.fixture
def messages(make: Any) -> Any:  # noqa: F811
    """``messages(count)``: (time, topic, CDR) of images with the grey level 10 i, joints and commands."""
    serialize = message_types("jazzy").serialize

    def made(count: int = COUNT, instruction: str = "push", size: tuple[int, int] = (16, 32)) -> list[Any]:
        found = [(START, "/vla_policy/instruction", serialize(make.text(instruction)))] if instruction else []
        for step in range(5 * count):
            at, t = START + step * PERIOD // 5, step / 50
            joints = serialize(make.joints(at, [t, -t, 0.04], ["a", "b", "finger"]))
            found += [(at, "/joint_states", joints), (at, "/arm/joint_command", joints)]
            if step % 5 == 0:
                pixels = np.full((*size, 3), 10 * (step // 5) % 250, np.uint8)
                found.append((at + 1, "/camera", serialize(make.image(at, pixels))))
        return [(time, topic, bytes(data)) for time, topic, data in found]

    return made


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """``write(name, messages)`` writes an MCAP file in the order of the messages, and returns it."""

    def written(name: str, records: Any) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        out = io.BytesIO()
        file = writer.Writer(out, chunk_size=20_000)
        file.start("ros2", "test")
        channels: dict[str, int] = {}
        for time, topic, data in records:
            if topic not in channels:
                schema = file.register_schema(TYPES[topic], "ros2msg", b"")
                channels[topic] = file.register_channel(topic, "cdr", schema)
            file.add_message(channels[topic], time, data, time)
        file.finish()
        path.write_bytes(out.getvalue())
        return path

    return written


@pytest.fixture
def export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """``export(path, *arguments)`` returns the status, what was said, and the data set's folder."""

    def run(path: Path, *arguments: str) -> tuple[int, str, Path]:
        folder = tmp_path / "set"
        status = main(["export", str(path), "--output", str(folder), *ROBOT, *arguments])
        said = capsys.readouterr()
        return status, said.out + said.err, folder

    return run


def shown(folder: Path) -> list[int]:
    """Number of the image in each frame."""
    levels: list[float] = []
    for path in sorted(folder.glob("videos/*/*/*.mp4")):
        with av.open(str(path)) as video:
            levels += [float(frame.to_ndarray(format="rgb24").mean()) for frame in video.decode(video=0)]
    return [round(level / 10) for level in levels]


def rows(folder: Path) -> list[dict[str, Any]]:
    return [row for path in sorted(folder.glob("data/*/*.parquet")) for row in pq.read_table(path).to_pylist()]


def tasks(folder: Path) -> list[str]:
    episodes = pq.read_table(folder / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    return [row["tasks"][0] for row in episodes]


def changed(records: Any, change: Any, topic: str = "/camera") -> list[Any]:
    """Apply ``change(number, time, data)``, which returns time and data, to the messages of a topic."""
    number, found = -1, []
    for time, name, data in records:
        if name == topic:
            number += 1
            time, data = change(number, time, data)
        found.append((time, name, data))
    return sorted(found, key=lambda one: one[0])


def test_bags_that_cannot_be_read_are_left_out_and_named(messages: Any, write: Any, export: Any) -> None:
    good = messages()
    folder = write("bags/b/b.mcap", good).parents[1]
    write("bags/a/a.mcap", [])
    write("bags/c/c.mcap", [one for one in good if one[1] != "/camera"])
    write("bags/d/d.mcap", [one for one in good if one[1] != "/joint_states"])
    write("bags/e/e.mcap", [one for one in good if one[1] != "/arm/joint_command"])
    (folder / "f").mkdir()
    (folder / "f" / "f.mcap").write_bytes(b"")
    write("bags/g/g.mcap", messages(size=(8, 8)))
    write("bags/h/h.mcap", good)
    status, said, output = export(folder)
    assert status == 0
    assert shown(output) == [*range(COUNT), *range(COUNT)]
    for name in "acdefg":
        assert f"{folder / name}" in said or f"/camera: 8x8 instead of 32x16 ({COUNT})" in said, name


def test_what_is_left_of_nothing_is_an_error_with_the_reasons(messages: Any, write: Any, export: Any) -> None:
    write("bags/a.mcap", [])
    status, said, output = export(write("bags/b.mcap", [one for one in messages() if one[1] != "/camera"]).parent)
    assert status == 1
    assert "no sensor_msgs/Image" in said
    assert not output.exists()


def test_a_damaged_image_costs_its_tick(messages: Any, write: Any, export: Any) -> None:
    """Also a damaged header, the first image, and one of another size; the others stay."""
    other = {
        number: data
        for number, (_, _, data) in enumerate(one for one in messages(size=(8, 8)) if one[1] == "/camera")
    }
    harm = {
        0: lambda data: data[:-40],
        5: lambda data: data[:2],
        6: lambda data: data[:200],
        12: lambda _: other[12],
    }
    records = changed(messages(), lambda n, time, data: (time, harm.get(n, lambda one: one)(data)))
    status, said, output = export(write("bag.mcap", records))
    assert status == 0
    assert shown(output) == [*range(1, 5), *range(7, 12), *range(13, COUNT)]
    assert [round(row["observation.state"][0] * 10) for row in rows(output)] == shown(output)
    assert "ticks with a damaged image (4)" in said
    assert said.count("damaged images:") == 1, "the first damage is described, not every one"
    assert [row["frame_index"] for row in rows(output)] == [*range(4), *range(5), *range(COUNT - 13)]


def test_an_export_with_damaged_images_is_resumed(
    messages: Any, write: Any, export: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = changed(messages(), lambda n, time, data: (time, data[:-40] if n in (5, 13) else data))
    path = write("bag.mcap", records)

    def interrupt(self: Any) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("vla_ros_lab.export.dataset.DatasetWriter.finish", interrupt)
        assert export(path)[0] == 130
    status, _, output = export(path)
    assert status == 0
    assert shown(output) == [*range(5), *range(6, 13), *range(14, COUNT)]


def test_a_bag_of_damaged_images_only_is_refused(messages: Any, write: Any, export: Any) -> None:
    status, said, _ = export(write("bag.mcap", changed(messages(), lambda n, time, data: (time, data[:-40]))))
    assert status == 1
    assert "no image of /camera can be used" in said


@pytest.mark.parametrize("tick", [250_000_000, 10**15])
def test_equal_receive_times_show_each_image_by_its_stamp(
    tick: int, messages: Any, write: Any, export: Any
) -> None:
    """A slow /clock, and one that never ticked."""
    path = write("bag.mcap", [(time // tick * tick, topic, data) for time, topic, data in messages()])
    status, said, output = export(path, "--clock", "stamp")
    assert status == 0, said
    assert shown(output) == list(range(COUNT))
    assert [round(row["observation.state"][0] * 10) for row in rows(output)] == list(range(COUNT))


def test_stamps_in_another_order_than_the_images_came(messages: Any, write: Any, export: Any) -> None:
    late = {3: 3, 7: 4, 8: 2}
    records = changed(messages(), lambda n, time, data: (time + late.get(n, 0) * PERIOD + 2, data))
    status, _, output = export(write("bag.mcap", records), "--clock", "stamp")
    assert status == 0
    assert shown(output) == list(range(COUNT))


def test_images_without_a_stamp_are_not_on_the_clock_of_stamps(messages: Any, write: Any, export: Any) -> None:
    def unstamped(number: int, time: int, data: bytes) -> Any:
        return time, data[:4] + bytes(8) + data[12:] if number in (4, 9) else data

    status, said, output = export(write("bag.mcap", changed(messages(), unstamped)), "--clock", "stamp")
    assert status == 0
    assert shown(output) == [*range(4), 3, *range(5, 9), 8, *range(10, COUNT)]
    assert "images without a stamp (2)" in said
    every = changed(messages(), lambda n, time, data: (time, data[:4] + bytes(8) + data[12:]))
    status, said, _ = export(write("none.mcap", every), "--clock", "stamp", "--output", str(output) + "2")
    assert status == 1
    assert "no image of /camera has a stamp; use --clock received" in said


def test_zero_receive_times_are_refused_with_the_option(messages: Any, write: Any, export: Any) -> None:
    path = write("bag.mcap", [(0, topic, data) for _, topic, data in messages()])
    status, said, _ = export(path)
    assert status == 1
    assert f"all {COUNT} images of /camera have the receive time 0 ns" in said
    assert "--clock stamp" in said


def bursts(number: int, time: int, data: bytes) -> Any:
    return START + (number // 3 * 3 + 2) * PERIOD + number % 3 * 1_000_000, data


def test_bursts_do_not_make_the_rate(messages: Any, write: Any, export: Any) -> None:
    status, said, output = export(write("bag.mcap", changed(messages(60), bursts)))
    assert status == 0
    info = json.loads((output / "meta/info.json").read_text())
    assert info["fps"] == 10
    assert info["total_frames"] < 70
    assert "are in no frame of the data set: they came in bursts" in said
    assert "--clock stamp uses the images' own times" in said


def test_every_image_twice_does_not_double_the_rate(messages: Any, write: Any, export: Any) -> None:
    once = messages()
    path = write("bag.mcap", [one for each in once for one in [each] * (1 + (each[1] == "/camera"))])
    status, _, output = export(path)
    assert status == 0
    assert json.loads((output / "meta/info.json").read_text())["fps"] == 10
    assert shown(output) == list(range(COUNT))


@pytest.mark.parametrize("case", ["bursts without stamps", "stamps of another unit", "slow simulation"])
def test_a_rate_that_is_uncertain_is_refused_with_both_numbers(
    case: str, messages: Any, write: Any, export: Any
) -> None:
    def change(number: int, time: int, data: bytes) -> Any:
        if case == "bursts without stamps":
            return bursts(number, time, data)[0], data[:4] + bytes(8) + data[12:]
        if case == "slow simulation":
            return START + (time - START) * 8, data
        sec, nanosec = divmod(START + number * PERIOD // 1000, 10**9)
        return time, data[:4] + sec.to_bytes(4, "little") + nanosec.to_bytes(4, "little") + data[12:]

    path = write("bag.mcap", changed(messages(40), change))
    status, said, _ = export(path)
    assert status == 1
    first, second = {
        "bursts without stamps": ("10", "1e+03"),
        "stamps of another unit": ("10", "1e+04"),
        "slow simulation": ("1.25", "10"),
    }[case]
    assert f"images are {first} per second" in said
    assert f"{second} per second; name the rate with --fps; --clock stamp uses" in said
    assert export(path, "--fps", "10")[0] == 0


def test_missing_images_are_remarked(messages: Any, write: Any, export: Any) -> None:
    records, number = [], 0
    for one in messages(40):
        number += one[1] == "/camera"
        if one[1] != "/camera" or number % 3:
            records.append(one)
    status, said, output = export(write("bag.mcap", records))
    assert status == 0
    assert json.loads((output / "meta/info.json").read_text())["fps"] == 10
    assert "10 per second, which was used; --fps sets another rate" in said


def events(make: Any, *texts: tuple[float, str, str]) -> list[Any]:  # noqa: F811
    """Events of the node: seconds, kind and instruction."""
    serialize = message_types("jazzy").serialize
    found = []
    for seconds, kind, instruction in texts:
        content = {"event": kind, "mode": "autonomous", "label": "end", "instruction": instruction}
        data = serialize(make.text(json.dumps(content)))
        found.append((START + round(seconds * 1e9), "/vla_policy/event", bytes(data)))
    return found


WHOLE = ((0.0, "episode_start", "stack the cups"), (1.95, "episode_end", "stack the cups"))


@pytest.mark.parametrize(
    ("topic", "told", "arguments", "expected", "remark"),
    [
        ("", WHOLE, (), ["stack the cups"], ""),
        ("", WHOLE, ("-p", "policy.instruction:=fold"), ["stack the cups"], "policy.instruction is 'fold', but"),
        ("", WHOLE, ("--instruction", "fold"), ["fold"], ""),
        ("fold", WHOLE, (), ["stack the cups"], "/vla_policy/instruction says 'fold', /vla_policy/event does not"),
        ("fold", WHOLE, ("--topics", "instruction=/vla_policy/instruction"), ["fold"], ""),
        ("stack the cups", WHOLE, (), ["stack the cups"], ""),
        (
            "",
            (*WHOLE[:1], (0.95, "instruction", "fold"), (1.95, "episode_end", "fold")),
            (),
            ["stack the cups", "fold"],
            "",
        ),
    ],
)
def test_the_instruction_in_force_is_the_task(
    topic: str,
    told: Any,
    arguments: Any,
    expected: list[str],
    remark: str,
    messages: Any,
    write: Any,
    export: Any,
    make: Any,  # noqa: F811
) -> None:
    """The node's events have it, also where it was given as an option and nothing was on the topic."""
    records = sorted([*messages(instruction=topic), *events(make, *told)], key=lambda one: one[0])
    status, said, output = export(write("bag.mcap", records), *arguments)
    assert status == 0, said
    assert tasks(output) == expected
    assert remark in said if remark else "note:" not in said


def test_the_status_has_the_instruction_if_nothing_else_has(
    messages: Any,
    write: Any,
    export: Any,
    make: Any,  # noqa: F811
) -> None:
    status = bytes(
        message_types("jazzy").serialize(make.text(json.dumps({"instruction": "stack", "state": "armed"})))
    )
    path = write("bag.mcap", [(START, "/vla_policy/status", status), *messages(instruction="")])
    assert export(path)[0] == 0
    assert tasks(path.parent / "set") == ["stack"]
