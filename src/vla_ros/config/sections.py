"""The sections of the tree of options, each a frozen dataclass.

Lists are tuples here and arrays in ROS. Units are SI, angles are radians.
"""

import math
import re
from dataclasses import dataclass
from typing import Any

from vla_ros.config.options import option

ORIENTATIONS = ("none", "rotate_90", "rotate_180", "rotate_270", "flip_horizontal", "flip_vertical")
GRIPPER_ACTIONS = ("gripper_command", "parallel_gripper_command", "franka")
GRIPPER_OUTPUTS = (
    "joint_state",
    "float64_multi_array",
    "joint_trajectory",
    "joint_single_command",
    *GRIPPER_ACTIONS,
)


def _pixels(default: int, what: str) -> Any:
    text = f"Expected {what}, for buffer sizes and middleware profiles"
    return option((default,), text, "px", 1, 16384, per_camera=True)


def _corner(which: str) -> Any:
    text = (
        f"{which} corner (x, y, z) of the box that the tip must stay in, in force once both are set; empty: no box"
    )
    return option((), text, "m", -100, 100, length=(0, 3), live=True)


def _seconds(default: float, description: str, *, low: float = 0.01, live: bool = True) -> Any:
    return option(default, description, "s", low, 3600, live=live)


COMPRESSED = ("/compressed", "/compressedDepth")
"""Ends of the topics on which image_transport publishes ``sensor_msgs/CompressedImage``."""


@dataclass(frozen=True)
class Camera:
    """One camera of :class:`CameraConfig`; the fields are its options."""

    topic: str
    key: str
    transport: str
    orientation: str
    processor: str
    crop_area: float
    width: int
    height: int
    info: str
    rectified: bool


@dataclass(frozen=True)
class CameraConfig:
    """The cameras, and options that replace the policy's image processors."""

    topics: tuple[str, ...] = option(("/camera/image_raw",), "Image topics, one per camera")
    keys: tuple[str, ...] = option(("image",), "Key of each camera's image for the policy, in the order of topics")
    transport: str = option(
        "raw",
        "Message type: sensor_msgs/Image or sensor_msgs/CompressedImage; topics that end in /compressed or "
        "/compressedDepth have the second one",
        choices=("raw", "compressed"),
    )
    orientation: tuple[str, ...] = option(
        ("none",),
        "Rotation (clockwise) or flip that makes the image upright",
        choices=ORIENTATIONS,
        per_camera=True,
    )
    processor: tuple[str, ...] = option(
        ("policy",),
        "Resize as in training: policy (the policy decides), openvla (PIL bicubic), libero (TensorFlow's JPEG and "
        "Lanczos-3) or resize_with_pad (openpi: PIL bilinear, black bars)",
        choices=("policy", "openvla", "libero", "resize_with_pad"),
        per_camera=True,
    )
    crop_area: tuple[float, ...] = option(
        (0.0,),
        "Share of the area that the centre crop keeps; LIBERO checkpoints use 0.9; 0: the policy decides",
        low=0,
        high=1,
        per_camera=True,
    )
    width: tuple[int, ...] = _pixels(640, "width")
    height: tuple[int, ...] = _pixels(480, "height")
    info: tuple[str, ...] = option(
        ("",),
        "Topic of sensor_msgs/CameraInfo: of a depth camera, to compute points; of a colour camera, to register "
        "another one's depth to it",
        per_camera=True,
    )
    rectified: tuple[bool, ...] = option(
        (False,), "The images are rectified: CameraInfo's P describes them, not K and D", per_camera=True
    )

    @property
    def each(self) -> tuple[Camera, ...]:
        """The cameras; an option with a single value applies to all cameras."""
        count = len(self.topics)
        sizes = self.crop_area, self.width, self.height
        transports = ["compressed" if topic.endswith(COMPRESSED) else self.transport for topic in self.topics]
        lists = (self.orientation, self.processor, *sizes, self.info, self.rectified)
        whole = (values * count if len(values) == 1 else values for values in lists)
        return tuple(Camera(*values) for values in zip(self.topics, self.keys, transports, *whole, strict=True))


