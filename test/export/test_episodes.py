"""From bags to data sets: contents of the frames, limits of the episodes, refused bags."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from test.replay.conftest import make, store, write_bag  # noqa: F401

pytest.importorskip("av")
pq = pytest.importorskip("pyarrow.parquet")

from vla_ros.cli.main import main  # noqa: E402

BAGS = Path(__file__).parents[1] / "data" / "bags"
DEMO = Path(__file__).parents[2] / "config" / "demo.yaml"
START = 1_790_002_000_000_000_000
OF_DEMO = ["--config", str(DEMO), "--clock", "frames", "--fps", "5"]
_JOINTS = ", ".join(f"joint{index + 1}" for index in range(7))
OF_JAZZY = ["-p", f"robot.joint_names:=[{_JOINTS}]", "-p", "robot.gripper_joint_names:=[finger_left, finger_right]"]
OPTIONS = "robot.joint_names:=[a, b]", "robot.gripper_joint_names:=[finger]", "camera.topics:=[/camera]"
TWO = [word for option in OPTIONS for word in ("-p", option)]


def rows(folder: Path) -> dict[str, Any]:
    table = pq.read_table(folder / "data/chunk-000/file-000.parquet")
    return {name: np.array(table[name].to_pylist()) for name in table.column_names}


def episodes(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(folder / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    return found


@pytest.fixture
def export(tmp_path: Path) -> Any:
    """Returns the exit status and the data set's folder for a bag and arguments."""

    def run(bag: Path, *arguments: str) -> tuple[int, Path]:
        return main(["export", str(bag), "--output", str(tmp_path / "set"), *arguments]), tmp_path / "set"

    return run


