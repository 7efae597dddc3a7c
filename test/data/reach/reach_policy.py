"""A policy for the benchmark Reach: steps towards the goal in chunks, with numbers that no decimal has."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vla_ros.config import Config, PolicyConfig
from vla_ros.config.options import option
from vla_ros.contract.components import parse_components
from vla_ros.contract.spec import ImageFeature, PolicySpec, StateFeature
from vla_ros.policies import Policy, Session
from vla_ros.policies.base import options_of
from vla_ros.types import ActionChunk, Observation


@dataclass(frozen=True)
class ReachOptions(PolicyConfig):
    """Options of this policy."""

    gain: float = option(1.0, "Share of the distance in a chunk", low=-1.0, high=100.0)
    dimension: int = option(7, "Numbers of an action", low=7, high=8)
    camera: str = option("image", "Name of the camera")
    points: bool = option(False, "Take the goal from the camera's points")
    open_value: float = option(-1.0, "Value of an open gripper", low=-1.0, high=1.0)


class ReachPolicy(Policy):
    """Goes to the goal in chunks of four, and closes the gripper there."""

    Options = ReachOptions

    def __init__(self, config: Config) -> None:
        self._options = options_of(config, ReachOptions)
        gripper = "1..-1" if self._options.open_value < 0 else "0..1"
        more = " + unused[1]" * (self._options.dimension - 7)
        self.spec = PolicySpec(
            (ImageFeature("image", camera=self._options.camera),),
            (StateFeature("state", size=4),),
            parse_components(f"arm.tip_delta[rotation_vector] + arm.gripper[{gripper}]{more}", action=True),
            self._options.dimension,
            horizon=4,
            rate_hz=20.0,
            points=(("image", "points"),) if self._options.points else (),
        )

    def infer(self, session: Session, observation: Observation) -> ActionChunk:
        here, goal = np.split(observation.state["state"], 2)
        if self._options.points:
            goal = observation.points["points"][observation.images["image"][..., 1] > 0][0, :2].astype(np.float64)
        actions = np.zeros((4, self.spec.dimension))
        near = np.abs(goal - here).max() < 0.04
        closed = 1.0 if self._options.open_value < 0 else 0.0
        for row in range(4):
            way = 0.0 if near else self._options.gain * 10 * (goal - here) / 3
            actions[row, :2] = np.clip(way, -0.9, 0.9) if self._options.gain <= 1 else way
            here = here + 0.1 * np.clip(actions[row, :2], -1, 1)
            actions[row, 6] = closed if near else self._options.open_value + 0.1 * closed * (closed > 0)
        return ActionChunk(actions, observation.stamp)
