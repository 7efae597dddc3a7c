"""Finds policies by name and by checkpoint; errors if a policy or library is missing."""

import sys
from pathlib import Path
from typing import Any

import pytest

from vla_ros.cli.main import main
from vla_ros.config import load
from vla_ros.config.checkpoints import SHIPPED
from vla_ros.errors import ConfigError, MissingDependencyError, VlaRosError
from vla_ros.policies.base import Policy, create, policy_of
from vla_ros.types import ActionChunk, Observation


def test_an_unknown_policy_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"found 'opnvla', expected auto or one of .*did you mean 'openvla'\?"):
        load((), ["policy.name:=opnvla"])


@pytest.mark.parametrize(
    ("content", "policy"),
    [
        ('{"type": "pi05", "input_features": {}}', "pi"),
        ('{"action_horizon": 50}', "pi"),
        ('{"type": "act", "input_features": {}}', "lerobot"),
        ('{"model_type": "openvla"}', "openvla"),
    ],
)
def test_policy_of_recognises_checkpoints(content: str, policy: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    assert policy_of(tmp_path) == policy
    assert [policy_of(name) for name in SHIPPED] == list(SHIPPED.values())


@pytest.mark.parametrize("command", ["serve", "infer", "bench"])
def test_the_checkpoint_selects_the_policy(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--checkpoint", "demo-pi", "-p", "policy.unnorm_key:=x"]) == 1
    assert "and policy.name is 'pi'" in capsys.readouterr().err


def test_a_missing_library_is_reported_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("vla_ros_models.openvla.")]:
        if not name.endswith(".options"):  # a class that others compare with
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingDependencyError, match=r"'openvla' needs .*torch.*pip install 'torch>="):
        create(load((), ["policy.name:=openvla"]))


def test_every_policy_for_checkpoints_looks_into_its_folder_to_load(tmp_path: Path) -> None:
    """Without an override, ``load`` would succeed and the first inference fail."""
    pytest.importorskip("torch")
    for name in ("lerobot", "openvla", "oft", "pi"):
        policy = create(load((), [f"policy.name:={name}", f"policy.checkpoint:={tmp_path / 'nowhere'}"]))
        with pytest.raises(VlaRosError, match="nowhere"):
            policy.load()


def test_prepare_tells_whether_a_policy_batches() -> None:
    class Single(Policy):
        def infer(self, session: Any, observation: Observation) -> ActionChunk:
            raise NotImplementedError

    class Batched(Single):
        def infer_batch(self, requests: Any) -> list[ActionChunk | VlaRosError]:
            raise NotImplementedError

    assert not Single().prepare(2)
    assert Batched().prepare(2)


def test_hold_moves_none_of_several_arms() -> None:
    config = load(
        (), ["policy.name:=hold", "robot.arms:=[left, right]", "right.command:=/right", "gripper.open_value:=0.5"]
    )
    policy = create(config)
    assert [f"{part.arm}.{part.quantity}" for part in policy.spec.action] == [
        "left.tip_delta", "left.gripper", "right.tip_delta", "right.gripper",
    ]  # fmt: skip
    chunk = policy.infer(policy.start_session(), Observation({}, "", 0, {}))
    assert chunk.actions.tolist() == [[0.0] * 6 + [0.5] + [0.0] * 6 + [0.5]]
