"""Receives messages on the graph thread, checks them, and passes them to the control loop or drops them.

Camera frames stay serialised here: only the header is read, and no image is decoded.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np

from vla_ros.config import CameraConfig
from vla_ros.contract.binding import read_state_message
from vla_ros.control.clock import Now
from vla_ros.control.joints import JointStateMerger
from vla_ros.control.mailbox import Mailbox
from vla_ros.control.outcome import REPLACED
from vla_ros.control.publishers import CompetingSources, DataSource, DataSources
from vla_ros.control.reasons import Reason, Refused
from vla_ros.control.robot import AnyArm, RobotController
from vla_ros.control.safety import State
from vla_ros.control.watchdog import digest
from vla_ros.errors import ImageError
from vla_ros.execution.camera_frames import Frame
from vla_ros.execution.context import Context
from vla_ros.execution.frame_slots import slots_of
from vla_ros.graph.origin import Origin, stamp_of
from vla_ros.kinematics.transforms import TransformBuffer
from vla_ros.node.observer import Observer
from vla_ros.types import JointState, UInt8Array
from vla_ros.vision.messages import CdrBytes, image_header, image_stamp, read_compressed, shown, with_stamp

_UNKNOWN = Origin()
_FINGERS_DUE = 5_000_000_000  # ns; by then, the gripper's driver has started as well


class CameraSources:
    """Distinguishes the frames of several sources, and warns of unexpected frames once per topic."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._sources = DataSources()
        self._transports = {one.topic: one.transport for one in context.options.current.camera.each}
        self._known: dict[str, set[str]] = {}

    def competing(self, steady: int) -> CompetingSources | None:
        """Return two sources whose frames alternate on a topic (its subject), or None."""
        return self._sources.competing(steady)

    def follows(self, topic: str, data: CdrBytes, publisher: bytes, now: Now) -> bool:
        """Return True if a frame comes from the followed source."""
        config = self._context.options.current
        kind = _kind(data, self._transports[topic])
        if not self._sources.follows(topic, DataSource(publisher, kind), now.steady, config.timeouts.camera):
            return False
        self._warn(topic, kind, config.camera)
        return True

    def _warn(self, topic: str, kind: str, camera: CameraConfig) -> None:
        """Warn once of an unexpected size, and once if the frames of a topic change."""
        known = self._known.setdefault(topic, set())
        if kind in known or len(known) > 1:
            return
        size = next(f"{each.width}x{each.height}" for each in camera.each if each.topic == topic)
        if known:
            self._context.logger.warning(f"{topic}: its frames were {next(iter(known))} and are {kind} now")
        elif self._transports[topic] == "raw" and not kind.startswith(f"{size} "):
            text = f"{topic}: its frames are {kind}; camera.width and camera.height expect {size}"
            self._context.logger.warning(text)
        known.add(kind)


def _kind(data: CdrBytes, transport: str) -> str:
    """Describe the size, encoding and frame id of a frame."""
    if transport == "compressed":
        compressed = read_compressed(data)[0]
        return f"{shown(compressed.format)} (frame_id {shown(compressed.frame_id)})"
    header = image_header(data)
    size, encoding = f"{header.width}x{header.height}", shown(header.encoding)
    return f"{size} {encoding} (frame_id {shown(header.frame_id)})"


