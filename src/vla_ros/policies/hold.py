"""A policy that never moves, for bring-up and for measurements without a model."""

import numpy as np

from vla_ros.config import Config
from vla_ros.contract.components import parse_components
from vla_ros.contract.spec import ImageFeature, PolicySpec
from vla_ros.policies.base import Policy, Session
from vla_ros.types import ActionChunk, Observation

_NUMBERS = 7  # of an arm: a delta of the tip and the gripper


class HoldPolicy(Policy):
    """Returns a zero motion and an open gripper (``gripper.open_value``) for every arm."""

    def __init__(self, config: Config) -> None:
        parts = parse_components(
            " + ".join(f"{arm.name}.tip_delta + {arm.name}.gripper" for arm in config.arms), action=True
        )
        images = tuple(map(ImageFeature, config.camera.keys))
        self.spec = PolicySpec(images, action=parts, dimension=_NUMBERS * len(config.arms))
        self._gripper = config.gripper.open_value

    def infer(self, session: Session, observation: Observation) -> ActionChunk:
        action = np.zeros((1, self.spec.dimension))
        action[0, _NUMBERS - 1 :: _NUMBERS] = self._gripper
        return ActionChunk(actions=action, stamp=observation.stamp)
