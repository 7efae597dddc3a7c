import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from vla_ros.cli.main import main
from vla_ros.contract.spec import ImageFeature, PolicySpec
from vla_ros.kinematics.urdf import resolve
from vla_ros.policies.hold import HoldPolicy
from vla_ros_lab.replay.bag import Bag

REQUIRED = {"direction_cosine", "gripper_f1", "mae", "baselines", "latency_ms", "frames", "verdict"}
OPTIONS = ["-p", "policy.name:=hold"]


def replay(*arguments):
    return main(["replay", *map(str, arguments), *OPTIONS])


@pytest.fixture
def finished(jpeg_bag, tmp_path, capsys):
    """A whole run over the shipped bag: exit status, folder, terminal output."""
    status = replay(
        jpeg_bag, "--json", tmp_path / "a.json", "--report", tmp_path / "a.html", "--write", tmp_path / "written"
    )
    return status, tmp_path, capsys.readouterr().out


def test_everything_is_written(finished):
    status, folder, shown = finished
    assert status == 0
    content = json.loads((folder / "a.json").read_text())
    assert content.keys() >= REQUIRED
    assert content["frames"]["used"] == 30
    assert content["baselines"].keys() == {"zero", "hold_last", "mean_action"}
    assert content["latency_ms"]["total"].keys() == {"p50", "p90", "p99", "count"}
    assert content["verdict"]["level"] in ("good", "warn", "bad")
    assert content["truth"]["rule"] == ["after"]
    assert not list(folder.glob("*.partial"))
    assert "direction cosine" in shown
    assert content["verdict"]["headline"] in shown


def test_the_report_is_one_file_with_the_images_of_the_worst_moments(finished):
    _, folder, _ = finished
    text = (folder / "a.html").read_text(encoding="utf-8")
    assert not re.search(r"https?://|url\((?!data:)|@import", text)
    assert text.count("data:image/jpeg;base64,") >= 4
    for title in ("Compared with baselines", "Predicted and recorded", "The worst moments", "Latency", "Episodes"):
        assert title in text
    assert "pick up the red cube" in text


def test_the_report_finds_images_that_the_policy_calls_otherwise(jpeg_bag, tmp_path, monkeypatch):
    taken = (ImageFeature("observation/image"), ImageFeature("observation/other", required=False))
    made = HoldPolicy.__init__

    def init(self, config):
        made(self, config)
        self.spec = PolicySpec(taken)

    monkeypatch.setattr(HoldPolicy, "__init__", init)
    names = ("-p", "camera.keys:=[front]", "-p", "features.images:=['observation/image = front']")
    assert replay(jpeg_bag, "--report", tmp_path / "a.html", *names) == 0
    text = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert text.count("data:image/jpeg;base64,") >= 4


def test_the_written_bag_has_predicted_beside_recorded(finished, store):
    _, folder, _ = finished
    with Bag(folder / "written") as bag:
        assert bag.losses == []
        names = set(bag.topics)
        recorded = list(bag.records(["/vla_ros/recorded_action"]))
        predicted = list(bag.records(["/vla_ros/predicted_action"]))
    assert names >= {"/vla_ros/predicted_action", "/vla_ros/recorded_action", "/vla_ros/action_error"}
    assert [record.time for record in recorded] == [record.time for record in predicted]
    action = store.deserialize_cdr(bytes(predicted[0].data), "std_msgs/msg/Float64MultiArray")
    assert action.data.tolist() == [0, 0, 0, 0, 0, 0, 1]


def test_max_mae_decides_the_exit_status(jpeg_bag):
    assert replay(jpeg_bag, "--max-mae", 0.5) == 0
    assert replay(jpeg_bag, "--max-mae", 0.01) == 3
    assert replay(jpeg_bag, "--max-mae", 0.5, "--topics", "truth=none") == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--speed", "fast"], "expected 0.001 to 1000"),
        (["--speed", "0"], "expected 0.001 to 1000"),
        (["--every", "0"], "--every: found '0', expected 1 or more"),
        (["--tolerance", "-1"], "expected 0.001 to 1e+06"),
        (["--max-mae", "nan"], "expected 0 or more"),
        (["--json", "."], "--json .: is a folder, expected a file name"),
        (["--report", ".."], "--report ..: is a folder, expected a file name"),
        (["--json", "-", "--report", "-"], "only one can go to standard output"),
        (["--write", "."], "--write .: already exists"),
        (["--topics", "camera"], "expected role=/topic"),
        (["--topics", "camera=/nowhere"], "has no such topic"),
    ],
)
def test_invalid_arguments_are_refused_with_the_expected_values(jpeg_bag, capsys, arguments, message):
    try:
        assert replay(jpeg_bag, *arguments) == 1
    except SystemExit as wrong_usage:
        assert wrong_usage.code == 2  # noqa: PT017 - argparse's way to refuse
    assert message in capsys.readouterr().err


def test_outputs_go_through_a_link_to_a_device_and_to_no_new_folder(jpeg_bag, tmp_path, capsys):
    before = sorted(Path("/dev").iterdir())
    assert replay(jpeg_bag, "--write", tmp_path / "misspelt" / "bag") == 1
    assert f"--write {tmp_path}/misspelt/bag: cannot be written, there is no folder" in capsys.readouterr().err
    for option in ("--json", "--report"):
        link = tmp_path / f"link{option}"
        link.symlink_to("/dev/null")
        assert replay(jpeg_bag, option, link) == 0
        assert link.is_symlink()
        assert replay(jpeg_bag, option, tmp_path / "misspelt" / "a") == 1
        assert f"{option} {tmp_path}/misspelt/a: cannot be written, there is no folder" in capsys.readouterr().err
    assert sorted(Path("/dev").iterdir()) == before
    assert not (tmp_path / "misspelt").exists()


