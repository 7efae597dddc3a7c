"""The table-top as MJCF and the arm as URDF, both written from the table in :mod:`vla_ros.sim.arm`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vla_ros.sim.arm import FINGER_NAMES, LINKS, PALETTE, URDF_PATH, Link, Part

SLOTS = 4
"""Objects that a scene can hold; every slot carries all shapes, of which one is shown and collides."""

SHAPES = ("cube", "cylinder", "ball")
COLOURS: dict[str, tuple[float, float, float]] = {
    "red": (0.86, 0.12, 0.10),
    "green": (0.12, 0.62, 0.20),
    "blue": (0.10, 0.28, 0.85),
    "yellow": (0.95, 0.80, 0.10),
}
"""Colours of the objects, RGB in [0, 1]."""

HALF_HEIGHT = {"cube": 0.020, "cylinder": 0.028, "ball": 0.023}
"""Height of the centre of a shape that rests on the table, metres."""
RADIUS = {"cube": 0.020, "cylinder": 0.020, "ball": 0.023}
"""Half width of a shape, metres."""

TIMESTEP = 0.002
"""Physics time step in seconds."""

CAMERAS = ("front", "wrist")

_OBJECT_MASS = 0.06
_FLOOR = -0.72


def _numbers(values: Sequence[float]) -> str:
    return " ".join(f"{value:.9g}" for value in values)


def _look_at(position: Sequence[float], target: Sequence[float]) -> str:
    """MuJoCo's ``xyaxes`` of a camera at ``position`` that looks at ``target`` with z up."""
    backward = np.subtract(position, target)
    right = np.cross([0.0, 0.0, 1.0], backward)
    right /= np.linalg.norm(right)
    up = np.cross(backward, right)
    return _numbers([*right, *(up / np.linalg.norm(up))])


# --- MJCF ---------------------------------------------------------------------------------------------------


def _mjcf_geom(part: Part, *, collides: bool) -> str:
    kind = f'class="{"pad" if collides else "shell"}" pos="{_numbers(part.position)}" material="{part.colour}"'
    if part.shape == "box":
        return f'<geom type="box" size="{_numbers([edge / 2 for edge in part.size])}" {kind}/>'
    if part.shape == "sphere":
        return f'<geom type="sphere" size="{_numbers(part.size)}" {kind}/>'
    radius, length = part.size
    turn = ' euler="1.5707963267948966 0 0"' if part.along_y else ""
    return f'<geom type="{part.shape}" size="{_numbers([radius, length / 2])}"{turn} {kind}/>'


def _mjcf_body(link: Link) -> list[str]:
    if link.name == "tool":
        return [f'<site name="tool" pos="{_numbers(link.offset)}" size="0.004" rgba="0 0 0 0"/>']
    lines = [f'<body name="{link.name}" pos="{_numbers(link.offset)}" gravcomp="1">']
    lines.append(
        f'<inertial pos="{_numbers(link.centre)}" mass="{link.mass:.9g}" diaginertia="{_numbers(link.inertia)}"/>'
    )
    if link.joint:
        kind = "hinge" if link.kind == "revolute" else "slide"
        lines.append(
            f'<joint name="{link.joint}" class="{link.kind}" type="{kind}" axis="{_numbers(link.axis)}" '
            f'range="{_numbers(link.limits)}"/>'
        )
    collides = link.name == "link_7" or link.kind == "prismatic"
    lines.extend(_mjcf_geom(part, collides=collides) for part in link.parts)
    if link.name == "link_7":
        # Beside the fingers, looking along the tool's axis: MuJoCo cameras look along their own -z.
        lines.append('<camera name="wrist" pos="-0.07 0 0.03" xyaxes="0 -1 0 -0.96 0 0.28" fovy="70"/>')
    for child in LINKS:
        if child.parent == link.name:
            lines.extend(_mjcf_body(child))
    return [*lines, "</body>"]


def _mjcf_slot(slot: int) -> list[str]:
    radius, height = RADIUS, HALF_HEIGHT
    inertia = _OBJECT_MASS * (2 * RADIUS["cube"]) ** 2 / 6
    return [
        f'<body name="object_{slot}" pos="{_numbers(parking(slot))}">',
        f'<freejoint name="object_{slot}"/>',
        f'<inertial pos="0 0 0" mass="{_OBJECT_MASS}" diaginertia="{_numbers([inertia] * 3)}"/>',
        f'<geom name="cube_{slot}" class="object" type="box" size="{_numbers([radius["cube"]] * 3)}"/>',
        f'<geom name="cylinder_{slot}" class="object" type="cylinder" '
        f'size="{_numbers([radius["cylinder"], height["cylinder"]])}"/>',
        f'<geom name="ball_{slot}" class="object" type="sphere" size="{_numbers([radius["ball"]])}"/>',
        "</body>",
    ]


