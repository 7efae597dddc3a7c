"""Detects stale, frozen, late or invalid inputs.

Pure logic: callers report events and supply the time. Silence is measured on a steady clock, which never jumps;
ages are measured on the ROS clock, which stamps refer to.
"""

import threading
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from vla_ros.config import LiveConfig, TimeoutsConfig
from vla_ros.control.clock import Now
from vla_ros.control.reasons import Reason
from vla_ros.types import UInt8Array

_SECOND = 1_000_000_000
_OTHER_CLOCK = 3600.0  # s; an older frame was stamped with another clock
_FASTEST_SIMULATION = 50  # times real time; a simulated clock that runs faster has jumped


@dataclass
class _Input:
    """State of a camera or of an arm's joint states."""

    seen: int | None = None  # steady time of the last good message
    stamp: int | None = None
    since_jump: bool = True  # False until a good message has arrived after a clock jump


@dataclass
class _Camera(_Input):
    digest: int | None = None
    same: int = 0  # consecutive frames with this digest
    refused: tuple[Reason, str] | None = None  # why the newest frame was refused for its age


@dataclass
class _Joints(_Input):
    wrong: str = ""
    wrong_told: bool = (
        True  # False until active() has returned ``wrong``, even if a good joint state arrives before
    )
    wrong_over: bool = False  # a good joint state has arrived since
    late: str = ""
    needed: bool = True