@pytest.fixture
def ramp(make: Any, write_bag: Any) -> Any:  # noqa: F811
    """A bag whose values are functions of time: images at 10 Hz, joints at 50 Hz, commands at 10 Hz.

    At t seconds joint a is at t, b at -t, the finger at 0.04; commands are 0.01 ahead.
    """

    def write(
        name: str,
        seconds: float,
        *,
        without: tuple[str, ...] = (),
        hole: tuple[float, float] = (9, 9),
        events: Sequence[tuple[float, str, str, str]] = (),
    ) -> Path:
        messages = []
        for t, kind, mode, label in events:
            content = json.dumps({"event": kind, "mode": mode, "label": label})
            messages.append((START + round(t * 1e9), "/vla_policy/event", make.text(content)))
        for step in range(round(seconds * 50)):
            t = step / 50
            at = START + step * 20_000_000
            messages.append((at, "/joint_states", make.joints(at, [t, -t, 0.04], ["a", "b", "finger"])))
            if step % 5 == 0 and not hole[0] <= t < hole[1]:
                pixels = np.full((16, 32, 3), step // 5, np.uint8)
                messages.append((at + 1, "/camera", make.image(at, pixels)))
            if step % 5 == 2:
                command = make.joints(at, [t + 0.01, -t, 0.0], ["a", "b", "finger"])
                messages.append((at, "/arm/joint_command", command))
        messages.append((START, "/vla_policy/instruction", make.text("push")))
        kept = [message for message in messages if message[1] not in without]
        return Path(write_bag(name, sorted(kept, key=lambda message: message[0])))

    return write


def test_each_frame_has_the_newest_values(ramp: Any, export: Any) -> None:
    status, folder = export(ramp("ramp", 2.0), *TWO)
    assert status == 0
    found = rows(folder)
    ticks = np.arange(len(found["index"])) / 10
    assert len(ticks) == 20
    # The image's own stamp is the joint state's: both are a nanosecond old when the image comes.
    assert np.allclose(found["observation.state"], np.stack([ticks, -ticks, ticks * 0 + 1], axis=1), atol=1e-6)
    # Commands come 0.04 s after the tick, so the one in force at the next tick is this tick's.
    assert np.allclose(found["action"], np.stack([ticks + 0.05, -ticks - 0.04, ticks * 0], axis=1), atol=1e-6)
    info = json.loads((folder / "meta/info.json").read_text())
    assert info["fps"] == 10
    assert info["features"]["observation.state"]["names"] == ["a.pos", "b.pos", "gripper.pos"]
    assert info["features"]["observation.images.image"]["shape"] == [16, 32, 3]
    assert pq.read_table(folder / "meta/tasks.parquet")["task"].to_pylist() == ["push"]


def test_another_rate_repeats_or_skips_images(ramp: Any, export: Any) -> None:
    status, folder = export(ramp("ramp", 2.0), *TWO, "--fps", "25", "--goal", "measured")
    assert status == 0
    found = rows(folder)
    ticks = np.arange(len(found["index"])) / 25
    assert np.allclose(found["observation.state"][:, 0], ticks, atol=1e-6)
    assert np.allclose(found["action"][:-1, 0], ticks[1:], atol=1e-6)


def test_parts_define_state_and_action(ramp: Any, export: Any) -> None:
    state, action = "arm.joint_position(b)[deg] + unused[1]", "arm.joint_velocity + arm.gripper[0..100]"
    parts = "--state", state, "--action", action
    status, folder = export(ramp("ramp", 2.0), *TWO, *parts, "--goal", "measured")
    assert status == 0
    found = rows(folder)
    ticks = np.arange(len(found["index"])) / 10
    assert np.allclose(found["observation.state"], np.stack([-ticks * 180 / np.pi, 0 * ticks], axis=1), atol=1e-4)
    assert np.allclose(found["action"][:-1, :2], [1.0, -1.0], atol=1e-3)
    assert np.allclose(found["action"][:, 2], 100)


@pytest.mark.parametrize(
    ("hole", "lengths", "note"),
    [
        ((1.0, 2.5), [15, 15], "stale or missing image (10)"),  # stale 0.5 s after the last image (timeouts.camera)
        ((1.0, 3.5), [10, 15], "frames so far"),
    ],
)
def test_a_pause_of_the_camera_ends_an_episode(
    hole: Any, lengths: list[int], note: str, ramp: Any, export: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    status, folder = export(ramp("hole", hole[1] + 1.5, hole=hole), *TWO)
    assert status == 0
    assert [row["length"] for row in episodes(folder)] == lengths
    assert note in capsys.readouterr().out


@pytest.mark.parametrize(
    ("without", "arguments", "message"),
    [
        ("/arm/joint_command", (), "nothing was recorded on /arm/joint_command"),
        ("/joint_states", (), "has no joint states"),
        ("/vla_policy/instruction", (), "no instruction was recorded"),
        ("", ("--episodes", "armed"), "found nothing on /vla_policy/status"),
        ("", ("--episodes", "/camera"), "expected std_msgs/msg/Bool"),
        ("", ("--state", "arm.tip_position"), "robot.urdf"),
        ("", ("--state", "left.gripper"), "robot.arms"),
        ("", ("--fps", "2000"), "--fps 2000"),
        ("", ("--episodes", "some"), "--episodes some"),
    ],
)
def test_bags_that_cannot_be_exported_are_refused(
    without: str,
    arguments: tuple[str, ...],
    message: str,
    ramp: Any,
    export: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, folder = export(ramp("bad", 1.0, without=(without,)), *TWO, *arguments)
    assert status == 1
    assert message in capsys.readouterr().err
    assert not folder.exists()


@pytest.mark.parametrize("name", [path.name for path in sorted(BAGS.iterdir()) if path.is_dir()])
def test_golden_bags_are_exported(name: str, export: Any) -> None:
    status, folder = export(BAGS / name, *(OF_DEMO if name == "demo_jpeg" else OF_JAZZY))
    assert status == 0
    info = json.loads((folder / "meta/info.json").read_text())
    assert info["total_episodes"] == (2 if name == "demo_jpeg" else 1)
    assert info["total_frames"] >= 28
    assert np.isfinite(rows(folder)["action"]).all()


def test_a_full_disk_leaves_no_data_set(
    ramp: Any, export: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bag = ramp("ramp", 1.0)

    def full(*arguments: Any, **named: Any) -> None:
        raise OSError(28, "No space left on device", "somewhere")

    with monkeypatch.context() as patched:
        patched.setattr("vla_ros_lab.export.dataset.pq.write_table", full)
        status, folder = export(bag, *TWO)
    assert status == 1
    assert "No space left on device" in capsys.readouterr().err
    assert not folder.exists()
    assert export(bag, *TWO)[0] == 0
    shutil.rmtree(folder)


def test_only_the_same_command_resumes_an_export(
    ramp: Any, export: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bag = ramp("ramp", 1.0)
    with monkeypatch.context() as patched:
        patched.setattr("vla_ros_lab.export.dataset.DatasetWriter.finish", _interrupt)
        assert export(bag, *TWO)[0] == 130
    assert export(bag, *TWO, "--goal", "measured")[0] == 1
    assert "an export with other options was begun here" in capsys.readouterr().err
    assert export(bag, *TWO)[0] == 0


def _interrupt(writer: Any) -> int:
    raise KeyboardInterrupt


EVENTS = [
    (0.45, "episode_start", "autonomous", ""),
    (0.85, "source", "paused", ""),
    (1.25, "source", "correcting", ""),
    (1.65, "source", "autonomous", ""),
    (2.05, "episode_end", "autonomous", "success"),
    (2.25, "episode_start", "autonomous", ""),
    (2.55, "episode_end", "paused", "discard"),
    (2.65, "episode_start", "autonomous", ""),
    (2.95, "episode_end", "paused", "failure"),
]
TO_THE_END = [
    EVENTS[0],
    (1.65, "source", "correcting", ""),
    (2.05, "source", "paused", ""),
    (2.35, "episode_end", "paused", "success"),
]


def test_episodes_have_their_interventions_and_outcomes(ramp: Any, export: Any, capsys: Any) -> None:
    bag = ramp("labelled", 3.2, events=EVENTS)
    assert export(bag, *TWO)[0] == 0
    assert "left out: discarded episodes (1)" in capsys.readouterr().out
    folder = Path(bag).parent / "set"
    found = rows(folder)
    assert [one["length"] for one in episodes(folder)] == [12, 3]
    assert found["observation.state"][:, 0].round(2).tolist() == pytest.approx(
        [0.45, 0.55, 0.65, 0.75, 1.25, 1.35, 1.45, 1.55, 1.65, 1.75, 1.85, 1.95, 2.65, 2.75, 2.85], abs=0.021
    ), "the pause is left out, and the episode remains one"
    assert found["intervention"].tolist() == [*[False] * 4, *[True] * 4, *[False] * 7]
    assert np.flatnonzero(found["next.done"]).tolist() == [11, 14]
    assert np.flatnonzero(found["next.success"]).tolist() == [11]
    assert np.flatnonzero(found["next.reward"]).tolist() == [11]
    features = json.loads((folder / "meta/info.json").read_text())["features"]
    assert features["intervention"] == {"dtype": "bool", "shape": [1], "names": None}
    assert features["next.reward"] == {"dtype": "float32", "shape": [1], "names": None}


@pytest.mark.parametrize(("events", "succeeds"), [(EVENTS, False), (TO_THE_END, True)])
def test_corrections_alone(ramp: Any, export: Any, events: Any, succeeds: bool) -> None:
    """Only a correction that ends with its episode has the episode's label."""
    _, folder = export(ramp("labelled", 3.2, events=events), *TWO, "--episodes", "corrections")
    found = rows(folder)
    assert [one["length"] for one in episodes(folder)] == [4]
    assert found["intervention"].all()
    assert found["next.success"].tolist() == [*[False] * 3, succeeds]
