"""Forward and inverse kinematics of a serial arm, with Pinocchio.

The inverse uses damped least squares (Nakamura and Hanafusa 1986; Wampler 1986). The damping grows as the
Jacobian's smallest singular value falls below a threshold (Maciejewski and Klein 1988), so the solution is exact
where the arm can follow and bounded where it cannot. Joints at a limit are left out, and the others take over.
"""

import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from vla_ros.errors import ConfigError, MissingDependencyError
from vla_ros.kinematics.rotations import Pose
from vla_ros.kinematics.urdf import Urdf, read_urdf, unknown_name
from vla_ros.types import FloatArray

_SINGULAR = 0.05  # damping sets in below this singular value (m/rad, or dimensionless)
_MAX_DAMPING = 0.05
_TOLERANCE = 1e-5  # m and rad
_MAX_ITERATION_STEP = 0.3  # rad or m per joint and iteration; the linearisation is valid about that far
_POSTURE_STEP = 0.02  # rad or m that spare degrees of freedom may drift per call
_REMEMBERED_POSES = 8


class Kinematics:
    """The chain of joints from a base to a tip link. Thread-safe; create it with :meth:`from_urdf`.

    Positions are in radians and metres, poses in the base frame.

    Attributes:
        joint_names: The arm's N joints in command order.
        position_low: Float64 [N], lower limits of the URDF (-1e6 for continuous joints).
        position_high: Float64 [N], upper limits.
        velocity_limits: Float64 [N], rad/s or m/s; infinite where the URDF says 0 (as MoveIt reads it).
        base_frame: Link in which poses are given.
        tip_frame: Link whose pose is computed.
    """

    def __init__(self, model: Any, joint_names: tuple[str, ...], base_frame: str, tip_frame: str) -> None:
        import pinocchio

        self._pinocchio = pinocchio
        self._model = model
        self._data = model.createData()
        self._tip = model.getFrameId(tip_frame, pinocchio.BODY)  # a joint may have the same name
        # Index of each joint in Pinocchio's vectors, which are in the URDF's order.
        self._order = np.array([model.joints[model.getJointId(name)].idx_q for name in joint_names])
        self._lock = threading.Lock()
        self._poses: OrderedDict[bytes, Pose] = OrderedDict()
        pinocchio.framesForwardKinematics(model, self._data, pinocchio.neutral(model))
        # The base does not move with the joints, so its pose does not depend on q.
        self._base = self._data.oMf[model.getFrameId(base_frame, pinocchio.BODY)].copy()
        turn = self._base.rotation.T
        self._turn = np.kron(np.eye(2), turn)  # [6, 6]: world axes to base axes, linear and angular
        # With fewer than six joints, the position of the tip is more important than its rotation.
        self._weights = np.array([1.0] * 3 + [1.0 if len(joint_names) >= 6 else 0.1] * 3)
        self.joint_names = joint_names
        self.base_frame = base_frame
        self.tip_frame = tip_frame
        self.position_low: FloatArray = model.lowerPositionLimit[self._order].copy()
        self.position_high: FloatArray = model.upperPositionLimit[self._order].copy()
        speeds = model.velocityLimit[self._order]
        self.velocity_limits: FloatArray = np.where(speeds > 0, speeds, np.inf)

    @classmethod
    def from_urdf(
        cls, urdf: str, joint_names: Sequence[str] = (), base_frame: str = "", tip_frame: str = ""
    ) -> "Kinematics":
        """Read a URDF; raises ConfigError if it cannot be read or does not fit the other arguments.

        Args:
            urdf: The path, or ``demo`` for the simulation's arm.
            joint_names: Joints in command order; empty for all movable joints from base to tip.
            base_frame: Empty for the root link.
            tip_frame: Empty for the end of the chain, before fingers branch off.
        """
        description = read_urdf(urdf)
        for option, link in (("robot.base_frame", base_frame), ("robot.tip_frame", tip_frame)):
            if link and link not in description.links:
                raise unknown_name(option, link, description.links, description.path)
        movable = {joint.name: joint for joint in description.joints if joint.is_movable}
        for name in joint_names:
            if name not in movable:
                raise unknown_name("robot.joint_names", name, movable, description.path)
        base = base_frame or description.root
        if not tip_frame:
            ends = [movable[name].child for name in joint_names]
            end = max(ends, key=lambda link: len(description.chain(base, link)), default="")
            tip_frame = description.tip_of(end or description.serial_end(base))
        chain = tuple(joint.name for joint in description.chain(base, tip_frame) if joint.is_movable)
        names = tuple(joint_names) or chain
        if not chain or set(names) != set(chain) or len(names) != len(chain):
            raise ConfigError(
                f"robot.joint_names: found {list(names)}, expected the movable joints from '{base}' to "
                f"'{tip_frame}', {list(chain)}, in any order"
            )
        return cls(_model(description, names), names, base, tip_frame)

    def forward(self, q: FloatArray) -> Pose:
        """Return the pose of the tip in the base frame at joint positions ``q`` [N]."""
        with self._lock:
            return self._pose(np.asarray(q, dtype=np.float64))

    def jacobian(self, q: FloatArray) -> FloatArray:
        """Return the tip's Jacobian [6, N] at ``q`` [N]: linear over angular, in base axes."""
        with self._lock:
            return self._jacobian(q)

    def solve(
        self,
        q: FloatArray,
        target: Pose,
        *,
        low: FloatArray | None = None,
        high: FloatArray | None = None,
        posture: FloatArray | None = None,
        posture_gain: float = 0.1,
        iterations: int = 10,
    ) -> FloatArray:
        """Return joint positions [N] near ``q`` at which the tip is as near to ``target`` as possible.

        The result is finite, within ``low`` and ``high`` (None: the URDF's limits), and no joint moves by more than
        0.3 rad or m per iteration. If the target is already reached, ``q`` is returned. Redundant joints drift
        towards ``posture`` [N], if given, by ``posture_gain`` times the distance, at most 0.02 rad or m per call.
        """
        low = self.position_low if low is None else low
        high = self.position_high if high is None else high
        now = _clip(q, low, high)
        best, best_error, stalled = now, math.inf, 0
        with self._lock:
            if _distance(self._pose(now), target) < _TOLERANCE:  # cheaper than _error(), which takes a logarithm
                return now
            for iteration in range(iterations + 1):
                error = self._error(now, target)
                size = math.sqrt(error @ error)
                stalled = stalled + 1 if size > 0.9 * best_error else 0
                if size < best_error:
                    best, best_error = now, size
                if size < _TOLERANCE or stalled == 2 or iteration == iterations:
                    break
                drift = None
                if iteration == 0 and posture is not None:
                    drift = _clip(posture_gain * (posture - now), -_POSTURE_STEP, _POSTURE_STEP)
                step = self._step(now, error, low, high, drift)
                if float(np.abs(step).max()) < 1e-9:
                    break
                now = _clip(now + step, low, high)
        return best

    def follow(
        self, q: FloatArray, twist: FloatArray, steps: FloatArray, dampings: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Return where servos that get a twist bring the arm, [D, T + 1, N], and its speeds there.

        A servo resolves the twist at each step, as MoveIt Servo does without a plugin for inverse kinematics: the
        least joint velocities, all of them slower if one would exceed its limit.

        Args:
            q: Joint positions [N] at the start.
            twist: Velocity of the tip [6], m/s over rad/s, in base axes.
            steps: Durations [T] in s.
            dampings: Of the servos' pseudo-inverses [D], as singular values of the Jacobian.
        """
        low, high = np.minimum(self.position_low, q), np.maximum(self.position_high, q)
        way = np.tile(q, (len(dampings), len(steps) + 1, 1))
        speeds = np.empty_like(way)
        for number, seconds in enumerate(steps.tolist()):
            speeds[:, number] = speed = self.resolve(way[:, number], twist, dampings)
            way[:, number + 1] = _clip(way[:, number] + seconds * speed, low, high)
        speeds[:, -1] = self.resolve(way[:, -1], twist, dampings)
        return way, speeds

    def resolve(self, q: FloatArray, twist: FloatArray, dampings: FloatArray) -> FloatArray:
        """Return the joint velocities [D, N] with which servos follow a ``twist`` [6] at ``q`` [D, N]."""
        full = np.empty_like(q)
        full[:, self._order] = q
        with self._lock:
            jacobian = np.array([self._world_jacobian(each) for each in full])[..., self._order]
        turned = jacobian.swapaxes(1, 2)
        squares = jacobian @ turned
        squares[:, range(6), range(6)] += (dampings**2)[:, None]
        twist = self._turn.T @ twist
        # [D, N, 6] @ [D, 6, 1]; NumPy 1 takes [6, 1] for six vectors of one number
        speed: FloatArray = (turned @ np.linalg.solve(squares, twist[None, :, None]))[..., 0]
        speed /= np.maximum(1.0, (np.abs(speed) / self.velocity_limits).max(axis=1, keepdims=True))
        return speed

    def _step(
        self, q: FloatArray, error: FloatArray, low: FloatArray, high: FloatArray, drift: FloatArray | None
    ) -> FloatArray:
        """Return a damped step; joints that would exceed a limit move to it, and the others take over."""
        jacobian = self._weights[:, None] * self._jacobian(q)  # [6, N]
        error = self._weights * error
        down, up = low - q, high - q
        step = _bounded(damped_least_squares(jacobian, error, drift))
        fixed = (step < down) | (step > up)
        while fixed.any() and not fixed.all():
            step = np.where(fixed, _clip(step, down, up), 0.0)
            rest = None if drift is None else drift[~fixed]
            step[~fixed] = _bounded(damped_least_squares(jacobian[:, ~fixed], error - jacobian @ step, rest))
            beyond = (step < down) | (step > up)
            if not beyond.any():
                return step
            fixed |= beyond
        return _clip(step, down, up)

    def _error(self, q: FloatArray, target: Pose) -> FloatArray:
        """Return the error [6] of the pose at ``q``: translation over rotation vector, in base axes."""
        pose = self._pose(q)
        error: FloatArray = np.empty(6)
        error[:3] = target.position - pose.position
        error[3:] = self._pinocchio.log3(target.rotation @ pose.rotation.T)
        return error

    def _pose(self, q: FloatArray) -> Pose:
        """Return the tip's pose; recent poses are cached, because a command uses the same few."""
        key = q.tobytes()
        pose = self._poses.get(key)
        if pose is None:
            pinocchio = self._pinocchio
            pinocchio.forwardKinematics(self._model, self._data, self._full(q))
            tip = self._base.actInv(pinocchio.updateFramePlacement(self._model, self._data, self._tip))
            pose = self._poses[key] = Pose(tip.translation.copy(), tip.rotation.copy())
            if len(self._poses) > _REMEMBERED_POSES:
                self._poses.popitem(last=False)
        return pose

    def _jacobian(self, q: FloatArray) -> FloatArray:
        result: FloatArray = (self._turn @ self._world_jacobian(self._full(q)))[:, self._order]
        return result

    def _world_jacobian(self, full: FloatArray) -> Any:
        """Return the tip's Jacobian in world axes; ``full`` and its columns are in Pinocchio's order."""
        aligned = self._pinocchio.ReferenceFrame.LOCAL_WORLD_ALIGNED
        return self._pinocchio.computeFrameJacobian(self._model, self._data, full, self._tip, aligned)

    def _full(self, q: FloatArray) -> FloatArray:
        """Convert positions from the order of ``joint_names`` to Pinocchio's order."""
        full: FloatArray = np.empty(len(self._order))
        full[self._order] = q
        return full


def damped_least_squares(jacobian: FloatArray, error: FloatArray, drift: FloatArray | None = None) -> FloatArray:
    """Return the joint step [N] for a tip error [6], with ``drift`` [N] in the null space.

    Damping near singularities bounds the amplification of the error by 1 / 0.05.
    """
    # The eigenvalues of J J^T [6, 6] are the squared singular values of J; an SVD of J would take twice as long.
    squares, directions = np.linalg.eigh(jacobian @ jacobian.T)
    damping = _MAX_DAMPING**2 * np.maximum(0.0, 1.0 - squares / _SINGULAR**2)
    if drift is not None:
        error = error - jacobian @ drift
    step: FloatArray = jacobian.T @ (directions @ ((directions.T @ error) / (squares + damping)))
    return step if drift is None else step + drift


def _clip(values: FloatArray, low: FloatArray | float, high: FloatArray | float) -> FloatArray:
    """Like `numpy.clip`, but five times as fast."""
    clipped: FloatArray = np.minimum(np.maximum(values, low), high)
    return clipped


def _distance(pose: Pose, target: Pose) -> float:
    """Return the distance between two poses (rad and m), with the chord instead of the angle."""
    shift = target.position - pose.position
    turn = (target.rotation - pose.rotation).ravel()  # its length is sqrt(8) sin(angle / 2)
    return math.sqrt(shift @ shift + 0.5 * (turn @ turn))


def _bounded(step: FloatArray) -> FloatArray:
    """Return ``step``, scaled down if necessary so that no joint exceeds an iteration's limit."""
    largest = float(np.abs(step).max())
    return step if largest <= _MAX_ITERATION_STEP else step * (_MAX_ITERATION_STEP / largest)


def _model(description: Urdf, joint_names: tuple[str, ...]) -> Any:
    """Return Pinocchio's model, with all joints but ``joint_names`` locked at zero."""
    try:
        import pinocchio
    except ImportError as error:
        raise MissingDependencyError(f"kinematics needs Pinocchio ({error}); run `pip install pin`") from None
    try:
        model = pinocchio.buildModelFromXML(description.text)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"robot.urdf: Pinocchio cannot read {description.path} ({error})") from None
    others = [index for index, name in enumerate(model.names) if index > 0 and name not in joint_names]
    if not others:
        return model
    try:
        return pinocchio.buildReducedModel(model, others, pinocchio.neutral(model))
    except ValueError as error:
        raise ConfigError(
            f"robot.urdf: Pinocchio cannot lock joints of {description.path} ({error}); a fixed joint and a link "
            "may not have the same name"
        ) from None
