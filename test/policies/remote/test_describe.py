from vla_ros.cli.main import main

REMOTE = ["-p", "policy.name:=remote", "-p", "policy.server:=ws://localhost:1"]
ROBOT = ["-p", "robot.urdf:=demo", "-p", "robot.gripper_joint_names:=[finger_left, finger_right]"]


def test_a_dry_run_needs_no_server(capsys) -> None:
    assert main(["run", "--dry-run", *REMOTE, *ROBOT, "-p", "preset:=gr00t_droid"]) == 0
    table = capsys.readouterr().out
    assert "video.wrist_image_left" in table
    assert "arm.tip_rotation[rot6d]" in table
    assert main(["run", "--dry-run", *REMOTE, *ROBOT]) == 1
    assert "features.action: not set" in capsys.readouterr().err
