"""A policy for LIBERO whose action depends on every bit of the observation, and which logs both."""

from __future__ import annotations

import hashlib
import os

import numpy as np

from vla_ros.config import Config
from vla_ros.contract.components import parse_components
from vla_ros.contract.spec import ImageFeature, PolicySpec, StateFeature
from vla_ros.policies import Policy, Session
from vla_ros.types import ActionChunk, Observation


class DigestPolicy(Policy):
    """Draws an action from a generator whose seed is the digest of images, state (float32) and instruction."""

    def __init__(self, config: Config) -> None:
        self.spec = PolicySpec(
            (ImageFeature("image"), ImageFeature("wrist_image")),
            (StateFeature("state", size=8),),
            parse_components("arm.tip_delta[rotation_vector] + arm.gripper[1..-1]", action=True),
            dimension=7,
            horizon=1,
            rate_hz=20.0,
        )

    def infer(self, session: Session, observation: Observation) -> ActionChunk:
        images = (np.ascontiguousarray(observation.images[key]).tobytes() for key in self.spec.image_keys)
        state = observation.state["state"].astype(np.float32).tobytes()
        digest = hashlib.sha256(b"".join([*images, state, observation.instruction.encode()])).hexdigest()
        action = np.random.default_rng(int(digest, 16)).uniform(-0.9, 0.9, 7)
        action[6] = np.sign(action[6])
        with open(os.environ["DIGEST_LOG"], "a") as log:  # noqa: PTH123
            print(digest, *(float(number).hex() for number in action), file=log)
        return ActionChunk(action[None], observation.stamp)
