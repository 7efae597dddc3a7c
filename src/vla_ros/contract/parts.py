"""The notation for the parts of a state vector or an action.

``ARM.QUANTITY(JOINTS)[FORM]``, joined by ``+``: ``left.joint_position[deg] + left.gripper[0..100]``. The arm of a
one-armed robot is called ``arm``. JOINTS selects joints of the arm (states only; default: all). FORM is a unit, a
range or a rotation's form. The default is the quantity's first form, except for an action's ``gripper`` and
``tip_delta``, which follow ``gripper.open_value``, ``gripper.closed_value`` and ``control.rotation``. Two parts
have no arm: ``feed.NAME[SIZE]`` is a message of ``robot.state_topics``; ``unused[SIZE]`` is zeros in a state and
ignored in an action.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from vla_ros.errors import ConfigError, did_you_mean

FEED, UNUSED = "feed", "unused"


@dataclass(frozen=True)
class Quantity:
    """A quantity of an arm, such as its joint positions."""

    forms: tuple[str, ...]  # units and forms by name; the first is the default. RANGE stands for ``[LOW..HIGH]``.
    size: int  # number of values; 0 for one per joint, -1 if the form decides (:data:`ROTATION_SIZES`)
    state: bool  # True if a state vector may contain it
    action: bool  # True if an action may contain it


RANGE = "LOW..HIGH"
ROTATION_SIZES = {
    "rotation_vector": 3,
    "quaternion_xyzw": 4,
    "quaternion_wxyz": 4,
    "euler_xyz": 3,  # fixed axes: roll, pitch, yaw
    "rot6d": 6,  # the first two rows of the matrix, as GR00T writes it
    "rot6d_columns": 6,  # the first two columns, as Zhou et al. 2019 write it
}
QUANTITIES = {
    "joint_position": Quantity(("rad", "deg", RANGE), 0, True, True),
    "joint_velocity": Quantity(("rad/s", "deg/s", "1"), 0, True, True),  # 1: a share of the velocity limit
    "joint_effort": Quantity(("Nm",), 0, True, False),
    "joint_delta": Quantity(("rad", "deg"), 0, False, True),
    "gripper": Quantity((RANGE, "m"), 1, True, True),  # [CLOSED..OPEN], by default 0..1
    "fingers": Quantity(("m",), 0, True, False),
    "tip_position": Quantity(("m",), 3, True, True),
    "tip_rotation": Quantity(tuple(ROTATION_SIZES), -1, True, True),
    "tip_delta": Quantity(("euler_xyz", "rotation_vector"), 6, False, True),
}
MOTIONS = ("joint_position", "joint_velocity", "joint_delta", "tip_delta", "tip_position")
"""Quantities that move an arm; an action has one per arm. ``tip_position`` requires ``tip_rotation`` as well."""
BY_OPTIONS = ("gripper", "tip_delta")
"""Quantities of an action whose form follows the options if the part has none."""

_PART = re.compile(r"(?P<head>\w+)(\.(?P<tail>\w+))?\s*(\((?P<joints>[^()]*)\))?\s*(\[(?P<form>[^\[\]]*)\])?")
_NUMBER = r"[-+]?\d+(?:\.\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\s*\.\.\s*({_NUMBER})")


@dataclass(frozen=True)
class Part:
    """A part of a state vector or an action."""

    arm: str  # the arm; "" for a feed and for unused numbers
    quantity: str  # a name of :data:`QUANTITIES`, ``feed`` or ``unused``
    # Unit, range or form of a rotation; the name of a feed; "" if the options decide (:data:`BY_OPTIONS`).
    form: str = ""
    joints: tuple[str, ...] = ()  # joints in this order; empty for all joints of the arm
    count: int = 0  # size of a feed (0: as many numbers as its message has) or of an unused part; otherwise 0

    def __str__(self) -> str:
        if self.quantity == UNUSED:
            return f"unused[{self.count}]"
        if self.quantity == FEED:
            return f"feed.{self.form}" + (f"[{self.count}]" if self.count else "")
        joints = f"({', '.join(self.joints)})" if self.joints else ""
        return f"{self.arm}.{self.quantity}{joints}" + (f"[{self.form}]" if self.form else "")

    @property
    def range(self) -> tuple[float, float] | None:
        """Ends of a form ``[LOW..HIGH]`` (of a gripper: closed and open); None for other forms."""
        found = _RANGE.fullmatch(self.form)
        return (float(found[1]), float(found[2])) if found else None

    def size(self, joints: int, fingers: int = 0) -> int:
        """Return the part's size, given an arm's numbers of joints and fingers; 0 for a feed of any length."""
        if self.quantity in (FEED, UNUSED):
            return self.count
        size = QUANTITIES[self.quantity].size
        if size < 0:
            return ROTATION_SIZES[self.form]
        return size or len(self.joints) or (fingers if self.quantity == "fingers" else joints)


def parse_parts(text: str, *, action: bool = False) -> tuple[Part, ...]:
    """Parse ``PART + PART + ...``; a caller adds the option's name to the ConfigErrors raised."""
    return tuple(_parse(term.strip(), action) for term in text.split("+"))


def _parse(term: str, action: bool) -> Part:
    match = _PART.fullmatch(term)
    if match is None:
        raise ConfigError(f"found {term!r}, expected ARM.QUANTITY[FORM] such as arm.joint_position[rad]")
    head, tail, form = match["head"], match["tail"], (match["form"] or "").strip()
    joints = tuple(name.strip() for name in match["joints"].split(",")) if match["joints"] else ()
    if head == UNUSED and tail is None:
        if not form.isdigit() or int(form) == 0:
            raise ConfigError(f"found {term!r}, expected the number of unused values, such as unused[2]")
        return Part("", UNUSED, count=int(form))
    if tail is None:
        raise ConfigError(f"found {term!r}, expected ARM.QUANTITY, such as arm.{head}")
    if head == FEED:
        if action or (form and not form.isdigit()):
            where = "a feed cannot be an action" if action else "expected its size, such as feed.force[6]"
            raise ConfigError(f"found {term!r}: {where}")
        return Part("", FEED, tail, count=int(form or 0))
    quantity = QUANTITIES.get(tail)
    if quantity is None or not (quantity.action if action else quantity.state):
        fitting = [name for name, known in QUANTITIES.items() if (known.action if action else known.state)]
        hint = did_you_mean(tail, fitting)
        role = "an action" if action else "a state"
        raise ConfigError(f"found {tail!r} in {term!r}, expected one of {', '.join(fitting)} in {role}{hint}")
    if joints and (action or quantity.size != 0):
        raise ConfigError(f"found joints in {term!r}; only a state's joint quantities accept a choice of joints")
    if action and tail in BY_OPTIONS and not form:
        return Part(head, tail)
    return Part(head, tail, _form(term, quantity, form), joints)


def _form(term: str, quantity: Quantity, form: str) -> str:
    if not form:
        return "0..1" if quantity.forms[0] == RANGE else quantity.forms[0]
    ends = _RANGE.fullmatch(form)
    if form in quantity.forms and form != RANGE:
        return form
    if ends and RANGE in quantity.forms:
        if float(ends[1]) == float(ends[2]):
            raise ConfigError(f"found {term!r}: both ends of the range are {ends[1]}")
        return f"{float(ends[1]):g}..{float(ends[2]):g}"
    raise ConfigError(f"found [{form}] in {term!r}, expected one of {', '.join(quantity.forms)}")