STATE_TOPIC_TYPES = {"JointState": "sensor_msgs", "Float64MultiArray": "std_msgs"} | dict.fromkeys(
    ("PoseStamped", "WrenchStamped"), "geometry_msgs"
)
"""Message types of ``robot.state_topics``, with their packages."""


@dataclass(frozen=True)
class StateTopic:
    """One of ``robot.state_topics``; ``type`` is a key of :data:`STATE_TOPIC_TYPES`."""

    name: str  # in ``topic.NAME`` of a state vector
    topic: str
    type: str


@dataclass(frozen=True)
class RobotConfig:
    """Description of the arm and names of its joints and frames; with several arms, the options that they share."""

    arms: tuple[str, ...] = option(
        (), "Names of several arms; each has its own section, such as left.urdf. Empty: one arm, called arm"
    )
    urdf: str = option("", "URDF file, or 'demo' for the simulated arm; required for deltas of the tip")
    joint_names: tuple[str, ...] = option((), "Joints of the arm in command order; empty: the URDF's chain")
    base_frame: str = option(
        "", "Link in whose frame deltas of the tip and the workspace box are given; empty: URDF root"
    )
    tip_frame: str = option("", "Link that the policy moves; empty: the end of the chain")
    gripper_joint_names: tuple[str, ...] = option((), "Finger joints that are commanded; may be empty")
    home: tuple[float, ...] = option(
        (),
        "Posture to which a redundant arm drifts, one position per joint; empty: none",
        "rad or m",
        -100,
        100,
    )
    state_topics: tuple[str, ...] = option(
        (), "Further topics for state vectors, as NAME=/topic or NAME=/topic:TYPE; the default type is JointState"
    )

    @property
    def parsed_state_topics(self) -> tuple[StateTopic, ...]:
        """``state_topics``, each with its name and message type."""
        parts = (text.partition("=") for text in self.state_topics)
        named = ((name.strip(), *rest.partition(":")) for name, _, rest in parts)
        return tuple(StateTopic(name, at.strip(), kind.strip() or "JointState") for name, at, _, kind in named)


NUMBER = r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
"""Pattern of a number in an option's text."""
_GAUGE = re.compile(rf"([^\s=]+)\s*=\s*({NUMBER})\s*\.\.\s*({NUMBER})")


@dataclass(frozen=True)
class Gauge:
    """A joint that shows how far a gripper is open."""

    joint: str
    closed: float  # its position when closed, m or rad
    open: float  # its position when open


def read_gauge(text: str) -> Gauge | None:
    """Parse the joint that shows a gripper's opening, ``JOINT = CLOSED..OPEN``; None if empty or invalid."""
    match = _GAUGE.fullmatch(text.strip())
    return Gauge(match[1], float(match[2]), float(match[3])) if match else None


@dataclass(frozen=True)
class GripperConfig:
    """Range of the action's gripper value, and how the fingers are commanded."""

    mode: str = option(
        "binary",
        "binary: open or close fully; continuous: scale; none: send no gripper commands",
        choices=("binary", "continuous", "none"),
    )
    output: str = option(
        "float64_multi_array",
        "Message type on topics.gripper, or action type if topics.gripper names an action",
        choices=GRIPPER_OUTPUTS,
    )
    open_value: float = option(
        1.0,
        "Action value for open, as the checkpoint returns it (OpenVLA: 1, for both Bridge and LIBERO)",
        low=-1e3,
        high=1e3,
    )
    closed_value: float = option(0.0, "Action value for closed", low=-1e3, high=1e3)
    threshold: float = option(0.5, "Opening above which binary mode opens", low=0, high=1, live=True)
    at_threshold: str = option(
        "open",
        "At exactly the threshold, binary mode opens (DROID, Bridge), closes, or keeps its state (LIBERO)",
        choices=("open", "close", "keep"),
        live=True,
    )
    hysteresis: float = option(
        0.0, "Distance from the threshold within which the gripper keeps its state", low=0, high=0.5, live=True
    )
    open_position: float = option(0.04, "Finger joint position when open", "m or rad", -10, 10)
    closed_position: float = option(0.0, "Finger joint position when closed", "m or rad", -10, 10)
    measured_by: str = option(
        "",
        "Joint that shows the opening in states, as JOINT = CLOSED..OPEN in its unit; empty: the commanded joints",
    )
    max_speed: float = option(
        0.0, "Maximum finger joint speed; 0: the URDF's velocity limit", "m/s or rad/s", 0, 100, live=True
    )
    goal_speed: float = option(
        0.0, "Speed in action goals; 0: the driver's default", "m/s or rad/s", 0, 100, live=True
    )
    goal_effort: float = option(
        0.0, "Force in action goals; 0: the driver's default", "N or Nm", 0, 1000, live=True
    )

    @property
    def gauge(self) -> Gauge | None:
        """The joint of ``measured_by``; None if it is empty or invalid."""
        return read_gauge(self.measured_by)


