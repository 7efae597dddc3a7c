"""The notation for the components of a state vector or an action.

``ARM.QUANTITY(JOINTS)[FORM]``, joined by ``+``: ``left.joint_position[deg] + left.gripper[0..100]``. The arm of a
one-armed robot is called ``arm``. JOINTS selects joints of the arm (states only; default: all). FORM is a unit, a
range or a rotation's form. The default is the quantity's first form, except for an action's ``gripper`` and
``tip_delta``, which follow ``gripper.open_value``, ``gripper.closed_value`` and ``control.rotation``. Two kinds
have no arm: ``topic.NAME[SIZE]`` is a message of ``robot.state_topics``; ``unused[SIZE]`` is zeros in a state and
ignored in an action.

A rotation has several numbers in every form but the 6-D ones. ``[FORM near 3.14 0 0]`` names those at an episode's
beginning, ``[FORM wrapped]`` always uses the same: an angle up to pi, roll and yaw within half a turn, w >= 0. A
range may be ``clipped``. ``fingers[m, -m]`` states the sign of each open finger.
"""

import math
import re
from dataclasses import dataclass

from vla_ros.config.sections import NUMBER
from vla_ros.errors import ConfigError, did_you_mean

TOPIC, UNUSED = "topic", "unused"


@dataclass(frozen=True)
class Quantity:
    """A quantity of an arm, such as its joint positions."""

    forms: tuple[str, ...]  # units and forms by name; the first is the default. RANGE stands for ``[LOW..HIGH]``.
    size: int  # number of values; 0 for one per joint, -1 if the form decides (:data:`ROTATION_SIZES`)
    state: bool  # True if a state vector may contain it
    action: bool  # True if an action may contain it


RANGE, SIGNS = "LOW..HIGH", "m, -m"
CLIPPED, WRAPPED = "clipped", "wrapped"
ROTATION_SIZES = {
    "rotation_vector": 3,
    "quaternion_xyzw": 4,
    "quaternion_wxyz": 4,
    "euler_xyz": 3,  # fixed axes: roll, pitch, yaw
    "rot6d": 6,  # the first two rows of the matrix, as GR00T writes it
    "rot6d_columns": 6,  # the first two columns, one after the other, as Zhou et al. 2019 write it
    "rot6d_interleaved": 6,  # the first two columns, row by row, as X-VLA writes it for CALVIN
}
QUANTITIES = {
    "joint_position": Quantity(("rad", "deg", RANGE), 0, True, True),
    "joint_velocity": Quantity(("rad/s", "deg/s", "1"), 0, True, True),  # 1: a share of the velocity limit
    "joint_effort": Quantity(("Nm",), 0, True, False),
    "joint_delta": Quantity(("rad", "deg"), 0, False, True),
    "gripper": Quantity((RANGE, "m"), 1, True, True),  # [CLOSED..OPEN], by default 0..1
    "fingers": Quantity(("m", SIGNS), 0, True, False),
    "tip_position": Quantity(("m",), 3, True, True),
    "tip_rotation": Quantity(tuple(ROTATION_SIZES), -1, True, True),
    "tip_delta": Quantity(("euler_xyz", "rotation_vector"), 6, False, True),
}
MOTIONS = ("joint_position", "joint_velocity", "joint_delta", "tip_delta", "tip_position")
"""Quantities that move an arm; an action has one per arm. ``tip_position`` requires ``tip_rotation`` as well."""
BY_OPTIONS = ("gripper", "tip_delta")
"""Quantities of an action whose form follows the options if the component has none."""

_COMPONENT = re.compile(r"(?P<head>\w+)(\.(?P<tail>\w+))?\s*(\((?P<joints>[^()]*)\))?\s*(\[(?P<form>[^\[\]]*)\])?")
_RANGE = re.compile(rf"({NUMBER})\s*\.\.\s*({NUMBER})")
_SIGNS = re.compile(r"-?m(\s*,\s*-?m)+")
_CHOICE = re.compile(rf"(.*?)\s+(?:({CLIPPED}|{WRAPPED})|near((?:\s+{NUMBER})+))")
_PLUS = re.compile(r"\+(?![^\[]*\])")  # a plus between brackets belongs to a number


@dataclass(frozen=True)
class Component:
    """A component of a state vector or an action."""

    arm: str  # the arm; "" for a topic and for unused numbers
    quantity: str  # a name of :data:`QUANTITIES`, ``topic`` or ``unused``
    # Unit, range or form of a rotation; the name of a topic; "" if the options decide (:data:`BY_OPTIONS`).
    form: str = ""
    joints: tuple[str, ...] = ()  # joints in this order; empty for all joints of the arm
    count: int = 0  # size of a topic (0: as many numbers as its message has) or of an unused component; otherwise 0
    choice: str = ""  # :data:`WRAPPED` for a rotation, :data:`CLIPPED` for a range, or ""
    near: tuple[float, ...] = ()  # a rotation's numbers, near those at an episode's beginning; () if not stated

    def __str__(self) -> str:
        if self.quantity == UNUSED:
            return f"unused[{self.count}]"
        if self.quantity == TOPIC:
            return f"topic.{self.form}" + (f"[{self.count}]" if self.count else "")
        joints = f"({', '.join(self.joints)})" if self.joints else ""
        near = " ".join(("near", *map(_exact, self.near))) if self.near else self.choice
        return f"{self.arm}.{self.quantity}{joints}" + (f"[{f'{self.form} {near}'.strip()}]" if self.form else "")

    @property
    def range(self) -> tuple[float, float] | None:
        """Ends of a form ``[LOW..HIGH]`` (of a gripper: closed and open); None for other forms."""
        match = _RANGE.fullmatch(self.form)
        return (float(match[1]), float(match[2])) if match else None

    @property
    def signs(self) -> tuple[float, ...]:
        """Sign of each open finger; empty if fingers are written as measured."""
        match = _SIGNS.fullmatch(self.form)
        return tuple(-1.0 if one.strip().startswith("-") else 1.0 for one in self.form.split(",")) if match else ()

    def size(self, joints: int, fingers: int = 0) -> int:
        """Return the number of values, given an arm's joints and fingers; 0 for a topic of any length."""
        if self.quantity in (TOPIC, UNUSED):
            return self.count
        size = QUANTITIES[self.quantity].size
        if size < 0:
            return ROTATION_SIZES[self.form]
        return size or len(self.joints) or (fingers if self.quantity == "fingers" else joints)