def test_a_dash_prints_only_the_json(jpeg_bag, capsys):
    assert replay(jpeg_bag, "--json", "-", "--limit", 2) == 0
    shown = capsys.readouterr()
    figures = json.loads(shown.out)
    assert figures["frames"]["used"] == 2
    assert figures["verdict"]["headline"] in shown.err
    assert not Path("-").exists()
    assert not Path("-.partial").exists()


def test_a_policy_that_answers_no_frame_fails(write_bag, recording, capsys):
    bag = write_bag("bag", [item for item in recording if item[1] != "/vla_policy/instruction"])
    assert replay(bag) == 1
    assert "The policy answered no frame." in capsys.readouterr().out


@pytest.mark.parametrize("speed", ["max", "20"])
def test_a_recording_of_another_arm_fails(jpeg_bag, tmp_path, capsys, speed):
    """Each command was refused, and the status was that of a pass."""
    urdf = tmp_path / "other.urdf"
    urdf.write_text(resolve("demo").read_text().replace("joint_", "axis_"))
    robot = ("-p", f"robot.urdf:={urdf}", "-p", "robot.tip_frame:=tool")
    assert replay(jpeg_bag, "--speed", speed, *robot) == 1
    shown = capsys.readouterr().out
    assert "BAD: Every command was refused." in shown
    assert "commands were refused: joint_state" in shown


def test_a_swallowed_interrupt_still_ends_the_run(jpeg_bag, tmp_path, monkeypatch):
    """An extension module that is interrupted while it is imported raises ImportError, which libraries ignore."""

    def load(self, progress):
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(HoldPolicy, "load", load)
    assert replay(jpeg_bag, "--json", tmp_path / "a.json") == 130
    assert json.loads((tmp_path / "a.json").read_text())["interrupted"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_unreadable_bag_does_not_stop_the_others(jpeg_bag, tmp_path, capsys):
    (tmp_path / "broken.mcap").write_text("this is no bag at all")
    assert replay(jpeg_bag, tmp_path / "broken.mcap", "--json", tmp_path / "a.json") == 0
    content = json.loads((tmp_path / "a.json").read_text())
    assert len(content["bags"]) == 1
    assert "broken.mcap" in content["not_played"][0]
    assert "not played" in capsys.readouterr().out


def test_several_bags_on_several_processes_give_the_same(jpeg_bag, write_bag, small_recording, tmp_path):
    other = write_bag("other", small_recording)
    raw = ["--topics", "truth=none"]
    assert replay(jpeg_bag, jpeg_bag, other, "--json", tmp_path / "one.json", *raw) == 0
    assert replay(jpeg_bag, other, "--json", tmp_path / "two.json", "--workers", 2, *raw) == 0
    one, two = (json.loads((tmp_path / name).read_text()) for name in ("one.json", "two.json"))
    assert one["frames"] == two["frames"]
    assert [bag["frames"] for bag in one["bags"]] == [30, 20]


def test_compare_names_the_better_one_and_the_options_that_differ(jpeg_bag, tmp_path, capsys):
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    replay(jpeg_bag, "--json", a)
    replay(jpeg_bag, "--json", b, "-p", "gripper.open_value:=-1.0", "-p", "gripper.closed_value:=1.0")
    capsys.readouterr()
    assert main(["compare", str(a), str(b), "--json", str(tmp_path / "c.json")]) == 0
    shown = capsys.readouterr().out
    assert "gripper.open_value: 1.0 -> -1.0" in shown
    content = json.loads((tmp_path / "c.json").read_text())
    assert content["same_frames"]
    figures = {item["name"]: item for item in content["figures"]}
    assert figures["direction cosine"]["better"] == ""
    assert figures["MAE"]["first"] is not None


def test_compare_refuses_other_files(tmp_path, capsys):
    (tmp_path / "a.json").write_text('{"schema": "something"}')
    assert main(["compare", str(tmp_path / "a.json"), str(tmp_path / "a.json")]) == 1
    assert "expected a file written by `vla-ros replay --json`" in capsys.readouterr().err


def test_an_ambiguous_topic_is_asked_about_on_a_terminal(write_bag, make, tmp_path):
    """A real terminal, a wrong answer and then a right one; elsewhere (a pipe) the candidates are told instead."""
    messages = []
    for step in range(5):
        stamp = make.start + step * 100_000_000
        messages += [
            (stamp, name, make.image(stamp, np.zeros((48, 64, 3), np.uint8)))
            for name in ("/left/image", "/right/image")
        ]
    bag, out = write_bag("bag", messages), tmp_path / "a.json"
    command = [sys.executable, "-m", "vla_ros.cli", "replay", str(bag), "--json", str(out), *OPTIONS]
    command += ["--instruction", "hold still"]
    ours, theirs = os.openpty()
    os.write(ours, b"7\ntwo\n2\n")
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # Linux ends a terminal whose other side is closed in this way
            while select.select([ours], [], [], 60)[0]:
                shown += os.read(ours, 4096)
        assert process.wait(60) == 0, shown
    os.close(ours)
    assert b"Which topic is the camera?" in shown
    assert shown.count(b"1/2") == 3
    assert json.loads(out.read_text())["bags"][0]["topics"]["camera"] == "/right/image"

    piped = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
    )
    assert piped.returncode == 1
    assert "--topics camera=/left/image" in piped.stderr
    assert "--topics camera=/right/image" in piped.stderr
