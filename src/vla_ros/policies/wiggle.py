"""First motion of a new robot, without a checkpoint: each joint, then the gripper."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from vla_ros.config import Config, PolicyConfig
from vla_ros.config.options import option
from vla_ros.contract.components import parse_components
from vla_ros.contract.spec import ImageFeature, PolicySpec, StateFeature
from vla_ros.policies.base import Policy, Session, options_of
from vla_ros.types import ActionChunk, FloatArray, Observation

_RATE_HZ = 20.0
"""Rate at which the joints are moved, in hertz."""

_PEAK = 0.76980  # maximum of the product of sines in :func:`offset`: 4 / (3 sqrt(3))
_ASTRAY = 3.0  # in amplitudes; an arm further than this from home gets a new home position


@dataclass(frozen=True)
class WiggleOptions(PolicyConfig):
    """How far and how fast the joints move."""

    amplitude: float = option(0.05, "How far each joint moves to either side", unit="rad or m", low=0.0, high=0.3)
    seconds: float = option(4.0, "How long each joint takes, there and back", unit="s", low=0.5, high=60.0)


@dataclass
class WiggleSession(Session):
    """The motion's start: its time (``began``, nanoseconds) and the arms' joint positions (``home``).

    The position of an arm with a gripper ends with its opening, from 0 (closed) to 1.
    """

    began: int = 0
    home: dict[str, FloatArray] = field(default_factory=dict)

    def reset(self) -> None:
        self.home = {}


class WigglePolicy(Policy):
    """Moves each joint of every arm back and forth, one at a time, then the grippers.

    In command order, joints follow :func:`offset` around their positions at the first frame. Grippers stay as they
    were at the first frame until all joints have moved; then each goes to its other end and to the nearer one. The
    motion repeats and does not depend on the images.
    """

    Options = WiggleOptions

    def __init__(self, config: Config) -> None:
        self._options, self._gripper = options_of(config, WiggleOptions), config.gripper
        used = config.gripper.mode != "none"
        self._arms = {arm.name: used and bool(arm.robot.gripper_joint_names) for arm in config.arms}
        parts = [
            f"{name}.{part}"
            for name, grips in self._arms.items()
            for part in ("joint_position", *(["gripper"] if grips else []))
        ]
        measured = {
            name: f"{name}.joint_position" + (f" + {name}.gripper[0..1 clipped]" if grips else "")
            for name, grips in self._arms.items()
        }
        self.spec = PolicySpec(
            tuple(map(ImageFeature, config.camera.keys)),
            tuple(StateFeature(name, parse_components(parts)) for name, parts in measured.items()),
            parse_components(" + ".join(parts), action=True),
            dimension=0,
            rate_hz=_RATE_HZ,
        )

    def start_session(self) -> WiggleSession:
        return WiggleSession()

    def infer(self, session: WiggleSession, observation: Observation) -> ActionChunk:
        now, options = dict(observation.state), self._options
        reach = max(_ASTRAY * options.amplitude, 1e-6)
        if not session.home or any(
            np.abs(self._joints(now, name) - self._joints(session.home, name)).max() > reach for name in self._arms
        ):
            session.began, session.home = observation.stamp, {name: now[name].copy() for name in self._arms}
        turn = (observation.stamp - session.began) / 1e9 / options.seconds
        numbers: list[FloatArray] = []
        for part in self.spec.action:
            home = self._joints(session.home, part.arm)
            if part.quantity == "gripper":
                opening = both_ends(turn, len(home), float(session.home[part.arm][-1]))
                closed, opened = self._gripper.closed_value, self._gripper.open_value
                numbers.append(np.array([closed + opening * (opened - closed)]))
            else:
                numbers.append(home + options.amplitude * offset(turn, len(home)))
        return ActionChunk(np.concatenate(numbers)[None], observation.stamp)

    def _joints(self, state: Mapping[str, FloatArray], arm: str) -> FloatArray:
        """Return the positions [N] of an arm's joints, without its gripper."""
        return state[arm][:-1] if self._arms[arm] else state[arm]


def both_ends(turn: float, joints: int, opening: float) -> float:
    """Return a gripper's opening: its other end, then its nearer end in the last slot, otherwise where it was."""
    slot, other = turn % (joints + 1) - joints, float(opening < 0.5)
    if slot < 0:
        return opening
    return other if slot < 0.5 else 1.0 - other


def offset(turn: float, joints: int) -> FloatArray:
    """Return each joint's offset [N] from its home position, as a share of the amplitude.

    ``turn`` counts slots. In each cycle every joint moves in one slot, starting and ending at rest; the last slot
    is for the grippers.
    """
    moved: FloatArray = np.zeros(joints)
    which = int(turn) % (joints + 1)
    if which < joints:
        phase = turn % 1.0
        moved[which] = math.sin(2 * math.pi * phase) * math.sin(math.pi * phase) / _PEAK
    return moved
