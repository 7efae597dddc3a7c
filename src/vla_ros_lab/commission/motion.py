"""What commissioning moves, proposes and hears."""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from vla_ros.config import VELOCITY_OUTPUTS, CameraConfig, Config, load
from vla_ros.config.control import ENVIRONMENT
from vla_ros.config.sections import FeaturesConfig
from vla_ros.contract.binding import make_arms, with_rate
from vla_ros.contract.components import parse_components
from vla_ros.contract.spec import ImageFeature, PolicySpec
from vla_ros.control.clock import Clock
from vla_ros.control.command import Command, lifetime
from vla_ros.control.measured import joint_speeds
from vla_ros.errors import ConfigError
from vla_ros.execution.source import ActionSource
from vla_ros.kinematics.rotations import rotation_vector
from vla_ros.kinematics.solver import Kinematics
from vla_ros.policies.base import Progress, no_progress
from vla_ros.types import ActionChunk, FloatArray, JointState, Observation
from vla_ros_lab.commission.measure import TICK, Track

KEY, TICKS = "tick", "/vla_policy/tick"
"""Key and topic of the only image, which asks for the next command."""
NODE_ENDS = 1.0
"""Seconds after which the node ends a velocity while it is silent, so that the driver may end it before."""
SLIDES = 0.2
"""Metres per radian: way, speed and tolerance of what slides, compared with what turns."""
_GRIPPER, _TWIST = "gripper", "twist_stamped"
_OPTIONS = """policy.instruction:=commission control.armed:=false control.rate_hz:=50.0 control.command_rate_hz:=0.0
control.schedule:=sync control.clip:=none control.delta_form:=step control.delta_frame:=base timeouts.camera:=3600.0
control.translation_scale:=1.0 control.rotation_scale:=1.0 takeover.input:=none record.what:=none
guard.process:=false control.rotation:=rotation_vector node.log_level:=warn node.clock:=ros"""
_TIP = tuple(f"tip {kind}{axis}" for kind in ("", "about ") for axis in "xyz")
Key = tuple[str, str]


@dataclass(frozen=True)
class MovedAxis:
    """What moves alone: a joint, a gripper, or the tip of an arm that takes twists, along or about an axis."""

    arm: str
    name: str  # joint that shows the position
    output: str  # a value of ``control.output``, or _GRIPPER
    axis: str = ""
    scale: float = 1.0  # SLIDES for what slides
    low: float = -math.inf  # rad or m; of a gripper where it is closed, ``high`` where it is open
    high: float = math.inf
    fastest: float = math.inf  # rad/s or m/s
    values: tuple[float, float] = (0.0, 1.0)  # of an action for a closed and an open gripper

    def __str__(self) -> str:
        return self.name if self.arm == "arm" else f"{self.arm} {self.name}"

    @property
    def key(self) -> Key:
        return self.arm, self.name

    @property
    def slides(self) -> bool:
        return self.scale == SLIDES

    @property
    def grips(self) -> bool:
        return self.output == _GRIPPER

    @property
    def is_tip(self) -> bool:
        return self.output == _TWIST

    @property
    def by_velocity(self) -> bool:
        return self.output in VELOCITY_OUTPUTS


def commissioning_options(files: Sequence[Path], words: Sequence[str]) -> tuple[Config, Config]:
    """Return the options of the files, and those of the node that commissions.

    Limits, collisions and watchdogs stay as they are; a velocity lasts as long as with the files' rate, at least
    two ticks and at most :data:`NODE_ENDS`. Raises ConfigError for an arm whose joints nobody knows.
    """
    given = load(files, [*words, "policy.name:=hold"])
    mode = "none" if given.gripper.mode == "none" else "continuous"
    lasts = min(max(2 * TICK, lifetime(with_rate(given, PolicySpec()))), NODE_ENDS)
    ours = [*_OPTIONS.split(), f"gripper.mode:={mode}", f"timeouts.velocity:={lasts}"]
    config = load(files, [*words, "policy.name:=hold", *ours])
    for arm in given.arms:
        if not arm.robot.urdf or arm.output == ENVIRONMENT or (given.robot.arms and not arm.robot.joint_names):
            raise ConfigError("robot.urdf, robot.joint_names: expected both (`vla-ros init` writes them)")
    joints = given.robot.joint_names if given.robot.arms else make_arms(given)["arm"].joints
    camera = CameraConfig((TICKS,), (KEY,), width=(1,), height=(1,))
    robot = replace(config.robot, joint_names=joints)
    return given, replace(config, robot=robot, camera=camera, features=FeaturesConfig())


