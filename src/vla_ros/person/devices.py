"""What a person holds in the hand: a leader arm, velocities of the tip, or a pose; and whether it is alive.

Pure logic: callers supply messages as numbers, and the time in seconds of a steady clock. A released dead-man
button, a stale, frozen, jumping or contested input raises Refused with a reason that begins with ``person_``.
"""

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vla_ros.config import LiveConfig
from vla_ros.config.takeover import PERSON_RATE_HZ, TakeoverConfig
from vla_ros.control.reasons import Reason, Refused
from vla_ros.kinematics.rotations import Pose, read_rotation, rotation_angle, write_rotation
from vla_ros.types import FloatArray

QUATERNION = "quaternion_xyzw"
_MEMORY = 2.0  # s; another publisher counts for this long after its last message
_HAND = 8.0  # rad/s or m/s; a faster leader arm has jumped
_STROKE = 2.0  # per second, how fast the buttons open and close the gripper
_DEADZONE = 0.1  # axes of the Joy nearer to 0 than this are 0
_GRIP = 0.1  # the leader's gripper moves the gripper once their openings are this near to each other


@dataclass(frozen=True)
class _Newest:
    """The newest message of a followed topic; times are seconds of a steady clock."""

    numbers: FloatArray
    at: float
    since: float  # when the numbers became these
    stamp: int  # of its header, nanoseconds; 0 if it has none
    wrong: str = ""  # why the numbers are unusable


class FollowedTopic:
    """One topic on which a person publishes; follows one publisher until :meth:`begin`. Thread-safe.

    Of its numbers, the first ``joints`` (None: all) may not jump: a person closes a gripper faster.
    """

    def __init__(self, topic: str, joints: int | None = None) -> None:
        self.topic, self._joints = topic, joints
        self._lock = threading.Lock()
        self._newest: _Newest | None = None
        self.begin()

    def begin(self) -> None:
        """Follow the publisher of the next message, and no other; it may be elsewhere."""
        with self._lock:
            self._jumped = True
            self._pinned: bytes | None = None
            self._other = -math.inf  # when another publisher was heard
            self._delay = math.inf  # s, the shortest of its messages, plus what its clock differs from ours

    def hear(
        self,
        numbers: FloatArray,
        now: float,
        publisher: bytes = b"",
        stamp: int = 0,
        wrong: str = "",
        published: int = 0,
    ) -> bool:
        """Take a message; return False if it is not used: of another publisher, or with an old stamp.

        A message is as old as its delay exceeds the shortest one; ``published`` is in nanoseconds of the
        publisher's clock, and 0 if the middleware does not say it.
        """
        with self._lock:
            if self._pinned is None:
                self._pinned = publisher
            if publisher != self._pinned:
                self._other = now
                return False
            last = self._newest
            if stamp and last is not None and last.stamp and stamp <= last.stamp and now - last.at < _MEMORY:
                return False
            if not wrong and not np.isfinite(numbers).all():
                wrong = f"number {int(np.argmin(np.isfinite(numbers)))} is not finite"
            since = now
            if last is not None and not wrong and not last.wrong and numbers.shape == last.numbers.shape:
                moved = np.abs(numbers - last.numbers)
                since = now if np.any(moved > 0) else last.since
                farthest = float(np.max(moved[: self._joints], initial=0.0))
                self._jumped |= farthest > 0.1 + _HAND * (now - last.at)
            late = 0.0
            if published:
                delay = now - published / 1e9
                self._delay = min(self._delay, delay)
                late = delay - self._delay
            self._newest = _Newest(numbers, now - late, since, stamp, wrong)
            return True

    def is_silent(self, now: float) -> bool:
        """Return True if the publisher that is followed has ended long ago."""
        with self._lock:
            return self._newest is None or now - self._newest.at > _MEMORY

    def jumped(self) -> bool:
        """Return True if the numbers have jumped since the last call."""
        with self._lock:
            jumped, self._jumped = self._jumped, False
            return jumped

    def read(self, now: float, stale: float) -> tuple[FloatArray, float]:
        """Return the newest numbers, and for how many seconds they have been the same.

        Raises Refused: ``person_contested``, ``person_stale`` or ``person_invalid``.
        """
        with self._lock:
            newest, other = self._newest, self._other
        if now - other < _MEMORY:
            raise Refused(
                Reason.PERSON_CONTESTED, f"{self.topic} has two publishers; end one, and request to correct again"
            )
        if newest is None or now - newest.at > stale:
            silent = "none yet" if newest is None else f"the newest is {now - newest.at:.3g} s old"
            raise Refused(Reason.PERSON_STALE, f"{self.topic}: {silent}")
        if newest.wrong:
            raise Refused(Reason.PERSON_INVALID, f"{self.topic}: {newest.wrong}")
        return newest.numbers, now - newest.since