def parse_components(text: str, *, action: bool = False) -> tuple[Component, ...]:
    """Parse the parts of a state or action, ``COMPONENT + COMPONENT + ...`` (:class:`Component` has the syntax).

    With ``action``, parts that only a state can have are refused. A caller adds the option's name to ConfigErrors.
    """
    return tuple(_parse(term.strip(), action) for term in _PLUS.split(text))


def _parse(term: str, action: bool) -> Component:
    match = _COMPONENT.fullmatch(term)
    if match is None:
        raise ConfigError(f"found {term!r}, expected ARM.QUANTITY[FORM] such as arm.joint_position[rad]")
    head, tail, form = match["head"], match["tail"], (match["form"] or "").strip()
    joints = tuple(name.strip() for name in match["joints"].split(",")) if match["joints"] else ()
    if head == UNUSED and tail is None:
        if not form.isdigit() or int(form) == 0:
            raise ConfigError(f"found {term!r}, expected the number of unused values, such as unused[2]")
        return Component("", UNUSED, count=int(form))
    if tail is None:
        raise ConfigError(f"found {term!r}, expected ARM.QUANTITY, such as arm.{head}")
    if head == TOPIC:
        if action or (form and not form.isdigit()):
            where = "a topic cannot be an action" if action else "expected its size, such as topic.force[6]"
            raise ConfigError(f"found {term!r}: {where}")
        return Component("", TOPIC, tail, count=int(form or 0))
    quantity = QUANTITIES.get(tail)
    if quantity is None or not (quantity.action if action else quantity.state):
        fitting = [name for name, known in QUANTITIES.items() if (known.action if action else known.state)]
        hint = did_you_mean(tail, fitting)
        role = "an action" if action else "a state"
        raise ConfigError(f"found {tail!r} in {term!r}, expected one of {', '.join(fitting)} in {role}{hint}")
    if joints and (action or quantity.size != 0):
        raise ConfigError(f"found joints in {term!r}; only a state's joint quantities accept a choice of joints")
    if action and tail in BY_OPTIONS and not form:
        return Component(head, tail)
    match = _CHOICE.fullmatch(form)
    name, choice = (match[1], match[2] or "") if match else (form, "")
    near = tuple(map(float, match[3].split())) if match and match[3] else ()
    component = Component(head, tail, _form(term, quantity, name), joints, choice=choice, near=near)
    _check_choice(term, component)
    return component


def _check_choice(term: str, component: Component) -> None:
    """Check that a rotation has the numbers it may be near to, and that the choice fits the form."""
    size = ROTATION_SIZES.get(component.form, 0)
    unique = component.form.startswith("rot6d")
    if (component.near or component.choice == WRAPPED) and (not size or unique):
        why = "is unique" if unique else "is no rotation"
        raise ConfigError(f"found {term!r}: [{component.form}] {why}, so it takes neither near nor {WRAPPED}")
    if component.near and len(component.near) != size:
        raise ConfigError(
            f"found {term!r}: near {len(component.near)} numbers, expected {size} for {component.form}"
        )
    if component.choice == CLIPPED and component.range is None:
        raise ConfigError(f"found {term!r}: only a range such as [0..1] may be {CLIPPED}")


def _form(term: str, quantity: Quantity, form: str) -> str:
    if not form:
        return "0..1" if quantity.forms[0] == RANGE else quantity.forms[0]
    ends = _RANGE.fullmatch(form)
    if form in quantity.forms and form not in (RANGE, SIGNS):
        return form
    if SIGNS in quantity.forms and _SIGNS.fullmatch(form):
        return ", ".join(one.strip() for one in form.split(","))
    if ends and RANGE in quantity.forms:
        low, high = float(ends[1]), float(ends[2])
        if low == high or not math.isfinite(high - low):
            wrong = f"both ends of the range are {ends[1]}" if low == high else "the range is too large"
            raise ConfigError(f"found {term!r}: {wrong}")
        return f"{_exact(low)}..{_exact(high)}"
    raise ConfigError(f"found [{form}] in {term!r}, expected one of {', '.join(quantity.forms)}")


def _exact(number: float) -> str:
    """Return the text that reads back as the same number."""
    return repr(number).removesuffix(".0")