def parking(slot: int) -> tuple[float, float, float]:
    """Where the object of an unused slot rests: on the floor behind the camera, metres."""
    return (3.0 + 0.2 * slot, 0.0, _FLOOR + HALF_HEIGHT["cylinder"])


def mjcf(samples: int = 0) -> str:
    """The whole scene: table, arm, cameras and :data:`SLOTS` objects, as MJCF.

    Args:
        samples: Of multi-sampling, 0 to 4. On a CPU (llvmpipe) 4 take five times as long as 0.

    ``angle="radian"`` matters: MuJoCo's default is degrees, and the arm would silently hardly move. Contact and
    solver settings make a held object stay held (elliptic cone, high impratio, a few no-slip iterations). The
    table is smoother than the fingers: if the product of both frictions exceeded 1, a finger that pushes down a
    little would lock an object against the table.
    """
    front = (1.12, 0.25, 0.66)
    materials = [
        f'<material name="{name}" rgba="{_numbers([*rgb, 1.0])}" specular="0.25" shininess="0.4"/>'
        for name, rgb in PALETTE.items()
    ]
    actuators = [
        f'<position name="{link.joint}" joint="{link.joint}" class="{link.kind}" '
        f'forcerange="{_numbers([-link.effort, link.effort])}" ctrlrange="{_numbers(link.limits)}"/>'
        for link in LINKS
        if link.joint
    ]
    lines = [
        '<mujoco model="vla_ros_table_top">',
        '<compiler angle="radian" autolimits="true"/>',
        f'<option timestep="{TIMESTEP}" integrator="implicitfast" cone="elliptic" impratio="10" '
        'noslip_iterations="2"/>',
        "<visual>",
        '<global offwidth="640" offheight="640"/>',
        f'<quality shadowsize="0" offsamples="{samples}" numslices="24" numstacks="12"/>',
        '<headlight ambient="0.45 0.45 0.45" diffuse="0.25 0.25 0.25" specular="0.1 0.1 0.1"/>',
        '<map znear="0.02" zfar="20"/>',
        "</visual>",
        "<default>",
        '<default class="shell"><geom contype="0" conaffinity="0" group="2"/></default>',
        '<default class="pad"><geom contype="1" conaffinity="2" condim="4" friction="1.5 0.02 0.0005" '
        'solref="0.01 1" solimp="0.95 0.99 0.001"/></default>',
        '<default class="object"><geom contype="2" conaffinity="3" condim="6" friction="1.2 0.01 0.002" '
        'solref="0.01 1" solimp="0.95 0.99 0.001"/></default>',
        '<default class="revolute"><joint armature="0.1" damping="1"/>'
        '<position kp="4000" dampratio="1"/></default>',
        '<default class="prismatic"><joint armature="0.01" solreflimit="0.006 1"/>'
        '<position kp="1000" dampratio="1"/></default>',
        "</default>",
        "<asset>",
        '<texture type="skybox" builtin="gradient" rgb1="0.80 0.86 0.92" rgb2="0.55 0.62 0.70" width="64" '
        'height="384"/>',
        '<material name="wood" rgba="0.80 0.70 0.56 1" specular="0.1" shininess="0.1"/>',
        '<material name="edge" rgba="0.55 0.45 0.33 1" specular="0.1" shininess="0.1"/>',
        '<material name="floor" rgba="0.62 0.65 0.68 1" specular="0" shininess="0"/>',
        *materials,
        "</asset>",
        "<worldbody>",
        '<light name="sun" type="directional" castshadow="false" pos="1 0.6 2" dir="-0.45 -0.3 -1" '
        'diffuse="0.6 0.6 0.58" specular="0.2 0.2 0.2"/>',
        f'<geom name="floor" type="plane" pos="0 0 {_FLOOR}" size="6 6 6" material="floor" contype="0" '
        'conaffinity="2"/>',
        '<geom name="table" type="box" pos="0.42 0 -0.02" size="0.58 0.62 0.02" material="wood" contype="0" '
        'conaffinity="3" priority="1" condim="6" friction="0.5 0.01 0.002" solref="0.01 1" '
        'solimp="0.95 0.99 0.001"/>',
        '<geom name="apron" type="box" pos="0.42 0 -0.07" size="0.56 0.60 0.03" material="edge" contype="0" '
        'conaffinity="0"/>',
        f'<camera name="front" pos="{_numbers(front)}" xyaxes="{_look_at(front, (0.47, 0.0, 0.105))}" fovy="36"/>',
        *_mjcf_body(LINKS[0]),
    ]
    for slot in range(SLOTS):
        lines.extend(_mjcf_slot(slot))
    left, right = FINGER_NAMES
    lines += [
        "</worldbody>",
        f'<equality><joint joint1="{right}" joint2="{left}" polycoef="0 1 0 0 0" solref="0.006 1"/></equality>',
        f"<actuator>{''.join(actuators)}</actuator>",
        "</mujoco>",
    ]
    return "\n".join(lines)


