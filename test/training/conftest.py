"""A demo's bag with two cameras and labelled episodes, data sets made of it, tiny checkpoints of every family."""

import io
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the library torch is not installed (extra 'openvla')")
pytest.importorskip("av", reason="the library av is not installed (extra 'export')")
pytest.importorskip("rosbags", reason="the library rosbags is not installed (extra 'dds')")
pytest.importorskip("pyarrow", reason="the library pyarrow is not installed (extra 'export')")

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from rosbags.rosbag2 import StoragePlugin, Writer
from rosbags.typesys import Stores, get_typestore

from test.policies.pi.conftest import write_layout
from vla_ros.cli.main import main
from vla_ros.config import Config, load
from vla_ros.graph.messages import message_types
from vla_ros.policies.base import Policy, create
from vla_ros_lab.replay.bag import Bag
from vla_ros_lab.training.episodes import EpisodeSamples, ReadOptions
from vla_ros_lab.training.reading import open_samples

ROOT = Path(__file__).parents[2]
DATA, DEMO = ROOT / "test" / "data", ROOT / "config" / "demo.yaml"
RECORDED = DATA / "bags" / "demo_jpeg"
FRONT, WRIST = "/camera/image_raw/compressed", "/wrist/image_raw/compressed"
TWO = ("camera.topics:=[/camera/image_raw, /wrist/image_raw]", "camera.keys:=[front, wrist]")
TURNED = "camera.orientation:=[rotate_180, none]"
JOINTS = ("features.state:=['state = arm.joint_position + arm.gripper']",)
JOINT_ACTIONS = ("features.action:=[arm.joint_position, arm.gripper]",)
_LATE = 3  # images by which the second camera is behind

Message = tuple[int, str, bytes]


def messages() -> list[Message]:
    """Receive time, topic and content of the messages of the demo's bag, with a second camera, which lags."""
    with Bag(RECORDED) as bag:
        found = [(record.time, record.topic, bytes(record.data)) for record in bag.records(bag.topics)]
    images = [data for _, topic, data in found if topic == FRONT]
    late = iter([*images[:1] * _LATE, *images])
    return [each for one in found for each in ([(one[0], WRIST, next(late)), one] if one[1] == FRONT else [one])]


def with_events(found: Sequence[Message], labels: Sequence[str] = ("success", "success")) -> list[Message]:
    """Add the node's events: the demo's two episodes with these labels, without the frame between them."""
    times = [time for time, topic, _ in found if topic == FRONT]
    spans = (times[0] - 1, times[17] - 1), (times[18] - 1, times[-1])
    return with_told(
        found, [one for span, label in zip(spans, labels, strict=True) for one in as_episode(*span, label)]
    )


def as_episode(
    begin: int, end: int, label: str, corrected: Sequence[int] = ()
) -> Iterator[tuple[int, str, str, str]]:
    """Events of an episode; the person takes over, or gives back, at the times ``corrected``."""
    yield begin, "episode_start", "autonomous", ""
    for number, time in enumerate(corrected):
        yield time, "source", "autonomous" if number % 2 else "correcting", ""
    yield end, "episode_end", "autonomous", label


def with_told(found: Sequence[Message], events: Sequence[tuple[int, str, str, str]]) -> list[Message]:
    text = message_types("jazzy").message("std_msgs/msg/String")
    told = [
        (time, "/vla_policy/event", bytes(message_types("jazzy").serialize(text(data=json.dumps(
            {"event": kind, "mode": mode, "label": label}
        )))))
        for time, kind, mode, label in events
    ]  # fmt: skip
    return sorted([*found, *told], key=lambda one: one[0])


@pytest.fixture(scope="session")
def write_bag(tmp_path_factory: Any) -> Callable[..., Path]:
    """``write_bag(messages, storage="mcap")`` gives the bag's folder."""
    store = get_typestore(Stores.ROS2_JAZZY)
    with Bag(RECORDED) as bag:
        kinds = {**bag.topics, WRIST: bag.topics[FRONT], "/vla_policy/event": "std_msgs/msg/String"}

    def write(found: Sequence[Message], storage: str = "mcap", more: dict[str, str] | None = None) -> Path:
        path: Path = tmp_path_factory.mktemp("bags") / "bag"
        plugin = StoragePlugin.MCAP if storage == "mcap" else StoragePlugin.SQLITE3
        with Writer(path, version=9, storage_plugin=plugin) as writer:
            known = kinds | (more or {})
            topics = dict.fromkeys(topic for _, topic, _ in found)
            connections = {name: writer.add_connection(name, known[name], typestore=store) for name in topics}
            for time, topic, data in found:
                writer.write(connections[topic], time, data)
        return path

    return write


