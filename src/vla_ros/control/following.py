"""How far the commands of an arm may be from where it is, and from where they go on after a hold.

An arm under position control is never exactly where it was commanded to be: it lags while it moves, and sags or
sticks at rest. So commands go on from the last command, not from the measurement, and the distance between the two,
the following error, is bounded. Positions are in rad or m.
"""

import math

import numpy as np

from vla_ros.config import LimitsConfig
from vla_ros.control.envelope import Envelope, shorten_for_tip
from vla_ros.control.reasons import Reason, Refused
from vla_ros.kinematics.rotations import rotation_angle
from vla_ros.types import FloatArray

SETTLED = 1.0
"""Seconds for which an arm must have been held before it moves again after a following error."""

_BACK = 0.5  # share of the allowed error within which the arm must be by then
_REACHED = 1 - 1e-9  # share of the allowed error that counts as reached
_ORDINARY = 0.2  # share of the allowed error up to which an arm may sag; beyond it, it may be blocked or pushed
_WAY = 2.0  # steps by which commands between two steps give way to an arm that is pushed
_ROUNDING = 1e-9  # rad or m


class Following:
    """What is known of the distance between the commands and the measured positions of one arm.

    Used by :class:`~vla_ros.control.arm.ArmController` with position outputs.

    Args:
        names: The arm's N joints.
        sags: How far each joint may be from the held position without having been moved, [N].
    """

    def __init__(self, names: tuple[str, ...], sags: FloatArray) -> None:
        self._names, self._sags = names, sags
        self.held: FloatArray | None = None  # [N], the position that the arm holds, or held and has not left since
        self._sag = np.zeros(len(names))  # [N], where the arm was from its last command, if that was ordinary
        self._seen = 0, np.zeros(len(names))  # the newest joint state: its stamp, ns, and positions [N]
        self._lost: tuple[int, FloatArray] | None = None  # the joint state at which the arm did not follow
        # Of the step: the command at which it began [N], the largest step of a joint, and how far its commands may
        # be from the arm [N]; the same of the tip in m and rad, or None if it does not count.
        self._start, self.step = np.zeros(len(names)), 0.0
        self._reach = np.zeros(len(names))
        self._tip_reach: tuple[float, float] | None = None
        self.gave_way = False  # True if the newest command gave way, which is no speed that must be slowed down

    def origin(self, measured: FloatArray) -> FloatArray:
        """Return where the first command after a hold starts, [N]: at ``measured``, also if the arm has sagged.

        The position that was held was measured, too. If the arm did nothing but sag from it, the command starts
        there, because the driver keeps it: starting below it at each hold would let the arm sink.
        """
        return measured if self.held is None or self._was_moved(measured) else self.held

    def hold(self, last: FloatArray | None, measured: FloatArray, lead: FloatArray) -> FloatArray:
        """Return the position [N] to hold: ``measured``, or the one held before if the arm has only sagged from it.

        ``last`` is the last command [N] or None, and ``lead`` [N] the allowed following error.
        """
        if last is not None:
            sag = measured - last
            self._sag = np.where(np.abs(sag) <= _ORDINARY * lead, sag, 0.0)
        if self.held is None or self._was_moved(measured):
            self.held = measured
        return self.held

    def sent(self, positions: FloatArray) -> None:
        """Record a command [N]; one that leads away from the held position ends the hold."""
        if self.held is not None and (np.abs(positions - self.held) > self._sags).any():
            self.held = None

    @staticmethod
    def is_moved(last: FloatArray | None, measured: FloatArray, lead: FloatArray) -> bool:
        """Return True if an arm at rest is further from its last command [N] than it may sag: it was moved."""
        return last is not None and bool(np.any(np.abs(measured - last) > _ORDINARY * lead))

    @property
    def is_lost(self) -> bool:
        """True after a following error, until the arm may move again."""
        return self._lost is not None

    def check(self, measured: FloatArray, origin: FloatArray, lead: FloatArray, stamp: int) -> None:
        """Raise Refused (``following_error``) if the arm is ``lead`` [N] away from its last command ``origin`` [N].

        After that, it must have been held for :data:`SETTLED` seconds of the joint states' ``stamp`` (ns), and keep
        the held position to half of what is allowed. So neither an arm that is too weak for its load nor one that
        is blocked moves on by holding again and again.
        """
        self._seen = stamp, measured
        if self._lost is None:
            if (np.abs(origin - measured) < lead * _REACHED).all():
                return
            self._lost = self._seen
            raise self._refused(origin, measured, lead, "commanded to be at")
        since, where = self._lost
        held = where if self.held is None else self.held
        if np.any(np.abs(held - measured) > _BACK * lead):
            self._lost = stamp, where
            raise self._refused(held, measured, _BACK * lead, "held at")
        kept = (stamp - since) / 1e9
        if 0 <= kept < SETTLED:
            raise Refused(
                Reason.FOLLOWING_ERROR, f"the arm has kept its position for {kept:.2g} s, expected {SETTLED:g} s"
            )
        self._lost = None

    def begin_step(self, origin: FloatArray, measured: FloatArray, envelope: Envelope, *, tip: bool) -> None:
        """Record that a step begins at the command ``origin`` [N]; ``tip`` if the tip counts as well."""
        limits, kinematics = envelope.tip, envelope.kinematics
        self._start, self.step = origin, envelope.joints.step
        self._reach = np.maximum(np.abs(origin - measured) + self.step, _ORDINARY * envelope.joints.lead)
        self._tip_reach, self.gave_way = None, False
        if tip and kinematics is not None:
            here, there = kinematics.forward(origin), kinematics.forward(measured)
            far = math.dist(here.position.tolist(), there.position.tolist())
            turned = 0.0 if here is there else rotation_angle(here.rotation @ there.rotation.T)
            self._tip_reach = far + limits.max_translation_step, turned + limits.max_rotation_step

    def give_way(
        self,
        positions: FloatArray,
        measured: FloatArray,
        goal: FloatArray,
        origin: FloatArray,
        envelope: Envelope,
        dt: float,
    ) -> FloatArray:
        """Return a command between two steps, [N], that is no further from the arm than the step may lead.

        That is the following error with which the step began and ``limits.max_joint_step``, or what an arm may sag
        if that is more, and with ``control.delta_from: measured`` the same of the tip. Where somebody pushes the
        arm, the command gives way by up to two such steps.

        Raises:
            Refused: ``following_error``, if the limits of the command or these two steps do not suffice.
        """
        limits, kinematics, reach = envelope.joints, envelope.kinematics, self._reach
        near = np.minimum(np.maximum(positions, measured - reach), measured + reach)
        if self._tip_reach is not None and kinematics is not None:
            far, turned = self._tip_reach
            around = LimitsConfig(max_translation_step=far, max_rotation_step=turned)
            near, _ = shorten_for_tip(kinematics, measured, near, around)
        self.gave_way = bool((near != positions).any())
        if not self.gave_way:
            return positions
        most = np.minimum(dt * limits.velocity, limits.step)
        given = np.clip(near, np.maximum(origin - most, limits.low), np.minimum(origin + most, limits.high))
        beyond = np.maximum(np.minimum(self._start, goal) - given, given - np.maximum(self._start, goal))
        if (
            not envelope.allows_tip(origin, given)
            or np.any(np.abs(given - near) > _ROUNDING)
            or np.any(beyond > _WAY * self.step + _ROUNDING)
        ):
            self._lost = self._seen
            raise self._refused(origin, measured, reach, "commanded to be at")
        return given

    def _was_moved(self, measured: FloatArray) -> bool:
        """Return True if the arm is elsewhere than between the held position and where it would sag from it."""
        if self.held is None:
            return True
        away, low, high = measured - self.held, np.minimum(self._sag, 0.0), np.maximum(self._sag, 0.0)
        return bool(np.any((away < low - self._sags) | (away > high + self._sags)))

    def _refused(self, wanted: FloatArray, measured: FloatArray, allowed: FloatArray, what: str) -> Refused:
        error = np.abs(wanted - measured)
        worst = int((error / np.maximum(allowed, _ROUNDING)).argmax())
        return Refused(
            Reason.FOLLOWING_ERROR,
            f"joint '{self._names[worst]}' is at {measured[worst]:.4g} and was {what} {wanted[worst]:.4g}: "
            f"{error[worst]:.3g} apart, allowed {allowed[worst]:.3g} (limits.following_error)",
        )