def digest(data: bytes | bytearray | memoryview | UInt8Array, samples: int = 4096, skip: int = 0) -> int:
    """Return a checksum of bytes spread evenly over an image or its message.

    A camera's noise changes nearly every pixel, so a few thousand bytes tell whether an image is new; 4096 samples
    take 30 us. The stride is a multiple of neither 2 nor 3, so that all colour channels are sampled. The first
    ``skip`` bytes are left out: 12 for a serialised message with a header, whose stamp changes even if the image
    does not.
    """
    flat = np.frombuffer(data, dtype=np.uint8) if not isinstance(data, np.ndarray) else data.reshape(-1)
    flat = flat[skip:]
    stride = max(1, len(flat) // samples) | 1
    stride += 2 if stride % 3 == 0 else 0
    return zlib.crc32(flat[::stride].tobytes(), len(flat) & 0xFFFFFFFF)


class Watchdog:
    """Watches cameras, joint states, inference, driver, heartbeat and the ROS clock. Thread-safe.

    Pass the result of :meth:`active` to :meth:`vla_ros.control.safety.Safety.follow`, at least ten times a second.
    ``arms`` are the arms that need joint states (for a twist without kinematics, none are needed). A ``simulated``
    ROS clock may stand still or run fast.
    """

    def __init__(
        self,
        options: LiveConfig,
        cameras: tuple[str, ...],
        arms: tuple[str, ...] = ("arm",),
        *,
        simulated: bool = False,
    ) -> None:
        self._options = options
        self._simulated = simulated
        self._lock = threading.Lock()
        self._cameras = {name: _Camera() for name in cameras}
        self._arms = {name: _Joints() for name in arms}
        self._unreadable_since: int | None = None
        self._inferring_since: int | None = None
        self._late = ""
        self._driver_seen: int | None = None
        self._driver_topic = ""
        self._heartbeat_seen: int | None = None
        self._dead_thread = ""
        self._last: Now | None = None
        self._jump = ""
        self._jump_told = False

    @property
    def _config(self) -> TimeoutsConfig:
        return self._options.current.timeouts

    def check_frame(self, camera: str, stamp: int, now: Now, digest: int | None = None) -> Reason | None:
        """Check a frame; return why it must be dropped, or None.

        Reasons are ``frame_repeated``, ``frame_out_of_order``, ``frame_old`` and ``frame_from_future``. A camera
        whose stamps restart is accepted after ``timeouts.camera``.

        Args:
            camera: The camera's topic.
            stamp: Stamp of the frame's header in nanoseconds; 0 if the driver sets none.
            now: Time of arrival.
            digest: :func:`digest` of the frame's pixels if frozen images are to be detected, else None.
        """
        with self._lock:
            self._check_clock(now)
            known, config = self._cameras[camera], self._config
            if stamp and known.stamp is not None and stamp <= known.stamp:
                if stamp == known.stamp:
                    return Reason.FRAME_REPEATED
                if not _silent(known.seen, config.camera, now):
                    return Reason.FRAME_OUT_OF_ORDER
            age = (now.ros - stamp) / _SECOND
            if config.frame_age and abs(age) > config.frame_age:
                reason = Reason.FRAME_OLD if age > 0 else Reason.FRAME_FROM_FUTURE
                side = "old" if age > 0 else "ahead"
                clocks = (
                    "the driver stamps with another clock" if abs(age) > _OTHER_CLOCK else "do the clocks agree?"
                )
                found = f"{camera}: {abs(age):.3g} s {side}, allowed {config.frame_age:g} s"
                known.refused = reason, f"{found} (timeouts.frame_age; 0 accepts any); {clocks}"
                return reason
            known.seen, known.stamp, known.refused, known.since_jump = now.steady, stamp, None, True
            known.same = known.same + 1 if digest is not None and digest == known.digest else 1
            known.digest = digest
            return None

    def see_images(self, now: Now, *, readable: bool) -> None:
        """Record whether a step's frames could be decoded; unreadable cameras become stale."""
        with self._lock:
            if readable:
                self._unreadable_since = None
            elif self._unreadable_since is None:
                self._unreadable_since = now.steady

    def check_joint_state(self, stamp: int, now: Now, wrong: str = "", arm: str = "arm") -> bool:
        """Record a joint state that arrived at ``now``; return True if it may be used.

        The joint state must be newer than the previous one, no older than ``timeouts.joint_state_age`` (if
        ``stamp`` is 0, its age is unknown), and free of errors (missing joints, NaN), which ``wrong`` describes.
        """
        with self._lock:
            self._check_clock(now)
            config, known = self._config, self._arms.setdefault(arm, _Joints(needed=False))
            known.wrong_told = known.wrong_told and (not wrong or bool(known.wrong))
            known.wrong_over = not wrong and not known.wrong_told
            if wrong:
                known.wrong = wrong
                return False
            if known.wrong_told:
                known.wrong = ""
            last, stale = known.stamp, _silent(known.seen, config.joint_state, now)
            if stamp and last is not None and (stamp == last or (stamp < last and not stale)):
                return False
            age = (now.ros - stamp) / _SECOND
            if stamp and config.joint_state_age and abs(age) > config.joint_state_age:
                found = f"{abs(age):.3g} s {'old' if age > 0 else 'ahead of this clock'}"
                known.late = f"; the newest was {found}, allowed {config.joint_state_age:g} s"
                return False
            known.seen, known.stamp, known.late, known.since_jump = now.steady, stamp or None, "", True
            return True

    def inference_began(self, now: Now) -> None:
        with self._lock:
            self._inferring_since = now.steady

    def inference_ended(self, now: Now) -> bool:
        """Record the end of an inference; return False if it was late and must be dropped."""
        with self._lock:
            self._late = self._overdue(now)
            self._inferring_since = None
            return not self._late

    def see_driver(self, subscribers: int, now: Now, topic: str = "") -> None:
        """Record the number of drivers on the command topic; of several topics, the lowest number."""
        with self._lock:
            self._driver_topic = topic
            if subscribers > 0:
                self._driver_seen = now.steady

    def see_heartbeat(self, now: Now) -> None:
        with self._lock:
            self._heartbeat_seen = now.steady

    def see_dead_thread(self, detail: str) -> None:
        """Record that a thread which nothing starts again has failed: :attr:`Reason.THREAD_DIED` from now on."""
        with self._lock:
            self._dead_thread = detail

    def active(self, now: Now) -> Mapping[Reason, str]:
        """Return all active reasons, each with its detail."""
        with self._lock:
            self._check_clock(now)
            found: dict[Reason, str] = {}
            for name, camera in self._cameras.items():
                found.update(self._of_camera(name, camera, now))
            unreadable = self._unreadable_since
            if unreadable is not None and _silent(unreadable, self._config.camera, now):
                found[Reason.CAMERA_STALE] = f"no readable frame: {_since(unreadable, now)}"
            found.update(self._of_joints(now))
            late = self._overdue(now) or self._late
            if late:
                found[Reason.INFERENCE_LATE] = late
            if self._jump:
                found[Reason.CLOCK_JUMP] = self._jump
                self._jump_told = True
            found.update(self._of_others(now))
            return found

    def _of_camera(self, name: str, camera: _Camera, now: Now) -> dict[Reason, str]:
        config, found = self._config, {}
        if _silent(camera.seen, config.camera, now):
            found[Reason.CAMERA_STALE] = f"{name}: {_since(camera.seen, now)}"
        if config.frozen_frames and camera.digest is not None and camera.same >= config.frozen_frames:
            found[Reason.CAMERA_FROZEN] = f"{name}: {camera.same} consecutive frames have the same pixels"
        if camera.refused:
            found[camera.refused[0]] = camera.refused[1]
        return found

    def _of_joints(self, now: Now) -> dict[Reason, str]:
        """Return reasons that hold all arms.

        With ``control.arms_hold_alone``, there are none as long as one arm has good joint states.
        """
        needed = {name: joints for name, joints in self._arms.items() if joints.needed}
        found, good = dict[Reason, str](), 0
        for name, joints in needed.items():
            prefix = f"{name}: " if len(needed) > 1 else ""
            stale = _silent(joints.seen, self._config.joint_state, now)
            if stale:
                found[Reason.JOINT_STATE_STALE] = prefix + _since(joints.seen, now) + joints.late
            good += not stale and not joints.wrong
            if joints.wrong:
                found[Reason.JOINT_STATE_INVALID] = prefix + joints.wrong
                joints.wrong_told = True
                if joints.wrong_over:
                    joints.wrong, joints.wrong_over = "", False
        return {} if good and self._options.current.control.arms_hold_alone else found

    def _of_others(self, now: Now) -> dict[Reason, str]:
        config, found = self._config, {}
        topic = f" on {self._driver_topic}" if self._driver_topic else ""
        if self._driver_seen is None:
            found[Reason.DRIVER_MISSING] = f"no subscription has matched{topic}"
        elif _silent(self._driver_seen, config.driver, now):
            found[Reason.DRIVER_GONE] = _since(self._driver_seen, now) + topic
        if config.heartbeat and self._heartbeat_seen is None:
            found[Reason.HEARTBEAT_MISSING] = "none yet"
        elif config.heartbeat and _silent(self._heartbeat_seen, config.heartbeat, now):
            found[Reason.HEARTBEAT_LOST] = _since(self._heartbeat_seen, now)
        if self._dead_thread:
            found[Reason.THREAD_DIED] = self._dead_thread
        return found

    def _overdue(self, now: Now) -> str:
        """Describe how late the pending inference is; "" if it is not late."""
        if self._inferring_since is None or not _silent(self._inferring_since, self._config.inference, now):
            return ""
        waited = (now.steady - self._inferring_since) / _SECOND
        return f"an inference takes {waited:.3g} s, allowed {self._config.inference:g} s"

    def _check_clock(self, now: Now) -> None:
        """Detect a jump of the ROS clock, which holds until every input has arrived again."""
        last = self._last
        if last is not None and now.steady < last.steady:  # another thread read ``now`` before the last call
            return
        self._last = now
        if last is not None and last.ros and now.ros:
            passed, shown = now.steady - last.steady, now.ros - last.ros
            allowed = self._config.clock_jump * _SECOND
            if self._simulated:
                jumped = shown < 0 or shown > allowed + _FASTEST_SIMULATION * passed
            else:
                jumped = abs(shown - passed) > allowed
            if jumped:
                self._jump_told = False
                self._jump = f"{shown / _SECOND:+.3g} s in {passed / _SECOND:.3g} s"
                for each in (*self._cameras.values(), *self._arms.values()):
                    each.stamp, each.since_jump = None, False
        needed = [joints for joints in self._arms.values() if joints.needed]
        seen_anew = all(each.since_jump for each in (*self._cameras.values(), *needed))
        # The jump is reported at least once, even if all inputs arrive before active() is called.
        if self._jump and self._jump_told and seen_anew:
            self._jump = ""


def _silent(seen: int | None, timeout: float, now: Now) -> bool:
    """Return True if nothing has arrived for ``timeout`` seconds, or nothing has ever arrived."""
    return seen is None or now.steady - seen > timeout * _SECOND


def _since(seen: int | None, now: Now) -> str:
    return "none yet" if seen is None else f"none for {(now.steady - seen) / _SECOND:.3g} s"