# --- URDF ---------------------------------------------------------------------------------------------------


def _urdf_solids(part: Part) -> list[tuple[str, tuple[float, float, float]]]:
    """(geometry element, position) of a part; a capsule, which URDF lacks, is a cylinder with two balls."""
    if part.shape == "box":
        return [(f'<box size="{_numbers(part.size)}"/>', part.position)]
    if part.shape == "sphere":
        return [(f'<sphere radius="{part.size[0]:.9g}"/>', part.position)]
    radius, length = part.size
    solids = [(f'<cylinder radius="{radius:.9g}" length="{length:.9g}"/>', part.position)]
    if part.shape == "capsule":
        x, y, z = part.position
        reach = (0.0, length / 2, 0.0) if part.along_y else (0.0, 0.0, length / 2)
        for sign in (-1, 1):
            end = (x + sign * reach[0], y + sign * reach[1], z + sign * reach[2])
            solids.append((f'<sphere radius="{radius:.9g}"/>', end))
    return solids


def _urdf_link(link: Link) -> list[str]:
    if not link.mass:
        return [f'  <link name="{link.name}"/>']
    xx, yy, zz = link.inertia
    lines = [
        f'  <link name="{link.name}">',
        f'    <inertial><origin xyz="{_numbers(link.centre)}"/><mass value="{link.mass:.9g}"/>'
        f'<inertia ixx="{xx:.9g}" iyy="{yy:.9g}" izz="{zz:.9g}" ixy="0" ixz="0" iyz="0"/></inertial>',
    ]
    for part in link.parts:
        turn = "1.5707963267948966 0 0" if part.along_y else "0 0 0"
        for geometry, position in _urdf_solids(part):
            place = f'<origin xyz="{_numbers(position)}" rpy="{turn}"/><geometry>{geometry}</geometry>'
            lines.append(f'    <visual>{place}<material name="{part.colour}"/></visual>')
            lines.append(f"    <collision>{place}</collision>")
    return [*lines, "  </link>"]


def _urdf_joint(link: Link) -> list[str]:
    name = link.joint or f"{link.name}_fixed"
    lines = [
        f'  <joint name="{name}" type="{link.kind}">',
        f'    <parent link="{link.parent}"/><child link="{link.name}"/><origin xyz="{_numbers(link.offset)}"/>',
    ]
    if link.joint:
        lines.append(
            f'    <axis xyz="{_numbers(link.axis)}"/><limit lower="{link.limits[0]:.9g}" '
            f'upper="{link.limits[1]:.9g}" velocity="{link.velocity:.9g}" effort="{link.effort:.9g}"/>'
        )
    return [*lines, "  </joint>"]


def urdf() -> str:
    """The arm alone as URDF, as it lies in ``assets/arm.urdf``."""
    lines = [
        '<?xml version="1.0"?>',
        "<!-- Written from vla_ros/sim/arm.py by: python -m vla_ros.sim.description -->",
        '<robot name="vla_ros_arm">',
    ]
    for name, rgb in PALETTE.items():
        lines.append(f'  <material name="{name}"><color rgba="{_numbers([*rgb, 1.0])}"/></material>')
    for link in LINKS:
        lines.extend(_urdf_link(link))
    for link in LINKS[1:]:
        lines.extend(_urdf_joint(link))
    return "\n".join([*lines, "</robot>"]) + "\n"


if __name__ == "__main__":
    URDF_PATH.write_text(urdf(), encoding="utf-8")