class Buttons:
    """The buttons of a Joy, with the dead-man button's time. Thread-safe; ``followed`` has the Joy's axes.

    What is down when a Joy is heard for the first time, or again after ``takeover.stale_after``, may be stuck, or
    in nobody's hand: it counts once it was released.
    """

    def __init__(self, options: LiveConfig) -> None:
        config = options.current.takeover
        self._options, self.followed = options, FollowedTopic(config.joy)
        self._places = config.parsed_buttons
        self._pressed: frozenset[str] = frozenset()
        self._stuck: frozenset[str] = frozenset()  # down since the Joy was heard again
        self._heard = -math.inf  # when the last message arrived
        self._publisher: bytes | None = None  # whose buttons these are
        self._since: float | None = None  # when deadman was pressed

    def hear(
        self,
        buttons: Sequence[int],
        axes: FloatArray,
        now: float,
        publisher: bytes = b"",
        stamp: int = 0,
        published: int = 0,
    ) -> tuple[frozenset[str], bool]:
        """Take a message; return the buttons that it presses, and True if it releases deadman."""
        lacking = [name for name, index in self._places.items() if index >= len(buttons)]
        wrong = f"has {len(buttons)} buttons, so it lacks {', '.join(lacking)}" if lacking else ""
        if not self.followed.hear(axes, now, publisher, stamp, wrong, published):
            return frozenset(), False
        down = frozenset(name for name in self._places if self.has(buttons, name))
        again = publisher != self._publisher or now - self._heard > self._options.current.takeover.stale_after
        self._stuck = down if again else self._stuck & down
        pressed, before = down - self._stuck, self._pressed
        self._pressed, self._publisher, self._heard = pressed, publisher, now
        released = self._since is not None and "deadman" not in pressed
        if "deadman" not in pressed:
            self._since = None
        elif self._since is None:
            self._since = now
        return pressed - before, released

    def has(self, buttons: Sequence[int], name: str) -> bool:
        """Return True if the button is down in a message's ``buttons``."""
        index = self._places.get(name, len(buttons))
        return index < len(buttons) and bool(buttons[index])

    def is_pressed(self, name: str, now: float, config: TakeoverConfig) -> bool:
        """Return True if the button is down, as a live Joy says."""
        if name not in self._pressed:
            return False
        try:
            self.followed.read(now, config.stale_after)
        except Refused:
            return False
        return True

    def check(self, now: float, config: TakeoverConfig) -> FloatArray:
        """Return the axes while deadman is pressed.

        Raises the errors of :meth:`FollowedTopic.read`, and Refused (``person_released``, ``person_stuck``).
        """
        axes, _ = self.followed.read(now, config.stale_after)
        since = self._since
        if since is None:
            how = "is not pressed"
            if "deadman" in self._stuck:
                how = "was down when it was heard again; release it, then press it"
            raise Refused(Reason.PERSON_RELEASED, f"deadman of {self.followed.topic} {how}")
        if now - since > config.longest_press:
            raise Refused(
                Reason.PERSON_STUCK, f"pressed for {now - since:.3g} s; release it (takeover.longest_press)"
            )
        return axes


class Leader:
    """Follows a leader arm's joints, once it is where the arm is.

    ``followed`` has the arm's N joint positions as the leader shows them and, if ``has_gripper``, its opening.
    """

    def __init__(
        self, followed: FollowedTopic, names: Sequence[str], buttons: Buttons, *, has_gripper: bool
    ) -> None:
        self.followed, self._names, self._buttons, self._has_gripper = followed, tuple(names), buttons, has_gripper
        self.reset()

    def reset(self) -> None:
        """Require that the leader is brought to the arm again."""
        self._caught = self._gripped = False

    def action(
        self, now: float, here: FloatArray, opening: float, config: TakeoverConfig
    ) -> tuple[FloatArray, float]:
        """Return joint positions [N] and the opening for an arm that is commanded to be at ``here`` [N]."""
        numbers, same = self.followed.read(now, config.stale_after)
        count = len(self._names)
        target = numbers[:count]
        if self.followed.jumped():
            self.reset()
        if same > config.frozen_after:
            raise Refused(Reason.PERSON_FROZEN, f"{self.followed.topic}: the same positions for {same:.3g} s")
        reaches = config.allow_reach and self._buttons.is_pressed("reach", now, config)
        distance = np.abs(target - here)
        worst = int(np.argmax(distance))
        if self._caught and distance[worst] > config.lost_distance and not reaches:
            self.reset()
        if not self._caught:
            self._caught = bool(distance[worst] <= config.tolerance)
        if not (self._caught or reaches):
            name, own = self._names[worst], here[worst]
            found = f"'{name}' of the leader is at {target[worst]:.3g}, of the arm at {own:.3g}"
            raise Refused(Reason.PERSON_FAR, f"{found}; bring it within {config.tolerance:g} (takeover.tolerance)")
        if not self._has_gripper:
            return target, opening
        own = min(max(float(numbers[count]), 0.0), 1.0)
        self._gripped = self._gripped or (self._caught and abs(own - opening) <= _GRIP)
        return target, own if self._gripped else opening