@dataclass(frozen=True)
class LimitsConfig:
    """Upper bounds of a command; checked before anything is sent."""

    on_violation: str = option(
        "clamp", "clamp: shorten the step; stop: stop the arm", choices=("clamp", "stop"), live=True
    )
    max_translation_step: float = option(0.05, "Largest translation of the tip per step", "m", 0, 1, live=True)
    max_rotation_step: float = option(0.3, "Largest rotation of the tip per step", "rad", 0, 3.2, live=True)
    max_joint_step: float = option(
        0.2,
        "Largest step of a joint from the last command, or from the measured position if there is none (after a "
        "hold) and for velocities",
        "rad or m",
        0,
        3.2,
        live=True,
    )
    following_error: float = option(
        0.5,
        "Largest distance of a commanded position from the measured one; an arm that is further away is held. "
        "State more than twice what the arm sags: it moves again only once it keeps its position to half of this",
        "rad",
        0.04,
        6.4,
        live=True,
    )
    following_error_prismatic: float = option(
        0.15, "The same for prismatic joints of the URDF", "m", 0.006, 10, live=True
    )
    velocity_scale: float = option(
        1.0, "Share of the URDF's joint velocity limits that may be used", low=0, high=1, live=True
    )
    joint_margin: float = option(0.0, "Distance kept from the URDF's joint limits", "rad or m", 0, 1)
    max_joint_acceleration: float = option(
        0.0, "Maximum joint acceleration of commands; 0: no limit", "rad/s^2 or m/s^2", 0, 1000, live=True
    )
    max_joint_velocity: float = option(
        0.0, "Maximum joint velocity besides the URDF's; 0: only the URDF's", "rad/s or m/s", 0, 1000, live=True
    )
    assumed_joint_velocity: tuple[float, ...] = option(
        (4 * math.pi, 2.0),
        "Velocity limits of joints for which neither the URDF nor max_joint_velocity states one: of turning joints "
        "in rad/s, and of sliding joints in m/s",
        low=1e-3,
        high=1000,
        length=(2,),
        live=True,
    )
    workspace_low: tuple[float, ...] = _corner("Lower")
    workspace_high: tuple[float, ...] = _corner("Upper")

    @property
    def box(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """Both corners of the workspace box, or None if one is empty: there is no box then."""
        return (self.workspace_low, self.workspace_high) if self.workspace_low and self.workspace_high else None


@dataclass(frozen=True)
class TimeoutsConfig:
    """Times after which an input is stale, an inference late or a command expired."""

    camera: float = _seconds(0.5, "No new frame for this long: hold")
    camera_skew: float = _seconds(0.0, "Images of one step taken further apart than this: hold; 0: no limit", low=0)
    joint_state: float = _seconds(0.5, "No joint state for this long: hold")
    inference: float = _seconds(2.0, "The result of an inference that takes longer is dropped")
    server_lost: float = _seconds(
        0.5, "The plan continues for this long after the policy's server is lost, then hold", low=0
    )
    frame_age: float = _seconds(1.0, "Frames older than this by the ROS clock are dropped; 0: any age", low=0)
    velocity: float = _seconds(
        0.0,
        "A twist or joint velocity expires after this long without a new command; 0: two control periods",
        low=0,
    )
    publisher: float = _seconds(5.0, "Warn when a topic has had no publisher for this long", low=0.1, live=False)
    frozen_frames: int = option(
        0, "Hold after this many consecutive frames with the same pixels; 0: never", low=0, high=10000, live=True
    )
    joint_state_age: float = _seconds(
        1.0, "Joint states older than this by the ROS clock are not used; 0: any age", low=0
    )
    driver: float = _seconds(1.0, "No subscriber on topics.command (or topics.gripper) for this long: stop")
    run: float = _seconds(0.0, "Time limit of a goal of ~/run_policy; 0: none", low=0)
    gripper: float = _seconds(10.0, "No result of a gripper action for this long: gripper_failed")
    heartbeat: float = _seconds(0.0, "No heartbeat for this long: stop; 0: not required", low=0)
    clock_jump: float = _seconds(0.5, "ROS clock ahead of or behind a steady clock by this much: hold", live=False)


@dataclass(frozen=True)
class TopicsConfig:
    """Names on the ROS 2 graph that belong to a robot; the node's own are in :mod:`vla_ros.config.node_topics`."""

    joint_states: str = option("/joint_states", "In: sensor_msgs/JointState of the robot")
    command: str = option("/arm/joint_command", "Out: the command, RELIABLE, KEEP_LAST(1)")
    gripper: str = option("", "Out: the fingers, if they have a driver of their own; empty: in topics.command")
    command_shared_with: tuple[str, ...] = option(
        (),
        "Nodes (full names; * for any) that may also publish on topics.command and topics.gripper because a "
        "multiplexer decides whose commands pass; simultaneous commands are then not detected",
    )
    servo: str = option(
        "", "MoveIt Servo's service that selects twist commands (/servo_node/switch_command_type); empty: none"
    )
    stop: str = option("~/stop", "In: std_msgs/Bool; true stops the arm until a reset")


@dataclass(frozen=True)
class FeaturesConfig:
    """The policy's features, as far as the checkpoint does not state them; see docs/features.md."""

    images: tuple[str, ...] = option((), "The policy's images, as KEY = CAMERA [WIDTHxHEIGHT]; KEY? is optional")
    state: tuple[str, ...] = option((), "The policy's state vectors, as KEY = arm.joint_position + arm.gripper")
    action: tuple[str, ...] = option((), "Components of the action, such as arm.joint_velocity[1]")
    delta_timestamps: tuple[str, ...] = option(
        (), "When a feature is measured, as KEY = -0.5, 0: seconds relative to now, oldest first"
    )
    delta_indices: tuple[str, ...] = option((), "The same in steps of the policy, as KEY = -15, 0")
    frames: str = option("", "Frames of the tip's pose in the training data; shown next to those of the robot")
    joint_form: str = option(
        "",
        "Unit of joints where a preset names several (so101: deg for LeRobot since 0.4.4, -100..100 before)",
    )
    rate_hz: float = option(
        0.0, "Rate of the training data, if the policy does not state it; 0: unknown", "Hz", 0, 1000
    )
    tip_step: tuple[float, ...] = option(
        (),
        "Largest step of the tip in the training data, in metres and radians; --dry-run compares it with limits",
        low=0,
        high=10,
        length=(0, 2),
    )


@dataclass(frozen=True)
class NodeConfig:
    """How the node joins the ROS 2 graph."""

    backend: str = option(
        "auto",
        "auto: rclpy if it imports, otherwise the embedded DDS participant",
        choices=("auto", "rclpy", "dds"),
    )
    clock: str = option(
        "ros",
        "inputs: for a simulation in lockstep, which waits for the node's commands. Time is the stamp of images, "
        "joint states and state topics, which are used once all of them have arrived with the same stamp",
        choices=("ros", "inputs"),
    )
    log_level: str = option("info", "Minimum severity of log messages", choices=("debug", "info", "warn", "error"))
    trace: str = option("", "JSON-lines file with one line per frame, from camera to command; empty: none")
    metrics_port: int = option(0, "TCP port of the Prometheus endpoint /metrics; 0: none", low=0, high=65535)
    metrics_address: str = option("127.0.0.1", "Address of the endpoint; 0.0.0.0 lets other hosts read it")
