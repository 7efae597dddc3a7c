"""Commands for an arm and its fingers, and their ROS messages."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vla_ros.config import VELOCITY_OUTPUTS, Config, LiveConfig
from vla_ros.config.control import ENVIRONMENT
from vla_ros.control.clock import Clock
from vla_ros.control.reasons import Refused
from vla_ros.errors import ConfigError
from vla_ros.types import FloatArray

_LEAST_DURATION = 0.1
"""Shortest trajectory of a hold, seconds: drivers refuse a trajectory that has ended when it arrives."""

_TYPES = {
    "joint_state": "sensor_msgs/msg/JointState",
    "float64_multi_array": "std_msgs/msg/Float64MultiArray",
    "joint_trajectory": "trajectory_msgs/msg/JointTrajectory",
    "twist_stamped": "geometry_msgs/msg/TwistStamped",
    "joint_velocity": "std_msgs/msg/Float64MultiArray",
    "joint_velocity_state": "sensor_msgs/msg/JointState",
    "joint_group_command": "interbotix_xs_msgs/msg/JointGroupCommand",
    "joint_single_command": "interbotix_xs_msgs/msg/JointSingleCommand",
}
_GROUP = "arm"  # name of the arm's joint group in Interbotix's configuration files
_PERIODS = 2  # control periods after which a velocity expires if timeouts.velocity is 0


@dataclass(frozen=True)
class Command:
    """A command for the driver of one arm."""

    # N joints: the arm's, then the fingers; only the fingers for a twist without kinematics and for a hold at zero
    # velocity.
    names: tuple[str, ...]
    positions: FloatArray  # float64 [N], radians or metres
    stamp: int  # nanoseconds; stamp of the frame that led to the command; for a hold, of the joint state
    arm: str = "arm"  # name of the arm in ``Config.arms``
    hold: bool = False  # True if the arm keeps its measured position
    velocity: FloatArray = field(default_factory=lambda: np.zeros(0))  # of the arm's joints, rad/s or m/s
    duration: float = 0.0  # seconds until the positions are reached; for a hold, a minimum
    frame_id: str = ""  # frame of the twist
    twist: tuple[FloatArray, FloatArray] | None = None  # linear [3] m/s and angular [3] rad/s of the tip, or None
    velocities: Mapping[str, float] | None = None  # rad/s or m/s by joint, for a velocity output; else None
    # Float64 [D] in the units of an environment, NaN in the columns of other arms, for the output ``environment``
    # (:mod:`vla_ros.control.environment_arm`); else None.
    action: FloatArray | None = None
    limited_by: tuple[int, bytes] = 0, b""  # stamp and publisher of the joint state by which it was limited
    refused: Refused | None = None  # why this arm holds while others move (``control.arms_hold_alone``), or None

    @property
    def arm_positions(self) -> FloatArray:
        """The positions of the arm's joints, without the fingers'."""
        return self.positions[: len(self.velocity)]

    @property
    def fingers(self) -> list[float]:
        """The positions of the fingers."""
        positions: list[float] = self.positions[len(self.velocity) :].tolist()
        return positions

    @property
    def is_velocity(self) -> bool:
        """True if it is a twist or joint velocities, which stay in force until another command arrives."""
        return self.twist is not None or self.velocities is not None

    @property
    def moves_on(self) -> bool:
        """True if the command moves the arm until another one arrives."""
        return self.is_velocity and not self.hold

    def stopped(self) -> "Command":
        """Return this command with zero velocity."""
        twist = None if self.twist is None else (np.zeros(3), np.zeros(3))
        velocities = None if self.velocities is None else dict.fromkeys(self.velocities, 0.0)
        return replace(self, hold=True, twist=twist, velocities=velocities)


@dataclass(eq=False)
class Commanded:
    """The commands of one arm since it was at rest.

    A command is *made*, and counts once it was *sent*. Before the first, the next command starts at the *measured*
    position.
    """

    velocity: FloatArray  # [N], with which what was sent moves the arm: zeros at first
    sent: FloatArray | None = None  # [N], positions of the last command that was sent, or None: measured
    made: Command | None = None  # a command that was not sent yet
    between: bool = False  # True if ``made`` is a command between two actions
    goal: Command | None = None  # of the last action, sent or not: commands between two actions lead there

    def make(self, command: Command, *, between: bool = False) -> Command:
        """Record a command, and return it."""
        self.made, self.between = command, between
        if not between:
            self.goal = command
        return command

    def send(self, *, gave_way: bool) -> Command | None:
        """Record that what was made was sent, and return it; if it ``gave_way``, no motion must be slowed down."""
        made, self.made = self.made, None
        if made is not None:
            self.sent = made.arm_positions
            self.velocity = np.zeros(len(made.velocity)) if gave_way else made.velocity
        return made


class StandingVelocities:
    """Velocities that move an arm, from the command that says so until another one or their end."""

    def __init__(self, clock: Clock, options: LiveConfig) -> None:
        self._clock, self._options = clock, options
        self._ends: Mapping[str, tuple[Command, float]] = {}  # of each arm, by its name; steady clock, s

    def send(self, sent: Mapping[str, Command]) -> None:
        """Remember when the velocities expire that were ``sent`` to these arms."""
        expires = self._clock.steady() + lifetime(self._options.current)
        others = {arm: each for arm, each in self._ends.items() if arm not in sent}
        self._ends = others | {arm: (each, expires) for arm, each in sent.items() if each.moves_on}

    def expired(self) -> list[Command]:
        """Return zeros for the arms whose velocity no other command followed in time."""
        now = self._clock.steady()
        return [command.stopped() for command, expires in self._ends.values() if now >= expires]


def lifetime(config: Config) -> float:
    """Return the seconds after which a velocity expires if no other command follows."""
    rate = config.control.rate_hz
    return config.timeouts.velocity or (_PERIODS / rate if rate else 0.0)


def split(command: Command, fingers: Collection[str]) -> tuple[Command, Command | None]:
    """Split a command into one for the arm and one for ``fingers`` (None without fingers).

    The driver of ``fingers`` has its own topic.
    """
    is_finger = [name in fingers for name in command.names]
    if not any(is_finger):
        return command, None

    def part(wanted: bool) -> Command:
        chosen = [index for index, finger in enumerate(is_finger) if finger is wanted]
        names = tuple(command.names[index] for index in chosen)
        return replace(command, names=names, positions=command.positions[chosen])

    return part(False), replace(part(True), twist=None, velocities=None)


def message_type(output: str) -> str:
    """Return the ROS type for ``control.output`` or ``gripper.output``, as ``pkg/msg/Type``."""
    if output == ENVIRONMENT:
        raise ConfigError("control.output: found environment, which only vla-ros eval can send; choose another")
    return _TYPES[output]


def to_message(command: Command, output: str, make: Callable[[str], Any], now: int | None = None) -> Any:
    """Return the command as a ROS message; its header has the command's stamp.

    A ``JointTrajectory`` starts at its header's stamp, which is the frame's stamp, so ``time_from_start`` of its
    point is the frame's age plus the command's duration. A controller would wait for a stamp that is ahead of its
    clock, so a trajectory then starts ``now``. A hold lasts at least 0.1 s, because ros2_control's
    joint_trajectory_controller rejects a trajectory that has ended.

    Zero velocity is stamped with ``now``, because MoveIt Servo ignores messages older than its
    ``incoming_command_timeout``.

    Args:
        command: The command.
        output: ``control.output`` or ``gripper.output``.
        make: Returns the message class for a type name ``pkg/msg/Type``.
        now: Time of the ROS clock in nanoseconds; None means the command's stamp.

    Raises:
        ValueError: The output is a velocity, but the command has none.
    """
    nothing, velocities = np.zeros(0), command.velocities or {}
    if (output == "twist_stamped" and command.twist is None) or ("velocity" in output and not velocities):
        raise ValueError(f"a command without a velocity cannot be sent as {output}")
    if output in ("float64_multi_array", "joint_velocity"):
        layout = _fill(make("std_msgs/msg/MultiArrayLayout"), dim=[], data_offset=0)
        data = command.positions if output == "float64_multi_array" else np.array(list(velocities.values()))
        return _fill(make(message_type(output)), layout=layout, data=data)
    if output == "joint_group_command":
        return _fill(make(message_type(output)), name=_GROUP, cmd=command.positions.astype(np.float32))
    if output == "joint_single_command":
        return _fill(make(message_type(output)), name=command.names[0], cmd=float(command.positions[0]))
    stamp = command.stamp
    if now is not None and output in VELOCITY_OUTPUTS and command.hold:
        stamp = now
    elif now is not None and output == "joint_trajectory":
        stamp = min(stamp, now)
    header = _header(stamp, make, command.frame_id if output == "twist_stamped" else "")
    if output in ("joint_state", "joint_velocity_state"):
        by_position = output == "joint_state"
        return _fill(
            make(message_type(output)),
            header=header,
            name=list(command.names if by_position else velocities),
            position=command.positions if by_position else nothing,
            velocity=nothing if by_position else np.array(list(velocities.values())),
            effort=nothing,
        )
    if output == "joint_trajectory":
        age = now - stamp if now is not None and stamp else 0
        duration = max(command.duration, _LEAST_DURATION) if command.hold else command.duration
        point = _fill(
            make("trajectory_msgs/msg/JointTrajectoryPoint"),
            positions=command.positions,
            velocities=nothing,
            accelerations=nothing,
            effort=nothing,
            time_from_start=_time(make("builtin_interfaces/msg/Duration"), age + round(duration * 1e9)),
        )
        return _fill(make(message_type(output)), header=header, joint_names=list(command.names), points=[point])
    assert command.twist is not None
    linear, angular = (_vector(make, part) for part in command.twist)
    twist = _fill(make("geometry_msgs/msg/Twist"), linear=linear, angular=angular)
    return _fill(make(message_type(output)), header=header, twist=twist)


def _header(stamp: int, make: Callable[[str], Any], frame_id: str) -> Any:
    time = _time(make("builtin_interfaces/msg/Time"), stamp)
    return _fill(make("std_msgs/msg/Header"), stamp=time, frame_id=frame_id)


def _time(cls: Any, nanoseconds: int) -> Any:
    seconds, rest = divmod(nanoseconds, 1_000_000_000)
    return _fill(cls, sec=seconds, nanosec=rest)


def _vector(make: Callable[[str], Any], values: Sequence[float] | FloatArray) -> Any:
    x, y, z = (float(value) for value in values)
    return _fill(make("geometry_msgs/msg/Vector3"), x=x, y=y, z=z)


def _fill(cls: Any, **fields: Any) -> Any:
    """Return a message; arrays become lists for rclpy, whose setters refuse numpy arrays."""
    if hasattr(cls, "get_fields_and_field_types"):
        fields = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in fields.items()}
    return cls(**fields)
