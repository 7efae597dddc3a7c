import pytest

pytest.importorskip("torch", reason="the library torch is not installed (extra 'openvla')")

from vla_ros.config import load
from vla_ros.policies.base import create

from ..policies.pi.conftest import write_layout


@pytest.mark.parametrize("kind", ["pi0", "pi05"])
def test_frames_become_commands(robot, inside, tmp_path, kind):
    options = [
        "policy.name:=pi",
        f"policy.checkpoint:={write_layout(tmp_path / kind, kind, 'lerobot')}",
        "policy.threads:=1",
        "features.images:=['image = image']",
        "features.state:=['state = arm.tip_position + arm.tip_rotation[euler_xyz] + unused[2]']",
        "features.action:=['arm.tip_delta', 'arm.gripper']",
        "control.translation_scale:=0.001",  # random weights say much
        "control.rotation_scale:=0.001",
    ]
    policy = create(load([], options))
    policy.load()
    inside(*options, policy=policy)
    robot.until(lambda: robot.commands, robot.send_frame)
    assert robot.command_stamp() in robot.sent