@pytest.fixture(scope="session")
def bag(write_bag: Callable[..., Path]) -> Path:
    """Two labelled episodes with two cameras, 39 frames."""
    return write_bag(with_events(messages()))


def configuration(*options: str) -> Config:
    return load([DEMO], ["policy.name:=auto", "control.rate_hz:=10.0", TURNED, *TWO, *options])


FAMILIES = {
    "openvla": ("policy.checkpoint:=demo", "policy.unnorm_key:=table_10hz", "features.images:=['image = front']"),
    "oft": (
        f"policy.checkpoint:={DATA / 'oft' / 'libero_l1'}",
        "policy.chunk:=8",
        "policy.images:=2",
        "features.state:=['state = arm.tip_position + arm.tip_rotation[rotation_vector] + arm.fingers']",
    ),
    "pi0": (
        "features.images:=['image = front', 'image2 = wrist']",
        *JOINTS,
        "features.action:=[arm.joint_position]",
    ),
    "pi05": (
        "features.images:=['image = front', 'image2 = wrist']",
        *JOINTS,
        "features.action:=[arm.joint_position]",
    ),
    "smolvla": (
        f"policy.checkpoint:={DATA / 'smolvla' / 'default'}",
        f"policy.vlm:={DATA / 'smolvla' / 'vlm'}",
        "features.state:=['state = arm.tip_position + arm.tip_rotation[euler_xyz]']",
        "features.action:=[arm.tip_delta]",
    ),
    "groot": (
        f"policy.checkpoint:={DATA / 'groot' / 'lerobot_relative'}",
        f"policy.backbone:={DATA / 'groot' / 'backbone'}",
        "features.state:=['state = arm.tip_position + arm.tip_rotation[rotation_vector]']",
        "features.action:=[arm.tip_delta]",
    ),
}
"""Family to the options of its golden checkpoint on the demo's arm."""


@pytest.fixture(scope="session")
def family(tmp_path_factory: Any) -> Callable[[str], tuple[Config, Policy]]:
    """Options and the loaded policy of a family, each once."""

    @cache
    def make(name: str) -> tuple[Config, Policy]:
        options = ["policy.device:=cpu", "policy.self_test:=false", *FAMILIES[name]]
        if name.startswith("pi"):
            folder = write_layout(tmp_path_factory.mktemp(name) / name, name, "lerobot")
            options.append(f"policy.checkpoint:={folder}")
        config = configuration(*options)
        policy = create(config)
        policy.load()
        return config, policy

    return make


def opened(path: Path, policy: Policy, config: Config, **options: Any) -> EpisodeSamples:
    return open_samples([path], policy.spec, config, ReadOptions(**options))


@pytest.fixture(scope="session")
def export(tmp_path_factory: Any, bag: Path) -> Callable[..., Path]:
    """A LeRobot data set of the bag with a state and an action; ``lossless`` stores its images as PNG."""

    @cache
    def write(state: str, action: str, lossless: bool = False) -> Path:
        folder: Path = tmp_path_factory.mktemp("sets") / "set"
        options = [word for option in (TURNED, *TWO, "control.rate_hz:=10.0") for word in ("-p", option)]
        command = ["export", str(bag), "--config", str(DEMO), "--clock", "frames", "--fps", "10", *options]
        made = ["--state", state, "--action", action, "--episodes", "taught", "--output", str(folder)]
        assert main([*command, *made]) == 0
        if lossless:
            store_images(folder, bag)
        return folder

    return write


def store_images(folder: Path, bag: Path) -> None:
    """Replace the videos of a data set by PNG files in its table, as LeRobot stores images."""
    config = configuration("policy.name:=hold")
    spec = create(config).spec
    samples = open_samples([bag], spec, config)
    path = folder / "data" / "chunk-000" / "file-000.parquet"
    table = pq.read_table(path)
    info = json.loads((folder / "meta" / "info.json").read_text())
    for key in ("front", "wrist"):
        cells = [
            {"bytes": as_png(samples[row].observation.images[key]), "path": None} for row in range(len(samples))
        ]
        table = table.append_column(f"observation.images.{key}", pa.array(cells))
        info["features"][f"observation.images.{key}"]["dtype"] = "image"
    pq.write_table(table, path)
    (folder / "meta" / "info.json").write_text(json.dumps(info))


def as_png(image: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(image).save(out, "PNG")
    return out.getvalue()


def rewrite(folder: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    """Change the numbers of a data set: arrays by name, whose rows are frames."""
    path = folder / "data" / "chunk-000" / "file-000.parquet"
    table = pq.read_table(path)
    columns = {name: np.array(table[name].to_pylist()) for name in table.column_names if "images" not in name}
    change(columns)
    for index, name in enumerate(table.column_names):
        if name in columns:
            table = table.set_column(index, name, pa.array(columns[name].tolist()))
    pq.write_table(table, path)
