import time
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
from vla_ros.errors import ServerLostError
from vla_ros.policies.base import Policy, Session, create
from vla_ros.types import ActionChunk, Observation

SLACK = 0.5  # s of a busy machine
SLOWLY = np.array([[0.005, 0, 0, 0, 0, 0, 1.0]])


class Forward(Policy):
    """Moves the tip slowly."""

    def __init__(self, horizon: int = 1, steps: int = 1) -> None:
        self.spec = PolicySpec((ImageFeature("image"),), horizon=horizon)
        self.actions = SLOWLY.repeat(steps, 0)

    def infer(self, session: Session, observation: Observation) -> ActionChunk:
        return ActionChunk(self.actions, observation.stamp)


@pytest.mark.causes("server_lost")
def test_the_arm_holds_without_its_server_and_continues_with_it(robot, inside) -> None:
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


PLAN = ("policy.name:=remote", "control.rate_hz:=10", "timeouts.inference:=4.0")
"""A plan of five seconds."""


@pytest.mark.parametrize("schedule", ["sync", "blend"])
@pytest.mark.causes("server_lost")
def test_a_long_plan_ends_soon_after_the_server(robot, inside, schedule: str) -> None:
    with served(Forward(50, 50)) as (_, port):
        options = *PLAN, f"policy.server:=ws://127.0.0.1:{port}", f"control.schedule:={schedule}"
        inside(*options, policy=create(load((), options)))
        robot.until(lambda: len(robot.commands) > 5, robot.send_frame)
        ended = time.monotonic()
    robot.until(lambda: "server_lost" in robot.status.get("holds", {}), robot.send_frame)
    held, said = len(robot.commands), robot.statuses[-1]
    assert 0.5 <= said[0] - ended < 0.5 + 0.1 + 0.1 + SLACK  # noticed within 0.1 s; a step takes 0.1 s
    robot.until(lambda: time.monotonic() - said[0] > 1.0, robot.send_frame)
    assert len(robot.commands) <= held + 1, "the plan went on during the hold"
    assert np.allclose(robot.command_positions(), robot.positions, atol=1e-9)
    with served(Forward(50, 50), port=port):
        robot.until(lambda: len(robot.commands) > held + 5, robot.send_frame)


@pytest.mark.parametrize("schedule", ["sync", "blend"])
def test_a_short_loss_costs_no_pause(robot, inside, schedule: str) -> None:
    with served(Forward(50, 50)) as (_, port):
        options = *PLAN, f"policy.server:=ws://127.0.0.1:{port}", f"control.schedule:={schedule}"
        # The server is back after 0.3 s, or later on a busy machine.
        options = *options, "timeouts.server_lost:=3.0", "control.refill_steps:=49"
        inside(*options, policy=create(load((), options)))
        robot.until(lambda: len(robot.commands) > 5, robot.send_frame)
    until = time.monotonic() + 0.3
    robot.until(lambda: time.monotonic() > until, robot.send_frame)
    with served(Forward(50, 50), port=port):
        before = len(robot.commands)
        robot.until(lambda: len(robot.commands) > before + 10, robot.send_frame)
    assert "server_lost" not in {hold for _, said in robot.statuses for hold in said["holds"]}


class Flickering(Forward):
    """Each request but the first is lost, and the server is back at once."""

    def infer(self, session: Session, observation: Observation) -> ActionChunk:
        if self.asked:
            raise ServerLostError("Connection refused; reconnecting")
        self.asked = True
        return super().infer(session, observation)

    asked = False


def test_a_loss_that_ended_before_it_was_handled_costs_no_pause(robot, inside) -> None:
    options = *PLAN[1:], "control.schedule:=blend", "control.refill_steps:=49"
    inside(*options, policy=Flickering(50, 50))
    holds = {"joint_state_stale"}
    robot.until(lambda: "holds" in robot.status and not holds & robot.status["holds"].keys(), robot.send_joints)
    robot.until(lambda: len(robot.commands) > 15 and dropped(robot) > 3, robot.send_frame)
    assert not any("server_lost" in said["holds"] for _, said in robot.statuses)


def dropped(robot: Any) -> int:
    return int(robot.diagnostics.get("camera", {}).get("dropped/server_lost", 0))
