"""The tree of options: ROS parameters, keys of ``config/*.yaml`` and names of ``-p name:=value``.

The name of an option is ``section.field``. The policy ``policy.name`` declares the section ``policy``. With several
arms (``robot.arms``), each arm has its own section.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from vla_ros.config.collision import CollisionConfig
from vla_ros.config.control import ControlConfig
from vla_ros.config.guard import GuardConfig
from vla_ros.config.options import PolicyConfig, option
from vla_ros.config.record import RecordConfig
from vla_ros.config.registry import options_class
from vla_ros.config.sections import (
    CameraConfig,
    FeaturesConfig,
    GripperConfig,
    LimitsConfig,
    NodeConfig,
    RobotConfig,
    TimeoutsConfig,
    TopicsConfig,
)
from vla_ros.config.takeover import TakeoverConfig


@dataclass(frozen=True)
class ArmConfig:
    """One arm of the robot, with the options that may differ between arms."""

    name: str  # as in the parts of a policy's features; ``arm`` if there is only one
    robot: RobotConfig
    gripper: GripperConfig
    limits: LimitsConfig
    output: str  # as ``control.output``
    command: str  # as ``topics.command``
    gripper_topic: str  # as ``topics.gripper``; empty if the fingers are in ``command``
    joint_states: str = TopicsConfig.joint_states  # as ``topics.joint_states``; several arms may share one
    leader: str = ""  # as ``takeover.leader``
    mount: tuple[float, ...] = ()  # as ``collision.mount``

    @property
    def measured_fingers(self) -> tuple[str, ...]:
        """The finger joints, and the joint that shows their opening if it is another."""
        names, gauge = self.robot.gripper_joint_names, self.gripper.gauge
        return (*names, gauge.joint) if gauge and gauge.joint not in names else names


_OF_AN_ARM = {
    "robot": ("urdf", "joint_names", "base_frame", "tip_frame", "gripper_joint_names", "home"),
    "control": ("output",),
    "topics": ("command", "gripper", "joint_states"),
    "gripper": ("open_position", "closed_position", "measured_by"),
    "limits": ("workspace_low", "workspace_high"),
    "takeover": ("leader",),
    "collision": ("mount",),
}
OF_AN_ARM = {leaf: f"{section}.{leaf}" for section, leaves in _OF_AN_ARM.items() for leaf in leaves}
"""Options in the section of each of ``robot.arms``, and the option from which each takes its default."""


@dataclass(frozen=True)
class Config:
    """All options."""

    policy: PolicyConfig = field(default_factory=lambda: options_class(PolicyConfig.name)())
    camera: CameraConfig = field(default_factory=CameraConfig)
    robot: RobotConfig = field(default_factory=RobotConfig)
    control: ControlConfig = field(default_factory=ControlConfig)
    gripper: GripperConfig = field(default_factory=GripperConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    collision: CollisionConfig = field(default_factory=CollisionConfig)
    timeouts: TimeoutsConfig = field(default_factory=TimeoutsConfig)
    topics: TopicsConfig = field(default_factory=TopicsConfig)
    features: FeaturesConfig = field(default_factory=FeaturesConfig)
    takeover: TakeoverConfig = field(default_factory=TakeoverConfig)
    record: RecordConfig = field(default_factory=RecordConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    node: NodeConfig = field(default_factory=NodeConfig)
    preset: str = option("", "Known robot whose options (config/presets) replace the defaults; empty: none")
    own: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Options of single arms by flat name (``left.urdf``) that override options shared by all arms."""

    @property
    def arms(self) -> tuple[ArmConfig, ...]:
        """The robot's arms, in the order in which they are commanded."""
        return tuple(map(self._arm, self.robot.arms or ("arm",)))

    def of_arm(self, name: str, leaf: str) -> Any:
        section, _, shared = OF_AN_ARM[leaf].partition(".")
        return self.own.get(f"{name}.{leaf}", getattr(getattr(self, section), shared))

    def _arm(self, name: str) -> ArmConfig:
        def section(which: str) -> Any:
            own = {leaf: self.own[f"{name}.{leaf}"] for leaf in _OF_AN_ARM[which] if f"{name}.{leaf}" in self.own}
            return replace(getattr(self, which), **own) if own else getattr(self, which)

        parts = (section(which) for which in ("robot", "gripper", "limits"))
        topics = (
            self.of_arm(name, leaf) for leaf in ("output", "command", "gripper", "joint_states", "leader", "mount")
        )
        return ArmConfig(name, *parts, *topics)


class LiveConfig:
    """Holds the current tree of options, which any thread may read or replace.

    A step reads :attr:`current` once. Trees are immutable, so no step sees a partial change.
    """

    def __init__(self, config: Config) -> None:
        self._current, self._lock = config, threading.Lock()

    @property
    def current(self) -> Config:
        """The tree; assign another one to change options."""
        return self._current

    @current.setter
    def current(self, config: Config) -> None:
        with self._lock:
            self._current = config

    def give_up(self, refused: Config, kept: Config) -> None:
        """Return from a tree that cannot be applied to ``kept``, unless it was replaced meanwhile."""
        with self._lock:
            if self._current is refused:
                self._current = kept