class VelocityInput:
    """Moves the tip with the velocity of a Joy's axes or of a twist, while the dead-man button is pressed.

    ``followed`` has the twist, linear [3] and angular [3]; None for the axes of a Joy.
    """

    def __init__(self, followed: FollowedTopic | None, buttons: Buttons) -> None:
        self.followed, self._buttons = followed, buttons

    def reset(self) -> None:
        """Do nothing: a velocity does not depend on where the arm is."""

    def action(self, now: float, config: TakeoverConfig) -> FloatArray:
        """Return the tip's step [6] in one period: translation, then a rotation vector."""
        axes = self._buttons.check(now, config)
        followed = self._buttons.followed if self.followed is None else self.followed
        numbers, same = followed.read(now, config.stale_after)
        velocity = numbers if self.followed is not None else self._of_axes(axes, config)
        if np.any(velocity) and same > config.frozen_after:
            detail = f"{followed.topic}: the same motion for {same:.3g} s (takeover.frozen_after)"
            raise Refused(Reason.PERSON_FROZEN, detail)
        step: FloatArray = velocity / PERSON_RATE_HZ
        return step

    @staticmethod
    def _of_axes(axes: FloatArray, config: TakeoverConfig) -> FloatArray:
        shares = dict.fromkeys(("x", "y", "z", "roll", "pitch", "yaw"), 0.0)
        for axis in config.parsed_axes:
            if axis.index >= len(axes):
                found = f"{config.joy} has {len(axes)} axes, expected number {axis.index} for {axis.direction}"
                raise Refused(Reason.PERSON_INVALID, found)
            value = min(max(float(axes[axis.index]), -1.0), 1.0)
            beyond = max(abs(value) - _DEADZONE, 0.0) / (1.0 - _DEADZONE)
            shares[axis.direction] += math.copysign(beyond * axis.scale, value * axis.scale) if beyond else 0.0
        speeds = [config.linear_speed] * 3 + [config.angular_speed] * 3
        return np.array(
            [min(max(share, -1.0), 1.0) * speed for share, speed in zip(shares.values(), speeds, strict=True)]
        )


class PoseInput:
    """Moves the tip as a hand moves while the dead-man button is pressed.

    ``followed`` has position [3] and quaternion [4].
    """

    def __init__(self, followed: FollowedTopic, buttons: Buttons) -> None:
        self.followed, self._buttons = followed, buttons
        self.reset()

    def reset(self) -> None:
        """Relate the next pose to where the tip is then."""
        self._pressed: tuple[Pose, Pose] | None = None  # poses of the hand and of the tip at that time

    def action(self, now: float, tip: Pose, config: TakeoverConfig) -> FloatArray:
        """Return the tip's position and quaternion [7]; ``tip`` is where the arm is commanded to be."""
        try:
            self._buttons.check(now, config)
        except Refused:
            self.reset()
            raise
        numbers, same = self.followed.read(now, config.stale_after)
        if same > config.frozen_after:
            raise Refused(Reason.PERSON_FROZEN, f"{self.followed.topic}: the same pose for {same:.3g} s")
        hand = Pose(numbers[:3], read_quaternion(numbers[3:], self.followed.topic))
        if self.followed.jumped() or self._pressed is None:
            self._pressed = hand, tip
        first, start = self._pressed
        position = start.position + hand.position - first.position
        rotation = hand.rotation @ first.rotation.T @ start.rotation
        far, turned = math.dist(position.tolist(), tip.position.tolist()), rotation_angle(rotation @ tip.rotation.T)
        if max(far, turned) > config.lost_distance:
            self.reset()
            raise Refused(
                Reason.PERSON_FAR, f"the hand is {far:.3g} m and {turned:.3g} rad ahead (takeover.lost_distance)"
            )
        return np.concatenate([position, write_rotation(rotation, QUATERNION)])


def read_quaternion(numbers: FloatArray, topic: str) -> FloatArray:
    """Return the rotation [3, 3] of a quaternion x, y, z, w; raises Refused if it is not of length one."""
    length = float(np.linalg.norm(numbers))
    if not 0.9 < length < 1.1:
        raise Refused(Reason.PERSON_INVALID, f"{topic}: its quaternion has the length {length:.3g}, expected 1")
    return read_rotation(numbers, QUATERNION)


def move_gripper(opening: float, buttons: Buttons, now: float, config: TakeoverConfig) -> float:
    """Return the opening after the buttons open and close were held for a step."""
    way = buttons.is_pressed("open", now, config) - buttons.is_pressed("close", now, config)
    return min(max(opening + way * _STROKE / PERSON_RATE_HZ, 0.0), 1.0)