class FrameReceiver:
    """Receives the frames of the cameras in ``used`` (None: all), by index in ``camera.topics``.

    ``observer`` gets every frame if the policy uses past frames. ``sources`` selects the publisher to follow on
    each topic. Frames of other cameras are neither counted nor checked: they can only be recorded.
    ``page_locked`` is that of the source: frames wait in such memory for their inference.
    """

    def __init__(
        self,
        context: Context,
        mailboxes: Sequence[Mailbox[Frame]],
        observer: Observer | None = None,
        used: Collection[int] | None = None,
        page_locked: Callable[[int], UInt8Array | None] = lambda size: None,
    ) -> None:
        self._context = context
        self._slots = slots_of(context.options.current.camera, page_locked)
        self._observer = observer if observer is not None and observer.remembers else None
        self.sources = CameraSources(context)
        self._mailboxes, self._used = mailboxes, used
        self._arrived = [-math.inf] * len(mailboxes)
        self._unstamped: set[str] = set()

    def receive(self, index: int, data: CdrBytes, origin: Origin = _UNKNOWN) -> None:
        """Receive a message of camera ``index`` as CDR bytes."""
        if self._used is not None and index not in self._used:
            return
        context, config, now = self._context, self._context.options.current, self._context.clock.now()
        topic = config.camera.topics[index]
        context.stats.received()
        try:
            stamp, followed = image_stamp(data), self.sources.follows(topic, data, origin.publisher, now)
        except ImageError as error:
            self._drop(Frame(b"", 0, topic, now), Reason.IMAGE_INVALID, f"{topic}: {error}")
            return
        if not followed:
            context.report(Frame(b"", stamp, topic, now).outcome(Reason.CAMERA_CONTESTED.value))
            return
        if context.suspension.note_arrival(*origin) < context.suspension.resumed:
            context.report(Frame(b"", stamp, topic, now).outcome(Reason.SUSPENDED.value))
            return
        if not stamp:
            stamp, data = now.ros, with_stamp(data, now.ros)
            self._warn_of_no_stamp(topic)
        seconds = now.steady / 1e9
        data = self._slots[index].keep(data)
        frame = Frame(data, stamp, topic, now, seconds - self._arrived[index])
        checksum = digest(data, skip=12) if config.timeouts.frozen_frames else None
        reason = context.watchdog.check_frame(topic, stamp, now, checksum)
        if reason is not None:
            self._drop(frame, reason, topic)
            return
        self._arrived[index] = seconds
        if self._observer is not None:
            self._observer.remember(index, stamp, data, context.inputs.snapshot)
        replaced = self._mailboxes[index].put(frame)
        if replaced is not None:
            context.report(replaced.outcome(REPLACED))
        took = 1e3 * (context.clock.steady() - seconds)
        context.stats.record({"transport": (now.ros - stamp) / 1e6, "receive": took})

    def _warn_of_no_stamp(self, topic: str) -> None:
        """Warn once per topic of frames without a stamp, which many drivers send."""
        self._context.stats.unstamped()
        if topic not in self._unstamped:
            self._unstamped.add(topic)
            self._context.logger.warning(
                f"{topic}: its frames have the stamp 0, so their time of arrival is used: timeouts.frame_age "
                "cannot detect old frames. Configure the driver to stamp them"
            )

    def _drop(self, frame: Frame, reason: Reason, detail: str) -> None:
        self._context.report(frame.outcome(reason.value, reason=reason, detail=detail))
        self._context.logger.debug(f"{reason.value}: {detail}")


