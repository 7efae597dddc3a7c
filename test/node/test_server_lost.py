"""The node and a policy server that ends, comes back, or comes back as another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("msgpack", reason="the library msgpack is not installed (extra 'remote')")
pytest.importorskip("websockets", reason="the library websockets is not installed (extra 'remote')")
pytest.importorskip("zmq", reason="the library zmq is not installed (extra 'remote')")
pytest.importorskip("prometheus_client", reason="the library prometheus_client is not installed (extra 'serve')")

from test.serve.serving import served
from vla_ros.config import load
from vla_ros.contract.spec import ImageFeature, PolicySpec
from vla_ros.policies.base import Policy, Session, create
from vla_ros.types import ActionChunk, Observation

SLOWLY = np.array([[0.005, 0, 0, 0, 0, 0, 1.0]])


class Forward(Policy):
    """Moves the tip slowly."""

    def __init__(self, horizon: int = 1) -> None:
        self.spec = PolicySpec((ImageFeature("image"),), horizon=horizon)

    def infer(self, session: Session, observation: Observation) -> ActionChunk:
        return ActionChunk(SLOWLY, observation.stamp)


@pytest.mark.causes("server_lost")
def test_the_arm_holds_without_its_server_and_continues_with_it(robot: Any, inside: Callable[..., Any]) -> None:
    with served(Forward()) as (_, port):
        options = "policy.name:=remote", f"policy.server:=ws://127.0.0.1:{port}"
        inside(*options, policy=create(load((), options)))
        robot.until(lambda: len(robot.commands) > 3, robot.send_frame)
    robot.until(lambda: robot.says("server_lost"), robot.send_frame)
    robot.until(lambda: np.allclose(robot.command_positions(), robot.positions, atol=1e-9), robot.send_joints)
    held = len(robot.commands)
    robot.until(lambda: dropped(robot) > 3, robot.send_frame)
    assert len(robot.commands) == held, "a command was sent while holding"
    with served(Forward(horizon=2), port=port):
        before = dropped(robot)
        robot.until(lambda: dropped(robot) > before + 10, robot.send_frame)
        assert len(robot.commands) == held, "another policy moved the arm"
    with served(Forward(), port=port):
        robot.until(lambda: len(robot.commands) > held + 3, robot.send_frame)


def dropped(robot: Any) -> int:
    return int(robot.diagnostics.get("camera", {}).get("dropped/server_lost", 0))
