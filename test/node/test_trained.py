from typing import Any

import pytest

from test.conventions.free_arm import revolute, urdf
from vla_ros.cli.main import main

DEMO = ("robot.urdf:=demo", "robot.gripper_joint_names:=[finger_left, finger_right]")
WS, HTTP, ZMQ = (f"policy.server:={scheme}://localhost:9" for scheme in ("ws", "http", "zmq"))
HALF = "policy.horizon:=50"


def dry_run(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    words = ["run", "--dry-run"]
    for option in ("policy.name:=remote", *options):
        words += ["-p", option]
    assert main(words) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("preset:=libero", WS, "control.delta_form:=motion"), "20 Hz (trained at 20 Hz), 5 of 50"),
        (("preset:=libero", HTTP, "control.delta_form:=motion"), "20 Hz (trained at 20 Hz), 8 of 50"),
        (("preset:=droid", WS, "topics.gripper:=/g"), "15 Hz (trained at 15 Hz), 8 of 50"),
        (("preset:=gr00t_droid", ZMQ), "15 Hz (trained at 15 Hz), 15 of 50"),
        (("preset:=bridge", WS), "5 Hz (trained at 5 Hz), 50 of 50"),
        (("preset:=bridge", HTTP), "5 Hz (trained at 5 Hz), 5 of 50"),
        (
            ("preset:=bridge", HTTP, "control.rate_hz:=2.0", "control.execute_steps:=3"),
            "2 Hz (trained at 5 Hz), 3 of",
        ),
        (("features.action:=[arm.joint_position, arm.gripper]", WS), "5 Hz (rate of training unknown), 50 of 50"),
    ],
)
def test_rate_and_steps_come_from_the_family_and_the_users_win(
    options: tuple[str, ...], expected: str, capsys
) -> None:
    assert f"rate: {expected}" in dry_run(capsys, *DEMO, HALF, *options)


@pytest.mark.parametrize(
    ("server", "expected"), [(WS, "50 Hz (trained at 50 Hz)"), (HTTP, "25 Hz (trained at 25 Hz)")]
)
def test_aloha_runs_at_the_rate_of_the_policys_data(server: str, expected: str, tmp_path, capsys) -> None:
    arm = (f"robot.urdf:={urdf(tmp_path, revolute(6))}", "robot.tip_frame:=hand", "gripper.measured_by:=''")
    shown = dry_run(capsys, *arm, "robot.gripper_joint_names:=[finger]", HALF, "preset:=aloha", server)
    assert f"rate: {expected}, 25 of 50 steps" in shown


LIMITS = [
    (
        ("preset:=libero", "control.delta_form:=goal"),
        [
            "max_translation_step 0.05 m: steps of up to 0.0866 m",
            "58 %",
            "0.3 rad: steps of up to 0.866 rad",
            "35 %",
        ],
    ),
    (("preset:=bridge",), ["0.05 m: steps of up to 0.0866 m", "58 %", "0.3 rad: steps of up to 0.433 rad", "69 %"]),
    (
        ("preset:=droid", "topics.gripper:=/g", "limits.velocity_scale:=0.5", "limits.max_joint_step:=0.1"),
        [
            "0.05 m: steps of up to 0.075 m were trained, the longest are shortened to 67 %",
            "1.5 rad/s of joint_1, joint_2, joint_3, joint_4: 3 rad/s were trained, slowed to 50 %",
            "limits.max_joint_step 0.1 rad: steps of 0.2 rad were trained, shortened to 50 %",
        ],
    ),
    (("preset:=gr00t_droid",), ["0.05 m: steps of up to 0.075 m"]),
]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), "added to the commanded pose\n"),
        (("control.delta_from:=measured",), "added to the measured pose, so an arm that sags sinks by its sag"),
        (("control.output:=twist_stamped", "topics.gripper:=/g"), "added to the measured pose\n"),
    ],
    ids=["default", "measured", "velocity"],
)
def test_where_a_delta_starts_and_what_that_means_for_an_arm_that_sags(
    options: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[Any]
) -> None:
    action = "features.action:=[arm.tip_delta, arm.gripper]"
    shown = dry_run(capsys, *DEMO, HALF, WS, action, *options)
    assert expected in shown


@pytest.mark.parametrize(("options", "expected"), LIMITS, ids=[options[0] for options, _ in LIMITS])
def test_limits_that_shorten_what_was_trained_are_named(
    options: tuple[str, ...], expected: list[str], capsys: pytest.CaptureFixture[Any]
) -> None:
    shown = dry_run(capsys, *DEMO, HALF, WS, *options)
    assert [text for text in expected if text not in shown] == []


def test_the_motion_of_libero_is_within_the_usual_limits(capsys) -> None:
    shown = dry_run(capsys, *DEMO, WS, "preset:=libero", "control.delta_form:=motion")
    assert "limits that shorten" not in shown
    assert "1 is 0.05 m and 0.5 rad (rotation_vector); each number clipped to 1 before scaling" in shown
    assert "moves tool along the axes of base_link" in shown