class StateReceiver:
    """Receives joint states on ``topics``, from one or more publishers each, and further state topics.

    ``transforms`` gets each message as it is, unless it has joints of an arm and is not used for it.
    """

    def __init__(
        self, context: Context, controller: RobotController, transforms: TransformBuffer | None = None
    ) -> None:
        self._context, self._transforms = context, transforms
        config = context.options.current
        self._arms = {arm.name: arm for arm in controller.arms}
        self.topics: dict[str, list[str]] = {}  # the arms covered by each topic
        for options in config.arms:
            self.topics.setdefault(options.joint_states, []).append(options.name)
        self._unstamped: set[str] = set()
        # Fingers that no joint state has had yet, and when the first one arrived (steady clock, ns; 0 before).
        self._unseen = {arm.name: (frozenset(arm.measured_fingers), 0) for arm in config.arms}
        several = len(controller.arms) > 1  # then each message covers its own arm's joints
        self._joint_states = {
            arm.name: JointStateMerger(
                arm.joint_names, arm.joint_speeds, (*arm.joint_names, *options.measured_fingers) if several else ()
            )
            for arm, options in zip(controller.arms, config.arms, strict=True)
        }

    def _look_for_fingers(self, arm: str, joints: JointState, steady: int) -> None:
        """Warn once of finger joints that no joint state of the first seconds had: a name may be misspelt."""
        unseen, since = self._unseen[arm]
        left, since = unseen - set(joints.names), since or steady
        self._unseen[arm] = left, since
        if left and steady - since > _FINGERS_DUE:
            self._unseen[arm] = frozenset(), since
            topic = next(topic for topic, arms in self.topics.items() if arm in arms)
            self._context.logger.warning(
                f"robot.gripper_joint_names: no joint state on {topic} has {', '.join(sorted(left))} (the last one "
                f"has {', '.join(joints.names)}); a driver ignores or refuses commands for other joints"
            )

    def competing(self, steady: int) -> Iterator[tuple[str, CompetingSources]]:
        """Yield each topic on which publishers alternate on an arm's joint, with the two."""
        for topic, arms in self.topics.items():
            for sources in filter(None, (self._joint_states[arm].competing(steady) for arm in arms)):
                yield topic, sources

    def joints(self, topic: str, message: Any, origin: Origin = _UNKNOWN) -> None:
        now, published = self._context.clock.now(), self._context.suspension.note_arrival(*origin)
        config = self._context.options.current
        timeout = config.timeouts.joint_state
        joints, stamp = joint_state_of(message, now.ros), stamp_of(message)
        if not stamp and topic not in self._unstamped:
            self._unstamped.add(topic)
            self._context.logger.warning(
                f"{topic}: its joint states have the stamp 0, so their time of arrival is used: "
                "timeouts.joint_state_age cannot detect old ones. Configure the driver to stamp them"
            )
        used = not any(arm.joint_names and {*arm.joint_names} & {*joints.names} for arm in self._arms.values())
        for arm in self.topics[topic]:
            if self._unseen[arm][0]:
                self._look_for_fingers(arm, joints, now.steady)
            states = self._joint_states[arm]
            states.speeds = self._arms[arm].joint_speeds
            # A simulation in lockstep waits for a command after its first joint state, which is as true as others.
            armed = self._context.safety.state is not State.DISARMED
            states.keep_trajectory(armed and config.node.clock != "inputs")
            whole = states.add(joints, stamp, now.steady, timeout, origin.publisher, published)
            if whole is not None:
                used |= self.accept(whole.joints, whole.stamp, arm, whole.published)
            elif wrong := states.unbelieved:
                self._check(stamp, wrong, arm)
        if used and self._transforms is not None:
            self._transforms.measure(joints)

    def accept(self, joints: JointState, stamp: int, arm: str = "arm", published: float = math.inf) -> bool:
        """Store a complete joint state as the arm's newest if the watchdog accepts it and its ``stamp``."""
        accepted = self._check(stamp, self._wrong(joints, self._arms[arm]), arm)
        if accepted:
            self._context.inputs.set_joints(joints, arm, published)
        return accepted

    def _check(self, stamp: int, wrong: str, arm: str) -> bool:
        """Tell the watchdog of a joint state, and what is ``wrong`` with it; return True if it may be used."""
        if wrong:
            named = f"{arm}: {wrong}" if len(self._arms) > 1 else wrong
            self._context.throttled.log(f"joint states {arm}", f"{Reason.JOINT_STATE_INVALID.value}: {named}")
        return self._context.watchdog.check_joint_state(stamp, self._context.clock.now(), wrong, arm)

    def state_topic(self, key: str, message: Any, origin: Origin = _UNKNOWN) -> None:
        """Receive a message of ``robot.state_topics``, named ``key``."""
        if self._context.suspension.note_arrival(*origin) >= self._context.suspension.resumed:
            self._context.inputs.set_state(key, read_state_message(message, self._context.clock.ros()))

    def forget(self) -> None:
        """Discard all measurements, because the clock jumped and stamps may repeat."""
        self._context.inputs.forget_measurements()
        for states in self._joint_states.values():
            states.forget()
        if self._transforms is not None:
            self._transforms.forget()

    def _wrong(self, joints: JointState, arm: AnyArm) -> str:
        """Return why a joint state is unusable, or ""."""
        if len(joints.names) != len(joints.positions):
            return f"{len(joints.names)} names and {len(joints.positions)} positions"
        try:
            arm.check_joints(joints)
        except Refused as refused:
            return f"{refused.detail} (see robot.joint_names, robot.urdf and topics.joint_states)"
        return ""


def joint_state_of(message: Any, now: int) -> JointState:
    """Convert a ``sensor_msgs/JointState``; ``now``, in nanoseconds, replaces a missing stamp."""
    velocities, efforts = (np.asarray(values, dtype=np.float64) for values in (message.velocity, message.effort))
    positions = np.asarray(message.position, dtype=np.float64)
    return JointState(tuple(message.name), positions, stamp_of(message) or now, velocities, efforts)