def axes_of(config: Config) -> tuple[list[MovedAxis], list[MovedAxis], dict[str, Kinematics]]:
    """Return all joints, all that is moved, and the kinematics of arms that take twists.

    Of each arm the joints are moved, or the tip if it takes twists, then the gripper.
    """
    joints, axes, tips = list[MovedAxis](), list[MovedAxis](), dict[str, Kinematics]()
    for name, bound in make_arms(config).items():
        arm, chain = bound.config, bound.kinematics
        assert chain is not None
        fastest, own = joint_speeds(arm, chain.joint_names, chain), list[MovedAxis]()
        for index, joint in enumerate(chain.joint_names):
            described = chain.description.elements[joint].find("axis")
            axis = "1 0 0" if described is None else described.get("xyz", "")
            limits = float(chain.position_low[index]), float(chain.position_high[index])
            scale = SLIDES if chain.is_prismatic[index] else 1.0
            own.append(MovedAxis(name, joint, arm.output, axis, scale, *limits, fastest[joint]))
        joints += own
        if arm.output == _TWIST and len(own) < 6:
            found = f"control.output: found {_TWIST} with {len(own)} joints"
            raise ConfigError(f"{found}, which cannot move the tip along one axis alone; use joint positions")
        if arm.output == _TWIST:
            tips[name], sizes = chain, (*[SLIDES] * 3, *[1.0] * 3)
            own = [MovedAxis(name, tip, _TWIST, tip[-1], size) for tip, size in zip(_TIP, sizes, strict=True)]
        axes += own
        gripper, fingers = arm.gripper, arm.robot.gripper_joint_names
        if gripper.mode != "none" and fingers:
            shown = fingers[0], gripper.closed_position, gripper.open_position
            finger, low, high = (gauge.joint, gauge.closed, gauge.open) if (gauge := gripper.gauge) else shown
            values = gripper.closed_value, gripper.open_value
            axes.append(MovedAxis(name, finger, _GRIPPER, low=low, high=high, values=values))
    return joints, axes, tips


class ScriptedSource(ActionSource):
    """Proposes what ``motion`` returns for a time of the steady clock: the number of each axis, arm by arm."""

    def __init__(self, axes: Sequence[MovedAxis], clock: Clock, motion: Callable[[float], FloatArray]) -> None:
        self._clock, self._motion = clock, motion
        kinds = {_TWIST: "tip_delta[rotation_vector]", _GRIPPER: "gripper"}
        usual = [f"joint_{'velocity' if axis.by_velocity else 'position'}" for axis in axes]
        parts = [f"{axis.arm}.{kinds.get(axis.output, kind)}" for axis, kind in zip(axes, usual, strict=True)]
        action = parse_components(" + ".join(dict.fromkeys(parts)), action=True)
        self.spec = PolicySpec((ImageFeature(KEY),), (), action, dimension=0, rate_hz=1 / TICK)

    def load(self, progress: Progress = no_progress) -> None:
        progress(1.0, "nothing to load")  # ends the bar on a terminal

    def infer(self, observation: Observation) -> ActionChunk:
        return ActionChunk(self._motion(self._clock.steady())[None], observation.stamp)


class Heard:
    """What was measured and commanded, with the steady clock's times; ``tips`` are of arms that take twists."""

    def __init__(self, clock: Clock, tips: dict[str, Kinematics]) -> None:
        self._clock, self._tips, self._start = clock, tips, dict[str, FloatArray]()
        self._measured: dict[Key, list[tuple[float, float, float]]] = defaultdict(list)
        self._sent: dict[Key, list[tuple[float, float]]] = defaultdict(list)
        self.times: dict[str, list[tuple[float, float]]] = defaultdict(list)  # by topic: arrivals and stamps

    def arrived(self, stamp: int) -> tuple[float, float]:
        """Return the time now, and the ``stamp`` (nanoseconds) as a time; NaN if it is missing."""
        now = self._clock.now()
        return now.steady / 1e9, (now.steady - now.ros + stamp) / 1e9 if stamp else math.nan

    def measure(self, arm: str, joints: JointState, times: tuple[float, float]) -> None:
        """Keep an arm's positions; of a tip, the way from the axes of its base."""
        places = dict(zip(joints.names, joints.positions.tolist(), strict=False))
        if (tip := self._tips.get(arm)) and set(tip.joint_names) <= places.keys():
            pose = tip.forward(np.array([places[name] for name in tip.joint_names]))
            start = self._start.setdefault(arm, pose.rotation)
            places |= zip(_TIP, [*pose.position, *rotation_vector(pose.rotation @ start.T)], strict=True)
        for name, position in places.items():
            self._measured[arm, name].append((*times, float(position)))

    def command(self, arm: str, command: Command) -> None:
        """Keep the positions or velocities that were sent to an arm."""
        named = dict(command.velocities or zip(command.names, command.positions.tolist(), strict=True))
        if command.twist is not None:
            named = dict(zip(_TIP, np.concatenate(command.twist).tolist(), strict=True))
        for name, value in named.items():
            self._sent[arm, name].append((self._clock.steady(), value))

    def measured(self, key: Key, since: float) -> Track:
        """Return what was measured since a time; stamps remove the jitter of the transport, not its mean."""
        rows = self._measured[key]
        arrived, stamps, positions = np.array(rows[bisect_left(rows, (since,)) :]).reshape(-1, 3).T
        even = len(stamps) and not np.isnan(stamps).any() and np.all(np.diff(stamps) > 0)
        return Track(stamps + np.median(arrived - stamps) if even else arrived, positions)

    def commanded(self, axis: MovedAxis, since: float) -> Track:
        """Return what was sent since a time; velocities as the way that they lead to."""
        rows = self._sent[axis.key]
        sent = Track(*np.array(rows[bisect_left(rows, (since,)) :]).reshape(-1, 2).T)
        if not axis.by_velocity or not len(sent.time):
            return sent
        way = np.concatenate([[0.0], np.cumsum(sent.position[:-1] * np.diff(sent.time))])
        fine = np.arange(sent.time[0], sent.time[-1], TICK / 10)
        return Track(fine, np.interp(fine, sent.time, way) + self.measured(axis.key, since).position[0])

    def last(self, axis: MovedAxis) -> float:
        """Return when the last command was sent."""
        return self._sent[axis.key][-1][0]

    def now(self, key: Key) -> float:
        """Return the newest position; NaN before the first."""
        return self._measured[key][-1][2] if self._measured[key] else math.nan
