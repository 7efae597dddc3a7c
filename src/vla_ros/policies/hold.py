"""A policy that never moves, for bring-up and for measurements without a model."""

import numpy as np

from vla_ros.config import Config
from vla_ros.contract.spec import ImageFeature, PolicySpec
from vla_ros.policies.base import Policy, Session
from vla_ros.types import ActionChunk, Observation


class HoldPolicy(Policy):
    """Returns a zero motion and an open gripper (``gripper.open_value``)."""

    def __init__(self, config: Config) -> None:
        self.spec = PolicySpec(tuple(map(ImageFeature, config.camera.keys)))
        self._gripper = config.gripper.open_value

    def infer(self, session: Session, observation: Observation) -> ActionChunk:
        action = np.zeros((1, self.spec.dimension))
        action[0, -1] = self._gripper
        return ActionChunk(actions=action, stamp=observation.stamp)
